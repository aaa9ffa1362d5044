"""What goes wrong on a real cluster, on the one-node SLURM: killed, preempted, lost, cancelled, interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest
from places import ROOT, Graph, wait_until

pytestmark = pytest.mark.slurm

SITE = ["--workflow-profile", "profiles/slurm"]
SLOT = "results/tiny/micro/tuning/grid/slot0.json"
RUN = "results/tiny/micro/matched/runs/original-seed42-repeat0"
NEEDS_NO_TUNING = {name: {"base": "default", "set": {}} for name in ("original", "recommended", "compiled_partial")}


def jobs(graph: Graph, rule: str) -> list[str]:
    """Ids of this graph's jobs of a rule, the first one first."""
    logs = graph.folder.glob(f".snakemake/slurm_logs/rule_{rule}/**/*.log")
    return sorted((path.stem for path in logs), key=int)


def begun(store: Path) -> int:
    """Attempts at a measurement that have begun and not ended."""
    marks = [json.loads(path.read_text())["begun"] for path in store.glob("unfinished/records/*/attempts.json")]
    return max(marks, default=0)


def kill(job: str, folder: Path) -> None:
    """End every process of a job of this folder at once by KILL, as a control group does that is out of memory."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            inside = os.readlink(environ.with_name("cwd")) == str(folder)
            if inside and f"SLURM_JOB_ID={job}".encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


def test_killed_for_memory_twice_becomes_a_finding(cluster, store: Path, tmp_path: Path) -> None:
    graph = Graph(tmp_path, cluster.env, store, protocol={"min_window_seconds": 40.0, "deadline_s": 110})
    running = graph.start(*SITE, "--", SLOT)
    for attempt in (1, 2):
        wait_until(lambda attempt=attempt: begun(store) == attempt, f"attempt {attempt}")
        kill(jobs(graph, "measure_candidate")[-1], tmp_path)  # scancel would send TERM before
    assert running.wait(120) == 0, graph.log()
    record = json.loads((tmp_path / SLOT).read_text())
    assert (record["status"], record["presumed"], record["targets_per_s"]) == ("host_oom", True, None)
    assert "give the job more memory" in record["reason"]
    assert len(jobs(graph, "measure_candidate")) == 3


def test_training_is_saved_at_preemption_and_goes_on_after_a_lost_node(cluster, store: Path, tmp_path: Path) -> None:
    graph = Graph(
        tmp_path,
        cluster.env,
        store,
        recipe={"budget_targets": 400_000, "virtual_epochs": 1},
        matched={"arms": NEEDS_NO_TUNING, "checkpoint_minutes": 0.02},
        slurm={"partition": "spare"},
    )
    running = graph.start(*SITE, "--", f"{RUN}/result.json")

    def saved() -> int:
        return max((int(path.name[6:]) for path in store.glob("unfinished/runs/*/state-*[0-9]")), default=0)

    wait_until(saved, "a saved state")
    preempting = ["--partition=main", "--gpus=1", "--account=lab", "--time=1"]
    cluster.submit("true", *preempting, output=tmp_path / "high.log")
    [first] = jobs(graph, "train_arm")
    if cluster.wait(first, lambda states: states[0] in ("FAILED", "PREEMPTED"))[0] == "PREEMPTED":
        cluster.release(first)  # the grace was over before Snakemake's own processes were: SLURM starts it again
    else:
        wait_until(lambda: len(jobs(graph, "train_arm")) == 2, "Snakemake's second attempt")
    job = jobs(graph, "train_arm")[-1]

    before = saved()
    wait_until(lambda: saved() > before, "a state saved after the preemption")
    cluster.run("scontrol", "update", "nodename=node1", "state=DOWN", "reason=test")
    cluster.wait(job, lambda states: "NODE_FAIL" in states)
    kill(job, tmp_path)  # the node was only said to be lost
    cluster.release(job)
    assert running.wait(180) == 0, graph.log()

    assert jobs(graph, "train_arm")[-1] == job
    assert cluster.states(job)[-2:] == ["NODE_FAIL", "COMPLETED"]
    result = json.loads((tmp_path / RUN / "result.json").read_text())
    assert result["resumed"] is True
    assert result["targets"] == 400_000 + -400_000 % 64
    seen = [json.loads(line) for line in (tmp_path / RUN / "metrics.jsonl").read_text().splitlines()]
    updates = [line["updates"] for line in seen if "updates" in line]
    assert updates == sorted(set(updates))
    assert not list(store.glob("unfinished/runs/*"))


def test_training_stops_before_its_time_is_up_and_the_next_attempt_goes_on(
    cluster, store: Path, tmp_path: Path
) -> None:
    graph = Graph(
        tmp_path,
        cluster.env,
        store,
        # Small updates and much validation: enough to do on a machine that is twice as fast, too.
        recipe={"budget_targets": 560_000, "targets_per_update": 64, "virtual_epochs": 40, "subset_blocks": 512},
        execution={"microbatch": 1},
        tuning={"microbatches": [1]},
        matched={"arms": NEEDS_NO_TUNING, "checkpoint_minutes": 0.02},
    )
    running = graph.start(*SITE, "--", f"{RUN}/result.json")
    wait_until(lambda: jobs(graph, "train_arm"), "a job")
    [first] = jobs(graph, "train_arm")
    cluster.wait(first, lambda states: states == ["RUNNING"])
    # What is left of its minutes, before training asks; minutes are the smallest limit that can be submitted.
    cluster.run("scontrol", "update", f"job={first}", "EndTime=now+40")
    assert running.wait(300) == 0, graph.log()
    first_again, second = jobs(graph, "train_arm")
    assert (first_again, cluster.states(first)) == (first, ["FAILED"])  # and not TIMEOUT
    [done] = re.findall(r"stopped early: the job ends in \d+ s; state saved after ([\d,]+) of", graph.log())
    assert int(done.replace(",", "")) > 0
    assert cluster.states(second) == ["COMPLETED"]
    result = json.loads((tmp_path / RUN / "result.json").read_text())
    assert result["resumed"] is True
    assert result["targets"] == 560_000
    assert result["environment"]["facts"]["job"] == second


def test_a_cancelled_job_is_an_error_and_no_wait(cluster, store: Path, tmp_path: Path) -> None:
    graph = Graph(tmp_path, cluster.env, store, protocol={"min_window_seconds": 41.0, "deadline_s": 110})
    running = graph.start(*SITE, "--retries", "0", "--", SLOT)
    wait_until(lambda: jobs(graph, "measure_candidate") and begun(store), "a measurement")
    [job] = jobs(graph, "measure_candidate")
    cluster.run("scancel", job)
    assert running.wait(120) == 1, graph.log()
    assert f"SLURM-job '{job}' failed, SLURM status is: 'CANCELLED'" in graph.log()
    assert not (tmp_path / SLOT).exists()


def test_ctrl_c_leaves_no_job_in_the_queue(cluster, store: Path, tmp_path: Path) -> None:
    graph = Graph(tmp_path, cluster.env, store, protocol={"min_window_seconds": 42.0, "deadline_s": 110})
    running = graph.start(*SITE, "--", SLOT)
    wait_until(lambda: jobs(graph, "measure_candidate"), "a job")
    [job] = jobs(graph, "measure_candidate")
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(60) != 0
    wait_until(lambda: not any(line.startswith(f"{job} ") for line in cluster.queue()), "a queue without it", 30)
    # And the folder is not left locked.
    assert "Directory cannot be locked" not in graph.run("--cores", "1", "--dry-run", "--", SLOT).stderr


def test_a_job_learns_its_end_from_slurm(cluster, tmp_path: Path) -> None:
    code = "from speedproof.training.stopping import job_end_time; print(job_end_time())"
    log = tmp_path / "log"
    script = f"PYTHONPATH={ROOT / 'src'} python -c '{code}'"
    job = cluster.submit(script, "--time=7", output=log)
    cluster.wait(job, lambda states: states == ["COMPLETED"])
    wanted = cluster.run("sacct", "-X", "-n", "-P", "-j", job, "--format=Start").stdout.strip()
    begin = float(cluster.run("date", "-d", wanted, "+%s").stdout)
    assert float(log.read_text()) == pytest.approx(begin + 7 * 60, abs=2)
