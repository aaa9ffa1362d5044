"""The tuned allocator: what it does to a process, by the kernel's count of page faults, and where it is refused."""

import json
import platform
import subprocess
import sys

import pytest

from speedproof.core.errors import UserError
from speedproof.training import allocator

CHURN = """
import json, resource, sys
import torch
from speedproof.training.allocator import tune_allocator
if sys.argv[1] == "tuned":
    tune_allocator()
def rounds(count):
    for _ in range(count):
        for mib in (64, 32, 20):
            tensor = torch.ones(mib * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
first = rounds(8)  # aligned blocks of several sizes leave gaps until the heap has places for all of them
print(json.dumps(rounds(8) - first))
"""


def faults(way: str) -> int:
    done = subprocess.run([sys.executable, "-c", CHURN, way], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_large_blocks_are_kept():
    shipped, tuned = faults("default"), faults("tuned")
    assert shipped > 8 * 64 * 256 / 2, "blocks of 64 MiB come from fresh pages each time"
    assert tuned < shipped / 10


def test_another_c_library_is_named(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(UserError, match=r"execution\.allocator: 'tuned' needs glibc.*use default"):
        allocator.tune_allocator()


def test_an_updater_asks_for_it(miniature_recipe, miniature_execution, monkeypatch):
    from speedproof.training import update

    asked = []
    monkeypatch.setattr(update, "tune_allocator", lambda: asked.append(True))
    update.Updater(miniature_recipe(), miniature_execution(), "cpu")
    assert not asked
    update.Updater(miniature_recipe(), miniature_execution(allocator="tuned"), "cpu")
    assert asked
