"""Training blocks from tokens that lie on the device whole: the same order as the loader's, gathered there."""

from typing import Any

import numpy as np
import torch

from speedproof.core.errors import UserError
from speedproof.data.loader import check_budget, range_blocks, shuffled
from speedproof.data.token_cache import Tokens
from speedproof.settings.recipe import Recipe

LARGEST_SHARE = 0.5
"""Share of the device's free memory that tokens may take; the rest is for what they are trained with."""


class ResidentBatches:
    """`TrainingBatches` without a reading thread and without copies from the host.

    The budget's tokens are kept as they are stored, two bytes each, and only what is taken becomes int64.
    Raises: UserError as TrainingBatches does, and naming execution.tokens where they do not fit.
    """

    def __init__(
        self,
        tokens: Tokens,
        recipe: Recipe,
        cursor: int = 0,
        *,
        device: torch.device | str,
        repeat: bool = False,
    ):
        check_budget(tokens, recipe, cursor, repeat)
        device = torch.device(device)
        self._blocks, self._repeat, context = recipe.blocks, repeat, recipe.model.context_length
        size = self._blocks * context + 1
        if device.type == "cuda":
            _check_fit(2 * size, torch.cuda.mem_get_info(device)[0])
        ids = torch.from_numpy(tokens.read(0, size).view(np.int16)).to(device)
        self._rows = ids.unfold(0, context + 1, context)
        """Overlapping view (blocks, context + 1) of all ids."""
        step = range_blocks(recipe)
        starts = range(0, self._blocks, step)
        order = [start + shuffled(recipe, n, min(step, self._blocks - start)) for n, start in enumerate(starts)]
        self._order = torch.from_numpy(np.concatenate(order)).to(device)
        self.cursor = cursor
        """Blocks taken so far."""

    def take(self, blocks: int) -> torch.Tensor:
        """The next `blocks` blocks, int64 (blocks, context + 1) on the device. Raises IndexError past the budget."""
        if self.cursor + blocks > self._blocks and not self._repeat:
            raise IndexError(f"blocks {self.cursor} to {self.cursor + blocks} of a budget of {self._blocks}")
        pieces, left = [], blocks
        while left:
            place = self.cursor % self._blocks
            pieces.append(self._order[place : place + left])
            left -= len(pieces[-1])
            self.cursor += len(pieces[-1])
        rows = self._rows[pieces[0] if len(pieces) == 1 else torch.cat(pieces)]
        return rows.to(torch.int64) & 0xFFFF  # few operations know unsigned 16 bits; the mask takes the sign off again

    def state_dict(self) -> dict[str, Any]:
        """What later batches need to go on without replaying: the cursor."""
        return {"cursor": self.cursor}

    def close(self) -> None:
        """There is no thread to stop."""

    def __enter__(self) -> "ResidentBatches":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _check_fit(needed: int, free: int) -> None:
    """Raise UserError where `needed` bytes are too many for a device with `free` ones."""
    if needed > LARGEST_SHARE * free:
        raise UserError(
            f"execution.tokens: the budget's tokens take {needed / 2**30:.2f} GiB, more than {LARGEST_SHARE:.0%} of "
            f"the {free / 2**30:.2f} GiB that are free on the device; use host"
        )
