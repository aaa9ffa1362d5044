"""The embedded experiment at toy size on the one-node SLURM: each step its own job, with what it asked for."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from places import Graph, clean_environment, wait_until

pytestmark = pytest.mark.slurm

MEASURING = {
    "resolve_recipe": (1, 5),
    "measure_candidate": (2, 2),
    "check_finalists": (1, 2),
    "confirm_finalist": (1, 5),
    "check_parity": (2, 2),
    "train_arm": (3, 4),
}
"""Jobs of each measuring rule in tiny.yaml, and their minutes."""

DATA = {"make_tokenizer": 1, "tokenize_file": 3, "check_derivatives": 1}


@pytest.fixture(scope="module")
def graph(cluster, tmp_path_factory) -> Graph:
    """The whole experiment, run by the plain command, with SLURM's report on how well its requests fitted."""
    folder = tmp_path_factory.mktemp("workflow")
    graph = Graph(folder, cluster.env)
    done = graph.run("--executor", "slurm", "--slurm-keep-successful-logs", "--slurm-efficiency-report", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    return graph


def accounts(cluster, graph: Graph) -> list[list[str]]:
    """Comment, state, allocation and time limit of every job of the graph."""
    logs = graph.folder.glob(".snakemake/slurm_logs/**/*.log")
    return [cluster.account(log.stem, "JobID", "Comment", "State", "AllocTRES", "Timelimit")[0] for log in logs]


def test_each_step_was_a_job_with_its_gpu_cpus_memory_and_time(cluster, graph: Graph) -> None:
    rows = accounts(cluster, graph)
    rules = Counter(re.match(r"rule_([a-z_]+?)(?:_wildcards|$)", row[1])[1] for row in rows)
    assert rules == {name: count for name, (count, _) in MEASURING.items()} | DATA
    for job, comment, state, granted, limit in rows:
        rule = re.match(r"rule_([a-z_]+?)(?:_wildcards|$)", comment)[1]
        assert state == "COMPLETED", (job, comment)
        tres = set(granted.split(","))
        if rule in MEASURING:
            assert {"cpu=2", "mem=2000M", "gres/gpu=1", "gres/gpu:pretend=1", "node=1"} <= tres, (comment, granted)
            assert limit == f"00:0{MEASURING[rule][1]}:00"
        else:
            assert {"cpu=1", "mem=1500M"} <= tres, (comment, granted)
            assert "gres/gpu" not in granted
            assert limit == "00:03:00"


def test_each_worker_saw_one_device_in_a_job_of_its_own(cluster, graph: Graph) -> None:
    paths = [
        *graph.results.glob("micro/tuning/grid/slot*.json"),
        *graph.results.glob("micro/parity/*.json"),
        *graph.results.glob("micro/matched/runs/*/result.json"),
        graph.results / "micro/tuning/comparison.json",
    ]
    facts = [json.loads(path.read_text())["environment"]["facts"] for path in paths]
    assert [fact["visible_devices"] for fact in facts] == ["0"] * 8
    known = {row[0] for row in accounts(cluster, graph)}
    # Arms that are one execution, and parity checked before, come from the store, with the job that made them.
    assert {fact["job"] for fact in facts} <= known
    assert len({fact["job"] for fact in facts}) >= 5


def test_the_summary_counts_the_jobs_and_nothing_is_left_to_do(cluster, graph: Graph) -> None:
    allocation = json.loads((graph.results / "summary.json").read_text())["allocation"]
    assert allocation["reason"] is None
    assert allocation["seconds"] > 0
    assert allocation["gpu_hours"] == pytest.approx(allocation["seconds"] / 3600)
    assert "Nothing to be done" in graph.run("--executor", "slurm", "-n", "all").stdout
    assert list(graph.folder.glob("efficiency_report_*.csv"))


def test_one_allocation_stops_when_it_is_told_and_goes_on(cluster, store: Path, tmp_path: Path) -> None:
    graph = Graph(tmp_path, clean_environment(), store, protocol={"min_window_seconds": 8.0, "deadline_s": 110})
    slot = "results/tiny/micro/tuning/grid/slot0.json"

    def allocate() -> str:
        command = ["python", "src/scripts/allocate.py", "--config", "site.yaml", "--target", slot]
        return re.search(r"allocation-(\d+)\.log", cluster.run(*command, cwd=graph.folder).stdout)[1]

    def said(job: str) -> str:
        return (tmp_path / f"logs/allocation-{job}.log").read_text()

    def ended(states: list[str]) -> bool:
        return states[-1:] not in ([], ["PENDING"], ["RUNNING"])

    first = allocate()
    wait_until(lambda: list(store.glob("unfinished/records/*/attempts.json")), "a measurement")
    cluster.run("scancel", "--signal=TERM", "--batch", first)
    assert cluster.wait(first, ended) == ["COMPLETED"]
    assert "stopped in time, since SLURM ends this job soon; left to do" in said(first)
    assert not (tmp_path / slot).exists()

    second = allocate()
    assert cluster.wait(second, ended) == ["COMPLETED"]
    assert "allocation: all is done" in said(second)
    [[granted, limit]] = cluster.account(second, "AllocTRES", "Timelimit")
    assert {"cpu=2", "mem=2000M", "gres/gpu=1"} <= set(granted.split(","))
    assert limit == "00:10:00"
    facts = json.loads((tmp_path / slot).read_text())["environment"]["facts"]
    assert (facts["job"], facts["visible_devices"]) == (second, "0")
