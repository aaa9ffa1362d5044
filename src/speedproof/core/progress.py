"""How long steps show where they are: a bar on a terminal, a line now and then in a log."""

import sys
import time
from types import TracebackType


class Progress:
    """Progress of a step over `total` units (targets, bytes, …), with rate and time left, on stderr.

    On a terminal it is a bar; elsewhere one line every `every_s` seconds, so that a log stays readable.
    """

    def __init__(self, label: str, total: float, unit: str, every_s: float = 15.0):
        self.label, self.total, self.unit, self.every_s = label, total, unit, every_s
        self.done = 0.0
        self._bar = None

    def __enter__(self) -> "Progress":
        self._start = self._last = time.monotonic()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f} %  {task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total, rate="")
        return self

    def update(self, done: float, note: str = "") -> None:
        """Say that `done` units of the total are done; `note` is shown behind the rate."""
        self.done = done
        now = time.monotonic()
        rate = done / max(now - self._start, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rate=f"{rate:,.0f} {self.unit}/s {note}")
        elif now - self._last >= self.every_s:
            self._last = now
            left = (self.total - done) / rate if rate > 0 else float("inf")
            print(
                f"{self.label}: {done:,.0f} of {self.total:,.0f} {self.unit} ({100 * done / self.total:.0f} %), "
                f"{rate:,.0f} {self.unit}/s, {left:,.0f} s left {note}".rstrip(),
                file=sys.stderr,
                flush=True,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif error is None:
            seconds = time.monotonic() - self._start
            print(
                f"{self.label}: {self.done:,.0f} {self.unit} in {seconds:,.1f} s "
                f"({self.done / max(seconds, 1e-9):,.0f} {self.unit}/s)",
                file=sys.stderr,
                flush=True,
            )
