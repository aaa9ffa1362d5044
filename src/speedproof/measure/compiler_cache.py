"""Inductor's and Triton's caches: on the node, used by one worker at a time, warm for the next one."""

import atexit
import contextlib
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}

ALLOCATION = "SPEEDPROOF_ALLOCATION"
"""Environment variable of a SLURM job that runs many scripts one after another: profiles/allocation/job.sh."""


def root() -> Path:
    """Folder of this user's caches on this node: one for each SLURM job, one for everything outside a job."""
    return Path(tempfile.gettempdir()) / f"speedproof-{getpass.getuser()}" / os.environ.get("SLURM_JOB_ID", "local")


@contextlib.contextmanager
def compiler_cache(cold: bool = False) -> Iterator[dict[str, str]]:
    """Yield the environment variables that give one worker a cache of its own while the block lasts.

    It is the first of this job's folders that nobody uses, so that workers in sequence share a warm one and workers at
    the same time never share. `cold` gives an empty one that is removed afterwards.
    """
    folder = root()
    folder.mkdir(parents=True, exist_ok=True)
    atexit.register(remove_job_cache)
    with contextlib.ExitStack() as held:
        for number in range(1000):
            try:
                held.enter_context(FileLock(folder / f"{number}.lock").acquire(timeout=0))
                break
            except Timeout:
                continue
        if cold:
            empty = held.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="cold-"))
            yield _variables(Path(empty))
        else:
            yield _variables(folder / str(number))


def is_warm(variables: dict[str, str]) -> bool:
    """Whether any earlier worker left something in this cache."""
    return any(Path(value).is_dir() and any(Path(value).iterdir()) for value in variables.values())


def remove_job_cache() -> None:
    """Remove the caches of this SLURM job, done by itself when a process that used one ends; not while one is in use.

    Outside a job they stay warm for the next run; an allocation keeps them from script to script and removes them
    at its own end.
    """
    if "SLURM_JOB_ID" not in os.environ or ALLOCATION in os.environ:
        return
    with contextlib.ExitStack() as held:
        try:
            for lock in root().glob("*.lock"):
                held.enter_context(FileLock(lock).acquire(timeout=0))
        except Timeout:
            return  # whoever uses it removes it
        shutil.rmtree(root(), ignore_errors=True)


def _variables(folder: Path) -> dict[str, str]:
    return {name: str(folder / part) for name, part in VARIABLES.items()}
