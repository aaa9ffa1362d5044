"""Updates that the host does not wait for: the device itself refuses what is not finite, and the host looks later."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedproof.data.loader import device_ids

LATCH_UPDATES = 16
"""Updates after which the host looks at the latest: by so many a nonfinite one may be reported late."""

WARM_UP = 3
"""Updates before a capture, in which kernels are chosen and workspaces allocated."""


class Latch:
    """Closes at the first nonfinite update and stays closed: neither that one nor any after it is applied.

    AdamW reads the latch on the device and leaves weights, moments and its step count alone while it is closed.
    """

    def __init__(self, adamw: torch.optim.AdamW, device: torch.device):
        self.closed = torch.zeros((), device=device)
        """1 once an update was not finite, else 0."""
        self.rate = torch.zeros((), device=device)
        """The learning rate, on the device since a captured update cannot be given another number."""
        self._found = torch.zeros(2, device=device)
        self._history = torch.zeros(LATCH_UPDATES, 2, device=device)
        self.pending: list[tuple[Any, int]] = []
        """Rows and targets of the updates since the host last looked."""
        adamw.found_inf = self.closed
        for group in adamw.param_groups:
            group["lr"] = self.rate

    def look(self, loss_sum: Tensor, norm: Tensor) -> None:
        """Close where an update's summed loss or gradient norm is not finite. No sync; may be captured."""
        torch.stack((loss_sum, norm), out=self._found)
        self.closed.copy_(torch.maximum(self.closed, (~self._found.isfinite()).any().float()))

    def note(self, rows: Any, targets: int) -> None:
        """Keep what `look` saw, and the rows it was seen with, until the host reads."""
        self._history[len(self.pending)].copy_(self._found)
        self.pending.append((rows, targets))

    @property
    def full(self) -> bool:
        return len(self.pending) == LATCH_UPDATES

    def read(self) -> list[tuple[Any, int, float, float]]:
        """Rows, targets, summed loss and gradient norm of the pending updates up to the first that was not finite.

        The host sync of these updates. The latch is open afterwards.
        """
        found = self._history[: len(self.pending)].tolist()
        seen = [(*pending, *values) for pending, values in zip(self.pending, found, strict=True)]
        bad = next((i for i, (_, _, loss, norm) in enumerate(seen) if not math.isfinite(loss + norm)), len(seen))
        if bad < len(seen):
            self.closed.zero_()
        return seen[: bad + 1]


class CapturedUpdate:
    """A whole update of one shape as one CUDA graph: forward, backward, norm, latch, AdamW."""

    def __init__(self, update: Callable[[Tensor], None], latch: Latch, shape: tuple[int, int], device: torch.device):
        """`update` takes ids int64 `shape` on the device and never syncs. Capturing changes nothing of the model."""
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        open_or_not = latch.closed.clone()
        latch.closed.fill_(1.0)  # behind a closed latch a warm-up applies nothing
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                update(self._ids)
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            update(self._ids)
        latch.closed.copy_(open_or_not)

    def __call__(self, rows: Any) -> None:
        """Run the update on other rows of the same shape."""
        self._ids.copy_(device_ids(rows, self._ids.device))
        self._graph.replay()
