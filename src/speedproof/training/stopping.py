"""When a run should save and stop: TERM (or Ctrl-C) was received, or the job's known end is near."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from types import FrameType


class Stop:
    """Whether to stop, asked between updates and between validation batches."""

    def __init__(self, end_time: float | None = None, now: Callable[[], float] = time.time):
        """`end_time`: UNIX seconds at which the job is ended from outside, None when that is not known."""
        self.end_time, self._now = end_time, now
        self.signal: str | None = None

    def reason(self, margin_s: float) -> str | None:
        """Why to stop now, None to go on; `margin_s` is what one more step and a save may take."""
        if self.signal is not None:
            return f"{self.signal} received"
        if self.end_time is not None and self._now() + margin_s >= self.end_time:
            return f"the job ends in {max(0.0, self.end_time - self._now()):.0f} s"
        return None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take TERM and INT as requests to stop; a second one acts as it would have without this."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def request(number: int, frame: FrameType | None) -> None:
            self.signal = signal.Signals(number).name
            signal.signal(number, before[number])

        for number in before:
            signal.signal(number, request)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def job_end_time(environ: Mapping[str, str] = os.environ) -> float | None:
    """UNIX seconds at which SLURM ends the job that this process is part of; None outside a job or when not told.

    Source: SLURM_JOB_END_TIME where SLURM sets it, else EndTime of `scontrol show job`.
    """
    if environ.get("SLURM_JOB_END_TIME", "").isdigit():
        return float(environ["SLURM_JOB_END_TIME"])
    if "SLURM_JOB_ID" not in environ:
        return None
    try:
        answer = subprocess.run(
            ["scontrol", "show", "job", environ["SLURM_JOB_ID"]],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", answer.stdout)
    return datetime.fromisoformat(found.group(1)).timestamp() if found else None
