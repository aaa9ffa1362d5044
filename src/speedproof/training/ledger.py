"""What a run counts: its windows, and a ledger of losses, rates and seconds that outlives the process."""

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speedproof.settings.recipe import Recipe
from speedproof.training.update import UpdateResult
from speedproof.training.window import Window

LONGEST_WINDOW = 100
"""Updates of a window, as in the published measurements."""


def window_ends(recipe: Recipe) -> list[list[int]]:
    """Blocks consumed at the end of each window, by virtual epoch.

    The windows of an epoch are about equally long: `LONGEST_WINDOW` updates, or a twentieth of a short budget, so that
    it too has a learning curve. They depend on the recipe alone, so a run that was stopped has the same ones.
    """
    size = recipe.blocks_per_update
    length = min(LONGEST_WINDOW, max(1, -(-recipe.blocks // size) // 20))
    ends, start = [], 0
    for end in recipe.epoch_ends():
        updates = -(-(end - start) // size)
        count = max(1, round(updates / length))
        ends.append([min(end, start + size * (updates * (k + 1) // count)) for k in range(count)])
        start = end
    return ends


@dataclass
class Tally:
    """A window as far as it has come; the run may save or stop inside it, so it is filled piece by piece."""

    targets: int = 0
    updates: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    grad_norm: float = 0.0
    data_wait_s: float = 0.0

    def count(self, update: UpdateResult) -> None:
        """Count an update. One by one, so that pieces sum to the same bits as the window in one go."""
        self.targets += update.targets
        self.updates += 1
        self.loss_sum += update.loss_sum
        self.grad_norm = update.grad_norm

    def add_time(self, piece: Window) -> None:
        """Add the seconds of the updates counted since the last call."""
        self.seconds += piece.seconds
        self.data_wait_s += piece.data_wait_s

    def line(self) -> dict[str, float]:
        """The window's own part of its line in metrics.jsonl."""
        return {
            "loss": self.loss_sum / self.targets,
            "grad_norm": self.grad_norm,
            "seconds": self.seconds,
            "targets_per_s": self.targets / self.seconds,
            "data_wait_s": self.data_wait_s,
        }


@dataclass
class Ledger:
    """JSON-ready account of a run, saved with each state; seconds add up over the processes that worked on it."""

    epoch_losses: list[list[float]] = field(default_factory=list)
    steady_rates: list[float] = field(default_factory=list)
    first_rate: float | None = None
    first_window_s: float | None = None
    training_update_s: float = 0.0
    epoch_validation_s: float = 0.0
    checkpoint_s: float = 0.0
    subset_scan_s: float = 0.0
    startup_s: float = 0.0
    training_phase_s: float = 0.0
    process_s: float = 0.0
    waited_for_device_s: float = 0.0
    metrics_bytes: int = 0

    def close_window(self, tally: Tally, compiling: bool) -> None:
        """Count a finished window; `compiling`: it was the first of its process, and so holds the compilation."""
        self.training_update_s += tally.seconds
        rate = tally.targets / tally.seconds
        if not compiling:
            self.steady_rates.append(rate)
        if self.first_rate is None:
            self.first_rate, self.first_window_s = rate, tally.seconds

    def timings(self, targets: int) -> dict[str, Any]:
        """Rates and seconds as result.json names them, once `targets` are trained.

        The aggregate rate is over the windows alone, the elapsed one over the whole training phase. A budget of a
        single window has no steady one; its only rate then stands in.
        """
        return {
            "median_targets_per_s": statistics.median(self.steady_rates or [self.first_rate]),
            "aggregate_targets_per_s": targets / self.training_update_s,
            "elapsed_targets_per_s": targets / self.training_phase_s,
            "training_update_s": self.training_update_s,
            "first_window_s": self.first_window_s,
            "epoch_validation_s": self.epoch_validation_s,
            "checkpoint_s": self.checkpoint_s,
            "subset_scan_s": self.subset_scan_s,
            "startup_s": self.startup_s,
            "training_phase_s": self.training_phase_s,
            "process_s": self.process_s,
            "waited_for_device_s": self.waited_for_device_s,
        }


_IMPORTED = time.perf_counter()


def process_seconds() -> float:
    """Seconds since this process was created; since this module was imported where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return time.perf_counter() - _IMPORTED
