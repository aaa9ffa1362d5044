"""The window of updates: the one hot loop, shared by training and measuring."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from speedproof.training.update import NonFinite, Updater, UpdateResult


@dataclass(frozen=True)
class Window:
    """Some updates between two synchronised clock readings.

    `loss` is the mean over targets in nats, `grad_norm` the last update's, `data_wait_s` the part of `seconds` spent
    waiting for rows.
    """

    targets: int
    updates: int
    seconds: float
    loss: float
    grad_norm: float
    data_wait_s: float

    @property
    def targets_per_s(self) -> float:
        return self.targets / self.seconds


class Batches(Protocol):
    """Where rows come from; see speedproof.data.loader. `cursor` counts the blocks taken, and may be put back."""

    cursor: int

    def take(self, blocks: int) -> np.ndarray: ...


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def collector_frozen() -> Iterator[None]:
    """Keep Python's garbage collector out of the hot loop: it would walk all that torch has made, at times of its own.

    Reference counts free what an update makes, so nothing piles up meanwhile.
    """
    gc.collect()  # what is garbage now would be frozen with the rest
    gc.freeze()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def put_back(batches: Batches) -> Iterator[None]:
    """Where an update is not finite, let the cursor stand before it, as the counters do."""
    try:
        yield
    except NonFinite as stop:
        batches.cursor -= stop.blocks
        raise


def run_window(
    updater: Updater,
    batches: Batches,
    plan: Iterable[int],
    clock: Callable[[], float] = time.perf_counter,
    on_update: Callable[[UpdateResult], None] | None = None,
) -> Window:
    """Run one update for each number of blocks in `plan`, and time them together.

    The clock is read after synchronising, at the two edges; in between it only adds up the wait for rows.
    Raises: what `Updater.step` raises; ValueError for an empty plan.
    """
    results: list[UpdateResult] = []
    wait = 0.0

    def tell(known: list[UpdateResult]) -> None:
        results.extend(known)
        for result in known if on_update else ():
            on_update(result)

    with collector_frozen(), put_back(batches):
        synchronise(updater.device)
        begin = clock()
        for blocks in plan:
            asked = clock()
            rows = batches.take(blocks)
            wait += clock() - asked
            tell(updater.submit(rows))
        tell(updater.finish())
        synchronise(updater.device)
        seconds = clock() - begin
    if not results:
        raise ValueError("a window needs at least one update")
    targets = sum(result.targets for result in results)
    loss = sum(result.loss_sum for result in results) / targets
    return Window(targets, len(results), seconds, loss, results[-1].grad_norm, wait)
