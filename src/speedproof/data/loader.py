"""From the token cache to microbatches: a seeded order with a cursor, validation blocks, the copy to the device.

A block is `context` targets: token i predicts token i + 1, so block k of a split covers tokens k·T up to and with
k·T + T, and its row holds T + 1 of them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from speedproof.core.errors import UserError
from speedproof.data.token_cache import Tokens
from speedproof.settings.recipe import Recipe

IGNORED = -100
"""Target that counts neither in a loss nor in a gradient."""

MEBIBYTE = 2**20


def _windows(buffer: np.ndarray, context: int) -> np.ndarray:
    """Rows of neighbouring blocks as an overlapping view (n, context + 1) of n·context + 1 tokens."""
    return np.lib.stride_tricks.sliding_window_view(buffer, context + 1)[::context]


def check_budget(tokens: Tokens, recipe: Recipe, cursor: int, repeat: bool) -> None:
    """Raise UserError where the split is too short for the recipe's budget, or the cursor lies outside of it."""
    context = recipe.model.context_length
    possible = max(0, len(tokens) - 1) // context
    if recipe.blocks > possible:
        raise UserError(
            f"recipe.budget_targets: {recipe.budget_targets:,} targets are more than the training data's "
            f"{possible * context:,} (whole blocks of {context}); lower the budget to that, "
            f"or raise data.train_files"
        )
    if not 0 <= cursor <= recipe.blocks and not repeat:
        raise UserError(f"cursor: found {cursor}; the budget holds {recipe.blocks} blocks")


