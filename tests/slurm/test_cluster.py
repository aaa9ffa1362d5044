"""The one-node SLURM does what tests of the workflow rely on: a GPU, accounts, limits, preemption, node failure."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def overdue(cluster, tmp_path_factory) -> str:
    """A job whose time is up at once. SLURM looks at limits every 30 s, so it is started before the other tests."""
    log = tmp_path_factory.mktemp("overdue") / "log"
    job = cluster.submit("srun -n1 sleep 300", "--time=1", output=log)
    cluster.wait(job, lambda states: states == ["RUNNING"])
    cluster.run("scontrol", "update", f"job={job}", "EndTime=now")
    return job


@pytest.mark.usefixtures("overdue")
def test_a_job_sees_one_gpu_and_is_accounted_for(cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    step = "srun -n1 --cpu-bind=q --cpus-per-task=2 --gpus=1 --nodes=1 sh -c 'echo step $CUDA_VISIBLE_DEVICES'"
    job = cluster.submit(
        f"echo batch $CUDA_VISIBLE_DEVICES; {step}",
        *["--account=lab", "--partition=main", "--qos=short", "--constraint=pretend", "--gpus=pretend:1"],
        *["--cpus-per-task=2", "--mem=4000", "--time=5", "--comment=rule_toy"],
        output=log,
    )
    cluster.wait(job, lambda states: states == ["COMPLETED"])

    assert [line for line in log.read_text().splitlines() if line.startswith(("batch", "step"))] == [
        "batch 0",
        "step 0",
    ]
    fields = ["AllocTRES", "Account", "Partition", "QOS", "Timelimit", "Comment", "ReqMem"]
    [[tres, *rest]] = cluster.account(job, *fields)
    assert rest == ["lab", "main", "short", "00:05:00", "rule_toy", "4000M"]
    assert {"cpu=2", "gres/gpu=1", "gres/gpu:pretend=1", "mem=4000M", "node=1"} <= set(tres.split(","))


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--account=nobody", "Invalid account"),
        ("--partition=nowhere", "Invalid partition name"),
        ("--qos=never", "Invalid qos"),
        ("--gpus=h100:1", "Requested node configuration is not available"),
    ],
)
def test_what_does_not_exist_is_refused_at_submission(cluster, option: str, sentence: str) -> None:
    done = cluster.run("sbatch", option, "--wrap=true", check=False)
    assert done.returncode == 1
    assert sentence in done.stderr


def test_cancelling_names_the_user_in_the_state(cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = cluster.submit("echo up; sleep 300", output=log)
    cluster.wait(job, lambda _: log.exists() and "up" in log.read_text())
    cluster.run("scancel", job)
    states = cluster.wait(job, lambda states: states not in ([], ["PENDING"], ["RUNNING"]))
    assert states == [f"CANCELLED by {cluster.run('id', '-u').stdout.strip()}"]


def test_preemption_gives_a_warning_then_requeues(cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    step = """python3 -c '
import os, signal, time
again = int(os.environ.get("SLURM_RESTART_COUNT", 0))
print("run", again, flush=True)
signal.signal(signal.SIGTERM, lambda *_: print("term", flush=True))
end = time.monotonic() + (0 if again else 300)
while time.monotonic() < end:
    time.sleep(0.1)
'"""
    low = cluster.submit(f"srun -n1 {step}", "--partition=spare", "--gpus=1", "--open-mode=append", output=log)
    cluster.wait(low, lambda _: log.exists() and "run 0" in log.read_text())
    high = cluster.submit("true", "--partition=main", "--gpus=1", output=tmp_path / "high")

    cluster.wait(low, lambda states: states == ["PREEMPTED", "PENDING"])
    assert log.read_text().index("run 0") < log.read_text().index("term")
    cluster.wait(high, lambda states: states == ["COMPLETED"])
    cluster.release(low)
    cluster.wait(low, lambda states: states == ["PREEMPTED", "COMPLETED"])
    assert "run 1" in log.read_text()


def test_a_job_over_its_limit_becomes_timeout(cluster, overdue: str) -> None:
    assert cluster.wait(overdue, lambda states: states != ["RUNNING"]) == ["TIMEOUT"]


def test_a_lost_node_puts_its_job_back_into_the_queue(cluster, tmp_path: Path) -> None:
    # Last, since it takes every running job with it. The slurmd itself lives and soon reports the node as up again.
    log = tmp_path / "log"
    job = cluster.submit("echo run ${SLURM_RESTART_COUNT:-0}; sleep 300", "--open-mode=append", output=log)
    cluster.wait(job, lambda _: log.exists() and "run 0" in log.read_text())
    cluster.run("scontrol", "update", "nodename=node1", "state=DOWN", "reason=test")
    cluster.wait(job, lambda states: states[0] == "NODE_FAIL")
    cluster.release(job)
    # RUNNING is said before the script has begun.
    cluster.wait(job, lambda states: states == ["NODE_FAIL", "RUNNING"] and "run 1" in log.read_text())
    cluster.run("scancel", job)
