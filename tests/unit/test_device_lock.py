"""One holder of a device at a time, freed by death, keyed by the GPU and not by its number."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from speedproof.measure import device_lock as module
from speedproof.measure.device_lock import device_lock
from speedproof.measure.environment import python_path

HOLD = """
import sys, time
from pathlib import Path
from speedproof.measure import device_lock as module
module.FOLDER = Path(sys.argv[1])
with module.device_lock("cpu"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FOLDER", tmp_path / "locks")
    monkeypatch.setattr(module, "QUIET_S", 0.1)


def test_second_holder_waits_and_says_so(capsys):
    order = []

    def second():
        with device_lock("cpu") as waited:
            order.append("second" if waited > 0 else "did not wait")

    with device_lock("cpu"):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.4)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert "waiting for cpu" in capsys.readouterr().err


def test_death_frees_the_device():
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(module.FOLDER)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path()},
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGKILL)
    with device_lock("cpu"):
        pass


def test_two_gpus_do_not_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(module, "gpu", lambda: {"uuid": "aaaa"})
    with device_lock("cuda"), device_lock("cpu"):
        monkeypatch.setattr(module, "gpu", lambda: {"uuid": "bbbb"})
        with device_lock("cuda"):
            pass


def test_scheduler_temp_folders_share_one_lock(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "job1"))
    one = module.lock_path("cpu")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "job2"))
    assert module.lock_path("cpu") == one


def test_other_users_may_write():
    with device_lock("cpu"):
        pass
    path = module.lock_path("cpu")
    assert path.parent.stat().st_mode & 0o777 == 0o777
    assert path.stat().st_mode & 0o666 == 0o666
