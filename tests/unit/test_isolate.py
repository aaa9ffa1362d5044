"""After a deadline nothing of the worker lives, wherever it hid, and the caller does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speedproof.measure import isolate
from speedproof.measure.isolate import run_isolated

HANG_WITH_GRANDCHILDREN = """
import os, subprocess, sys, time
own_session = subprocess.Popen(["sleep", "600"], start_new_session=True)
plain = subprocess.Popen(["sleep", "600"])
cleared = subprocess.Popen(["sleep", "600"], start_new_session=True, env={"PATH": os.environ["PATH"]})
open(sys.argv[1], "w").write(f"{os.getpid()} {own_session.pid} {plain.pid} {cleared.pid}")
time.sleep(600)
"""

DAEMON_LEFT_BEHIND = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
"""


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch):
    monkeypatch.setattr(isolate, "GRACE_S", 0.3)


def alive(pid: int) -> bool:
    return isolate._born(pid) is not None


def test_deadline_takes_grandchildren_in_other_sessions_and_spares_the_caller(tmp_path):
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        result = run_isolated(
            [sys.executable, "-c", HANG_WITH_GRANDCHILDREN, str(tmp_path / "pids")], 2.0, tmp_path / "log"
        )
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert result.timed_out
        assert len(pids) == 4
        assert not any(alive(pid) for pid in pids)
        assert alive(bystander.pid)
        assert os.getpgrp() == os.getpgid(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


def test_another_worker_is_no_member(tmp_path):
    marked = os.environ | {isolate.MARK: "another"}
    other = subprocess.Popen(["sleep", "600"], env=marked, start_new_session=True)
    mine = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        assert isolate.members(mine.pid).keys() == {mine.pid}
        assert isolate.members(mine.pid, "another").keys() == {mine.pid, other.pid}
    finally:
        for process in (other, mine):
            process.kill()
            process.wait()


def test_hang_in_an_import_meets_the_deadline(tmp_path):
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(600)\n")
    result = run_isolated(
        [sys.executable, "-c", "import slow_import"], 0.5, tmp_path / "log", env={"PYTHONPATH": str(tmp_path)}
    )
    assert result.timed_out
    assert result.signal == signal.SIGTERM


def test_ignored_term_is_followed_by_kill(tmp_path):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    result = run_isolated([sys.executable, "-c", code], 1.0, tmp_path / "log")
    assert (tmp_path / "log").read_text() == "deaf\n"
    assert result.timed_out
    assert result.signal == signal.SIGKILL


def test_a_daemon_left_after_success_is_ended_too(tmp_path):
    result = run_isolated([sys.executable, "-c", DAEMON_LEFT_BEHIND, str(tmp_path / "pid")], 30, tmp_path / "log")
    assert result.code == 0
    assert not result.timed_out
    assert not alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(7)", (7, None)), ("import os; os.kill(os.getpid(), 9)", (None, signal.SIGKILL))],
)
def test_exit_says_code_or_signal(tmp_path, code, expected):
    result = run_isolated([sys.executable, "-c", code], 30, tmp_path / "log")
    assert (result.code, result.signal) == expected
    assert not result.timed_out


def test_term_to_the_caller_ends_the_worker_first(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom speedproof.core.errors import Preempted\n"
        "from speedproof.measure.isolate import run_isolated\n"
        "inner = 'import os, sys, time; open(sys.argv[1], \"w\").write(str(os.getpid())); time.sleep(600)'\n"
        "try:\n"
        f"    command = [sys.executable, '-c', inner, {str(tmp_path / 'pid')!r}]\n"
        f"    run_isolated(command, 60, Path({str(tmp_path / 'log')!r}))\n"
        "except Preempted: sys.exit(75)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": isolate.python_path()})
    pid = wait_for(tmp_path / "pid")
    caller.terminate()
    assert caller.wait(20) == 75
    assert not alive(pid)


def test_worker_dies_with_a_caller_that_is_killed(tmp_path):
    inner = (
        "import os, time\nfrom speedproof.measure.isolate import die_with_parent\ndie_with_parent()\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    code = (
        "import sys\nfrom pathlib import Path\nfrom speedproof.measure.isolate import run_isolated\n"
        f"run_isolated([sys.executable, '-c', {inner!r}], 60, Path({str(tmp_path / 'log')!r}))\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": isolate.python_path()})
    pid = wait_for(tmp_path / "pid")
    caller.kill()
    caller.wait()
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pid)


def wait_for(path: Path) -> int:
    end = time.monotonic() + 20
    while not (path.is_file() and path.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    return int(path.read_text())
