"""The one-node SLURM of `cluster.sh` as a fixture: commands run on it, jobs are submitted, their accounts are read.

`cluster` asks `cluster.sh status` and skips when nothing is up: tests never start services by themselves, and never
touch a site's own SLURM, since some of them take a node down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import HERE, SEARCH_PATH, STARTED, Graph, Stubs, clean_environment, wait_until


class Cluster:
    """The running test cluster. `env` is what a command needs to reach it."""

    def __init__(self, folder: Path) -> None:
        self.env = clean_environment()
        self.env["SLURM_CONF"] = str(folder / "etc/slurm.conf")
        self.env["PATH"] = f"{folder / 'bin'}:{SEARCH_PATH}"

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command against the cluster; with `check`, a failure shows what it printed."""
        done = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=120)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def submit(self, script: str, *options: str, output: Path) -> str:
        """Submit a shell line and return its job id."""
        return self.run("sbatch", "--parsable", f"--output={output}", *options, f"--wrap={script}").stdout.strip()

    def account(self, job: str, *fields: str, runs: bool = False) -> list[list[str]]:
        """The rows of sacct for a job without its steps; `runs` also lists those that were requeued.

        The row of a job that ends at once is incomplete for about a second: it has no partition yet.
        """
        every = ["--duplicates"] if runs else []
        command = ["sacct", "-X", "-P", "-n", *every, "-j", job, f"--format=Partition,{','.join(fields)}"]
        for _ in range(50):
            rows = [line.split("|") for line in self.run(*command).stdout.splitlines()]
            if all(partition for partition, *_ in rows):
                return [row for _, *row in rows]
            time.sleep(0.2)
        raise AssertionError(f"job {job}: sacct knows no partition: {rows}")

    def states(self, job: str) -> list[str]:
        """The state of each run of a job, the first one first, as sacct words it."""
        return [state for (state,) in self.account(job, "State", runs=True)]

    def wait(self, job: str, wanted: Callable[[list[str]], bool], seconds: float = 90) -> list[str]:
        """Wait until the states of a job are as wanted; fail with the last ones seen."""
        end = time.monotonic() + seconds
        while not wanted(states := self.states(job)):
            assert time.monotonic() < end, f"job {job}: still {states} after {seconds} s"
            time.sleep(0.3)
        return states

    def queue(self) -> list[str]:
        """Id and state of each job that SLURM has not ended."""
        return self.run("squeue", "--noheader", "--format=%i %T").stdout.splitlines()

    def release(self, job: str) -> None:
        """Start a requeued job now, which SLURM holds back for two minutes; not before the node is rid of it."""

        def ready() -> bool:
            steps = self.run("pgrep", "--full", rf"^slurmstepd: \[{job}\.", check=False).stdout
            return f"{job} PENDING" in self.queue() and not steps

        wait_until(ready, f"job {job} in the queue again")
        time.sleep(3)  # slurmd looks once a second whether the last step is gone; until then it takes no second copy
        self.run("scontrol", "update", f"job={job}", "StartTime=now")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The test cluster, emptied of jobs afterwards; skips when it is not up."""
    status = subprocess.run([HERE / "cluster.sh", "status"], capture_output=True, text=True)
    if status.returncode:
        pytest.skip("no SLURM: run tests/slurm/cluster.sh up")
    conf = status.stdout.splitlines()[0].removeprefix("export SLURM_CONF=")
    cluster = Cluster(Path(conf).parents[1])
    yield cluster
    cluster.run("scancel", f"--user={os.getuid()}", check=False)


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    for process in STARTED:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    STARTED.clear()


@pytest.fixture(autouse=True)
def _cluster_left_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """One test that fails must not make those after it wait for its jobs, or for a node that it took out of service."""
    if not {"cluster", "tmp_path"} <= set(request.fixturenames):
        yield
        return
    cluster, folder = [request.getfixturevalue(name) for name in ("cluster", "tmp_path")]
    yield
    jobs = [line.split(" ", 1) for line in cluster.run("squeue", "--noheader", "--format=%i %Z").stdout.splitlines()]
    if mine := [job for job, place in jobs if place == str(folder)]:
        cluster.run("scancel", *mine, check=False)  # one may have ended meanwhile
    cluster.run("scontrol", "update", "nodename=node1", "state=RESUME", check=False)  # refused where it is in service


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Path:
    """A store that holds the token cache of tiny.yaml, so that each test begins with measurements.

    Two experiments make it at the same time, and have to agree.
    """
    folder = tmp_path_factory.mktemp("prepared")
    graphs = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        graphs.append(Graph(folder / name, clean_environment(), folder / "store"))
    running = [graph.start("--cores", "1", "--", "data") for graph in graphs]
    ends = [process.wait(300) for process in running]
    assert ends == [0, 0], [graph.log() for graph in graphs]
    manifests = [(graph.results / "data/bpe-2048/token_cache.json").read_bytes() for graph in graphs]
    assert manifests[0] == manifests[1]
    assert len(list((folder / "store/shards").glob("*/*/tokens.bin"))) == 3
    return folder / "store"
