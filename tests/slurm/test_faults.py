"""What goes wrong between Snakemake and SLURM ends in a clear message or in the same result, never in a long wait.

Here are the faults that only stub commands can make on demand; those that a real cluster has are in
test_cluster_faults.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from places import ROOT, Graph, Stubs, clean_environment, wait_until

LITERAL = ["--executor", "slurm"]
SITE = ["--workflow-profile", "profiles/slurm"]

TARGET = "results/tiny/parity/derivatives.json"
"""One job that needs nothing else."""


def test_an_account_that_does_not_exist_is_named(stubs: Stubs) -> None:
    graph = Graph(stubs.folder, stubs.settings(ACCOUNTS=["other"]))
    done = graph.run(*LITERAL, "--", TARGET)
    assert done.returncode == 1
    assert "The given account lab appears to be invalid" in done.stderr


def test_a_partition_that_does_not_exist_is_named(stubs: Stubs) -> None:
    graph = Graph(stubs.folder, stubs.settings(PARTITIONS=["gpu"]))
    done = graph.run(*LITERAL, "--", TARGET)
    assert done.returncode == 1
    assert "Invalid partition name specified" in done.stderr
    assert "-p main" in done.stderr


def test_a_refused_submission_and_a_scheduler_away_for_a_minute_cost_only_time(stubs: Stubs) -> None:
    # The executor's own five tries would forget the job and wait for it without end.
    graph = Graph(stubs.folder, stubs.settings(REFUSE=1, AWAY=20))
    done = graph.run(*SITE, "--max-status-checks-per-second", "20", "--", TARGET)
    assert done.returncode == 0, done.stderr
    assert "Socket timed out" in done.stderr
    assert len(stubs.calls("sbatch")) == 2
    assert len(stubs.calls("squeue")) > 20
    assert (stubs.folder / TARGET).is_file()


def test_unknown_is_no_success_without_the_output(stubs: Stubs) -> None:
    graph = Graph(stubs.folder, stubs.settings(ENDS={"*": ["UNKNOWN"]}))
    done = graph.run(*LITERAL, "--latency-wait", "1", "--", TARGET)
    assert done.returncode == 1
    assert "derivatives.json (missing locally" in done.stderr
    # The next start makes it.
    assert graph.run(*LITERAL, "--", TARGET).returncode == 0


def test_late_files_are_waited_for_and_a_second_start_is_told_about_the_first(stubs: Stubs) -> None:
    graph = Graph(stubs.folder, stubs.settings(ENDS={"*": ["EARLY"]}))
    first = graph.start(*LITERAL, "--latency-wait", "60", "--", TARGET)
    wait_until(lambda: "has been submitted" in graph.log(), "a submission")
    second = graph.run(*LITERAL, "--", TARGET)
    assert second.returncode == 1
    assert "Directory cannot be locked" in second.stderr
    assert "no other Snakemake process is trying to create the same files" in second.stderr
    assert first.wait(120) == 0, graph.log()
    assert len(stubs.calls("sbatch")) == 1


def test_a_node_without_the_environment_says_what_to_make(stubs: Stubs) -> None:
    # The job finds no Python that holds Snakemake, though the login node's has it.
    bare = stubs.env["PATH"].split(":")[0] + ":/usr/bin:/bin"
    graph = Graph(stubs.folder, stubs.env | {"PATH": bare})
    done = graph.run(*SITE, "--retries", "0", "--", TARGET)
    assert done.returncode == 1
    [log] = stubs.folder.glob(".snakemake/slurm_logs/rule_check_derivatives/*.log")
    said = log.read_text()
    assert "found no environment that starts on" in said
    assert f"make .venv-{os.uname().machine}" in said
    assert str(log) in done.stderr


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_each_node_starts_the_environment_of_its_architecture(tmp_path: Path, shell: str) -> None:
    def environment(name: str, program: bytes) -> None:
        python = tmp_path / name / "bin/python"
        python.parent.mkdir(parents=True)
        python.write_bytes(program)
        python.chmod(0o755)

    def found() -> str:
        command = f". {ROOT}/envs/node-env.sh && command -v python"
        env = {"PATH": "/usr/bin:/bin"}
        done = subprocess.run([shell, "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.stdout.strip().removeprefix(f"{tmp_path}/") or done.stderr

    # A stub for an interpreter of another architecture: the kernel refuses it as it would the real one.
    foreign = b"\x7fELF\x02\x01\x01\x00" + bytes(8) + b"\x02\x00\xff\x7f" + bytes(44)
    environment(".venv", foreign)
    assert "found no environment that starts on" in found()
    environment(f".venv-{os.uname().machine}", b"#!/bin/sh\nexit 0\n")
    environment(".venv-sparc", foreign)
    assert found() == f".venv-{os.uname().machine}/bin/python"


def test_local_measurements_run_one_after_another(tmp_path: Path) -> None:
    # The profile's `jobs`, needed for the plain `--executor slurm`, would let them run side by side.
    graph = Graph(tmp_path, clean_environment())
    graph.pretend("settings/measuring.yaml", "data/bpe-2048/token_cache.json", "micro/recipe.yaml")
    graph.pretend("micro/tuning/grid/plan.json")
    slots = [f"results/tiny/micro/tuning/grid/slot{k}.json" for k in range(2)]
    options = ["--cores", "2", "--keep-going", "--rerun-triggers", "mtime"]
    done = graph.run(*options, "--allowed-rules", "measure_candidate", "--", *slots)
    said = done.stdout + done.stderr
    assert said.count("Execute 1 jobs...") == 2, said
    assert "Execute 2 jobs..." not in said


def test_an_allocation_stops_in_time_and_goes_on(tmp_path: Path, store: Path) -> None:
    long = {"deadline_s": 110, "min_window_seconds": 40}
    Graph(tmp_path, clean_environment(), store, protocol=long)
    slot = "results/tiny/micro/tuning/grid/slot0.json"
    command = ["profiles/allocation/job.sh", "--configfile", "site.yaml", "--", slot]
    log = tmp_path / "allocation.log"

    def allocation(*options: str) -> subprocess.Popen:
        line = [command[0], *options, *command[1:]]
        env = clean_environment()
        return subprocess.Popen(line, cwd=tmp_path, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT)

    running = allocation()
    wait_until(lambda: list(store.glob("unfinished/records/*/attempts.json")), "a measurement")
    running.send_signal(signal.SIGTERM)
    assert running.wait(120) == 0
    said = log.read_text()
    assert "allocation: stopped in time, since SLURM ends this job soon; left to do" in said
    assert "measure_candidate        1\n" in said
    assert "settings " not in said.partition("left to do")[2]
    assert not list(store.glob("unfinished/records/*/attempts.json"))
    assert not (tmp_path / slot).exists()

    # The next one goes on, here until its own budget is used up.
    assert allocation("--budget-minutes", "0.1").wait(120) == 0
    assert "its budget is used up" in log.read_text()
