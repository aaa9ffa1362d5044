"""Every script ends in words and an exit code that say what to do next."""

import signal
import subprocess
import sys

import pytest

from speedproof.core.errors import EXIT_PREEMPTED, EXIT_USER
from speedproof.measure.environment import python_path

SCRIPT = """
import time
from speedproof.core.errors import UserError, run

def main(what: str):
    try:
        print("began", flush=True)
        if what == "wrong":
            raise UserError("key: found 3; use 4")
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)

run(main)
"""


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("wrong", EXIT_USER, "error: key: found 3; use 4"),
        ("ended", EXIT_PREEMPTED, "stopped early: TERM received; nothing half-done is kept, start again"),
    ],
)
def test_a_script_ends_in_words(what, code, said):
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, what],
        env={"PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert script.stdout.readline() == "began\n"
    if what == "ended":
        script.send_signal(signal.SIGTERM)
    assert script.stdout.read() == "cleaned up\n"
    assert script.stderr.read().strip() == said
    assert script.wait(30) == code
