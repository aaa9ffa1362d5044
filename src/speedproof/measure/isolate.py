"""A command in a session of its own, with a deadline after which nothing that it started is left."""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from speedproof.core.errors import Preempted
from speedproof.measure.environment import python_path

MARK = "SPEEDPROOF_WORKER"
"""Environment variable that every descendant inherits, also one that starts a session of its own."""

GRACE_S = 5.0
"""Time between TERM and KILL."""


@dataclass(frozen=True)
class Exit:
    """How a command ended: exit code or signal, whether the deadline ended it, and wall seconds."""

    code: int | None
    signal: int | None
    timed_out: bool
    seconds: float


def run_isolated(
    command: list[str],
    deadline_s: float,
    log: Path,
    env: dict[str, str] | None = None,
    started: Callable[[int], None] | None = None,
) -> Exit:
    """Run `command` with `env` added to the environment and its output in `log`; give it `deadline_s` wall seconds.

    `started` is told its process id. Whatever the end, all processes it left are ended before this returns: TERM, then
    KILL after `GRACE_S`. The caller's own group is never signalled. A TERM to the caller raises Preempted here, once
    the command is gone, when called from the main thread.
    """
    mark = uuid.uuid4().hex
    environment = os.environ | {"PYTHONPATH": python_path()} | (env or {}) | {MARK: mark}
    start = time.monotonic()
    timed_out = False
    with open(log, "ab") as output, _term_raises():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            if started:
                started(process.pid)
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            end_all(process, mark)
    code = process.returncode
    return Exit(
        code=code if code is not None and code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        timed_out=timed_out,
        seconds=time.monotonic() - start,
    )


def end_all(process: subprocess.Popen, mark: str) -> None:
    """End `process` and everything it started: TERM, `GRACE_S` of patience, then KILL."""
    known = members(process.pid, mark)
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 2 * GRACE_S)):
        end = time.monotonic() + patience
        told: set[int] = set()
        while True:
            process.poll()  # reap it, or it would stay in the table
            alive = {pid: born for pid, born in known.items() if _born(pid) == born}
            known = alive | members(process.pid, mark)
            if not known:
                break
            for pid in known.keys() - told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            told |= known.keys()
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        if not known:
            break
    process.wait()


def members(leader: int, mark: str | None = None) -> dict[int, str]:
    """Live processes of `leader`'s session or with `mark`, and their descendants, with their start times."""
    needle = f"{MARK}={mark}".encode() if mark else None
    table: dict[int, tuple[int, int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            state, parent, session, born = fields
            if state not in "ZX":
                table[int(entry.name)] = (parent, session, born)
    found = {pid for pid, (_, session, _) in table.items() if session == leader or (needle and needle in _environ(pid))}
    while grown := {pid for pid, (parent, _, _) in table.items() if parent in found} - found:
        found |= grown
    found -= {os.getpid(), os.getppid(), 0, 1}
    return {pid: table[pid][2] for pid in found}


def _stat(pid: int) -> tuple[str, int, int, str] | None:
    """State, parent, session and start time of a process; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and brackets
    return fields[0], int(fields[1]), int(fields[3]), fields[19]


def _born(pid: int) -> str | None:
    """Start time of a live process: a number used again by another process has another one."""
    fields = _stat(pid)
    return fields[3] if fields and fields[0] not in "ZX" else None


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def _term_raises() -> Iterator[None]:
    """Turn TERM into Preempted, so that the command is ended on the way out and not left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Preempted("TERM while a worker ran; nothing of it is kept, start again to measure it")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it dies, even by KILL."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
