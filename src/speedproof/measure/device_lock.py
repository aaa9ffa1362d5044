"""One measurement or training run at a time on one device of a node, whoever starts it and however.

A GPU is locked by its UUID, so that `CUDA_VISIBLE_DEVICES` may number it as it likes. The CPU is one device per host,
also for jobs on disjoint CPU sets: they share memory bandwidth, caches and clocks.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.measure.environment import gpu

FOLDER = Path("/tmp/speedproof-locks")
"""On the node itself, and not under TMPDIR, which a scheduler may set per job: the lock must be seen by all jobs."""

QUIET_S = 1.0


@contextlib.contextmanager
def device_lock(device: str) -> Iterator[float]:
    """Hold `device` ("cpu" or "cuda", device 0 as visible); yields the seconds waited for it.

    The lock goes when the process dies. It is not re-entrant: a second hold in the same process would wait for ever.
    """
    path = lock_path(device)
    with contextlib.ExitStack() as held:
        try:
            waited = held.enter_context(files.lock(path, timeout_s=QUIET_S))
        except UserError:
            print(f"waiting for {path.stem}: another measurement or run holds it ({path})", file=sys.stderr, flush=True)
            waited = QUIET_S + held.enter_context(files.lock(path))
        yield waited


def lock_path(device: str) -> Path:
    """The lock file of `device`, in a folder that every user of the node may write."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):
        os.chmod(FOLDER, 0o777)  # not sticky: hardened kernels refuse to open another user's file in a sticky folder
    return FOLDER / (f"gpu-{gpu()['uuid']}.lock" if device == "cuda" else "cpu.lock")