def range_blocks(recipe: Recipe) -> int:
    """Blocks of a range, which are shuffled together."""
    return max(1, recipe.shuffle_buffer_mib * MEBIBYTE // 2 // recipe.model.context_length)


def shuffled(recipe: Recipe, number: int, count: int) -> np.ndarray:
    """Order of the `count` rows of range `number`, int64 (count,)."""
    return np.random.Generator(np.random.PCG64([recipe.seed, number])).permutation(count)


class TrainingBatches:
    """The training blocks of a recipe in their seeded order, from any cursor on.

    The first `recipe.blocks` blocks of the split are cut into ranges of `shuffle_buffer_mib`; ranges are read in
    order, the rows of range r are shuffled by PCG64([seed, r]), and a thread reads the next range meanwhile. The
    order hence depends on the seed, the buffer and the tokens alone, never on how many blocks are taken at a time.

    `repeat` starts the same order again where the budget ends, for measurements longer than the budget.

    Raises: UserError naming recipe.budget_targets when the split is too short.
    """

    def __init__(self, tokens: Tokens, recipe: Recipe, cursor: int = 0, *, repeat: bool = False):
        self._tokens, self._recipe, self._repeat = tokens, recipe, repeat
        self._context, self._blocks = recipe.model.context_length, recipe.blocks
        check_budget(tokens, recipe, cursor, repeat)
        self._range_blocks = range_blocks(recipe)
        self.cursor = cursor
        """Blocks taken so far."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="speedproof-loader")
        self._range, self._rows, self._order = -1, np.empty(0), np.empty(0)
        self._next: tuple[int, Future] | None = None
        self._prefetch(cursor % self._blocks // self._range_blocks)

    def take(self, blocks: int) -> np.ndarray:
        """The next `blocks` blocks, uint16 (blocks, context + 1). Raises IndexError past the budget."""
        if self.cursor + blocks > self._blocks and not self._repeat:
            raise IndexError(f"blocks {self.cursor} to {self.cursor + blocks} of a budget of {self._blocks}")
        out = np.empty((blocks, self._context + 1), dtype=np.uint16)
        done = 0
        while done < blocks:
            place = self.cursor % self._blocks
            self._load(place // self._range_blocks)
            first = place % self._range_blocks
            chosen = self._order[first : first + blocks - done]
            out[done : done + len(chosen)] = self._rows[chosen]
            done += len(chosen)
            self.cursor += len(chosen)
        return out

    def _read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Range `number`: its rows as an overlapping view (n, context + 1) of one buffer, and their order (n,)."""
        start = number * self._range_blocks
        count = min(self._range_blocks, self._blocks - start)
        buffer = self._tokens.read(start * self._context, count * self._context + 1)
        return _windows(buffer, self._context), shuffled(self._recipe, number, count)

    def _prefetch(self, number: int) -> None:
        if self._next is None or self._next[0] != number:
            self._next = (number, self._reader.submit(self._read, number))

    def _load(self, number: int) -> None:
        if number == self._range:
            return
        self._prefetch(number)
        self._rows = self._order = np.empty(0)  # free the old range first: two are held at most
        self._rows, self._order = self._next[1].result()
        self._range, self._next = number, None
        following = number + 1
        if following * self._range_blocks < self._blocks:
            self._prefetch(following)
        elif self._repeat and number:
            self._prefetch(0)

    def state_dict(self) -> dict[str, Any]:
        """What a later `TrainingBatches(…, cursor)` needs to go on without replaying: the cursor."""
        return {"cursor": self.cursor}

    def close(self) -> None:
        """Stop the reading thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "TrainingBatches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SyntheticBatches:
    """Random tokens in the place of `TrainingBatches`: one batch, made once and given again and again."""

    def __init__(self, recipe: Recipe, seed: int):
        generator = np.random.Generator(np.random.PCG64(seed))
        shape = (recipe.blocks_per_update, recipe.model.context_length + 1)
        self._rows = generator.integers(0, recipe.model.vocab_size, shape, dtype=np.uint16)
        self.cursor = 0

    def take(self, blocks: int) -> np.ndarray:
        """`blocks` rows of the batch, uint16 (blocks, context + 1), its first again after its last."""
        self.cursor += blocks
        if blocks <= len(self._rows):
            return self._rows[:blocks]
        return self._rows[np.arange(blocks) % len(self._rows)]

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def close(self) -> None:
        pass

    def __enter__(self) -> "SyntheticBatches":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def validation_targets(tokens: Tokens) -> int:
    """Targets of a whole split: every token but the first."""
    return max(0, len(tokens) - 1)


def validation_batches(
    tokens: Tokens, context: int, batch: int, blocks: Sequence[int] | np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of a split in original order, `batch` at a time; all of them, or those numbered in `blocks`.

    Yields rows, uint16 (b, context + 1), and the targets of each row that count, int64 (b,): `context`, but for the
    last block of the split, whose padding does not count. The last batch may be smaller.
    """
    targets = validation_targets(tokens)
    numbers = np.arange(-(-targets // context)) if blocks is None else np.asarray(blocks, dtype=np.int64)
    for start in range(0, len(numbers), batch):
        chosen = numbers[start : start + batch]
        valid = np.minimum(context, targets - chosen * context)
        rows = np.zeros((len(chosen), context + 1), dtype=np.uint16)
        if blocks is None:
            # Neighbours are read in one piece: a file is opened once a batch and not once a block.
            buffer = np.zeros(len(chosen) * context + 1, dtype=np.uint16)
            buffer[: valid.sum() + 1] = tokens.read(int(chosen[0]) * context, int(valid.sum()) + 1)
            rows[:] = _windows(buffer, context)
        else:
            for row, number, count in zip(rows, chosen, valid, strict=True):
                row[: count + 1] = tokens.read(int(number) * context, int(count) + 1)
        yield rows, valid


def subset_blocks(tokens: Tokens, recipe: Recipe) -> np.ndarray:
    """The whole validation blocks of an epoch boundary, drawn once by `subset_seed`, sorted, int64 (subset_blocks,).

    Raises: UserError naming recipe.subset_blocks when the split holds fewer.
    """
    whole = validation_targets(tokens) // recipe.model.context_length
    if not whole:
        raise UserError(
            f"data.validation_files: the validation data's {validation_targets(tokens)} targets do not fill a single "
            f"block of {recipe.model.context_length}; raise it, or use files with more text"
        )
    if recipe.subset_blocks > whole:
        raise UserError(
            f"recipe.subset_blocks: {recipe.subset_blocks} is more than the {whole} whole blocks of the validation "
            f"data; use at most {whole}, or raise data.validation_files"
        )
    generator = np.random.Generator(np.random.PCG64(recipe.subset_seed % 2**64))
    return np.sort(generator.permutation(whole)[: recipe.subset_blocks])


def to_device(
    rows: np.ndarray | torch.Tensor, valid: np.ndarray | None, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 (b, T) each, on `device` from uint16 rows (b, T + 1); only here are ids 64 bits wide.

    Targets past `valid` (b,) become -100.
    """
    device = torch.device(device)
    ids = device_ids(rows, device)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if valid is not None and (valid < targets.shape[1]).any():
        limit = torch.from_numpy(np.ascontiguousarray(valid, dtype=np.int64)).to(device)
        beyond = torch.arange(targets.shape[1], device=device) >= limit[:, None]
        targets = targets.masked_fill(beyond, IGNORED)
    return inputs, targets


def device_ids(rows: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Ids int64 (b, T + 1) on `device` from uint16 rows.

    On CUDA the 2-byte ids are copied from pinned memory without waiting. Rows that are an int64 tensor lie on the
    device already, as a synthetic batch does.
    """
    if isinstance(rows, torch.Tensor):
        return rows
    if device.type == "cuda":
        # As signed 16 bits: few operations know unsigned ones. The mask takes the sign off again.
        narrow = torch.from_numpy(np.ascontiguousarray(rows).view(np.int16)).pin_memory()
        return narrow.to(device, non_blocking=True).to(torch.int64) & 0xFFFF
    return torch.from_numpy(rows.astype(np.int64)).to(device)
