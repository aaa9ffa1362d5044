"""The stub commands do what SLURM's do, as far as the executor of Snakemake and the workflow's tests need them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from places import Stubs

# The first look comes when short jobs are over: after a look that finds nothing new the executor adds ten seconds.
SNAKEMAKE = ["snakemake", "--executor", "slurm", "--jobs", "8", "--latency-wait", "2", "--slurm-keep-successful-logs"]
SNAKEMAKE += ["--slurm-init-seconds-before-status-checks", "1", "--seconds-between-status-checks", "1"]


def over(state: str) -> bool:
    return state not in ("PENDING", "RUNNING")


def test_a_job_runs_and_its_state_is_told(stubs: Stubs) -> None:
    wrap = "--wrap=srun -n1 --gpus=1 sh -c 'echo $SLURM_JOB_ID $CUDA_VISIBLE_DEVICES $SLURM_PROCID'"
    done = stubs.run("sbatch", "--parsable", "--gpus=h100:2", "-c", "3", "--mem", "500", "-o", "%j.log", wrap)
    assert done.stdout == "1\n"
    assert stubs.wait("1", over) == "COMPLETED"
    assert (stubs.folder / "1.log").read_text() == "1 0,1 0\n"
    assert stubs.run("sacct", "-n", "--format=AllocTRES").stdout == "cpu=3,mem=500M,node=1,gres/gpu=2\n"
    assert stubs.calls("sbatch") == [["--parsable", "--gpus=h100:2", "-c", "3", "--mem", "500", "-o", "%j.log", wrap]]

    failed = subprocess.run(["sbatch", "--parsable"], input="#!/bin/sh\nexit 3\n", cwd=stubs.folder, env=stubs.env,
                            capture_output=True, text=True)  # fmt: skip
    assert stubs.wait(failed.stdout.strip(), over) == "FAILED"
    assert stubs.run("sacct", "-n", "-j", "2", "--format=ExitCode").stdout == "3:0\n"


def test_a_cancelled_job_ends_with_all_that_it_started(stubs: Stubs) -> None:
    stubs.run("sbatch", "--parsable", "--name=x", "--wrap=sleep 300 & echo $! >pid; wait")
    while not (stubs.folder / "pid").exists() or not (pid := (stubs.folder / "pid").read_text().strip()):
        time.sleep(0.05)
    stubs.run("scancel", "1")
    assert stubs.wait("1", over) == f"CANCELLED by {os.getuid()}"
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "zombie" in status.read_text()
    assert stubs.run("squeue", "--format=%i|%T", "--states=all", "--noheader").stdout == "1|CANCELLED\n"


SHELL = (
    "trap 'echo term; exit 1' TERM; echo run ${SLURM_RESTART_COUNT:-0}; [ -z $SLURM_RESTART_COUNT ] && sleep 300 & wait"
)


@pytest.mark.parametrize(
    ("end", "state", "log"),
    [
        ("TIMEOUT@0.5", "TIMEOUT", "run 0\nterm\n"),
        ("OUT_OF_MEMORY@0.5", "OUT_OF_MEMORY", "run 0\n"),
        ("PREEMPTED@0.5", "COMPLETED", "run 0\nterm\nrun 1\n"),
        ("UNKNOWN", "UNKNOWN", None),
        ("CANCELLED by 1000", "CANCELLED by 1000", None),
    ],
)
def test_a_job_ends_as_planned(stubs: Stubs, end: str, state: str, log: str | None) -> None:
    submit = ["sbatch", "--comment", "rule_train_wildcards_a", "--output=log", f"--wrap={SHELL}"]
    stubs.run(*submit, ENDS={"rule_train*": [end]})
    assert stubs.wait("1", lambda seen: seen == state) == state
    assert (stubs.folder / "log").exists() == (log is not None)
    assert log is None or (stubs.folder / "log").read_text() == log


def test_what_the_site_lacks_is_refused(stubs: Stubs) -> None:
    for option in ("--account=nobody", "--partition=nowhere"):
        done = stubs.run("sbatch", option, "--wrap=true", ACCOUNTS=["lab"], PARTITIONS=["main"])
        assert (done.returncode, done.stdout) == (1, "")
        assert "Invalid " in done.stderr
    assert stubs.run("sbatch", "--wrap=true", REFUSE=3).returncode == 1
    assert stubs.run("sbatch", "--wrap=true", REFUSE=3).returncode == 0
    assert [stubs.run("sacct", "-n", AWAY=2).returncode for _ in range(3)] == [1, 1, 0]
    assert stubs.run("sinfo", "-o", "%P").stdout.split() == ["PARTITION", "main*", "spare"]


def workflow(folder: Path, names: list[str]) -> None:
    (folder / "Snakefile").write_text(f"""
rule all:
    input: expand("out/{{name}}.txt", name={names})

rule measure:
    output: "out/{{name}}.txt"
    threads: 2
    resources:
        gpu=1,
        runtime=5,
        mem_mb=2000,
        slurm_account=lambda wildcards: "nobody" if wildcards.name == "account" else "lab",
        slurm_partition=lambda wildcards: "nowhere" if wildcards.name == "partition" else "main",
    shell: "echo $CUDA_VISIBLE_DEVICES $SLURM_JOB_ID > {{output}}"
""")


def test_a_workflow_goes_through_them(stubs: Stubs) -> None:
    workflow(stubs.folder, ["a"])
    # One submission is refused and one job ends at its limit: two retries are used up, the third attempt holds.
    done = stubs.run(*SNAKEMAKE, "--retries", "2", REFUSE=1, ENDS={"rule_measure*": ["TIMEOUT"]})
    assert done.returncode == 0, done.stderr
    assert (stubs.folder / "out/a.txt").read_text() == "0 3\n"
    assert "Socket timed out" in done.stderr
    assert "SLURM status is: 'TIMEOUT'" in done.stderr

    first, *_, last = stubs.calls("sbatch")
    assert len(stubs.calls("sbatch")) == 3
    assert "--attempt 3" in last[-1]
    name = first[first.index("--job-name") + 1]
    log = stubs.folder / ".snakemake/slurm_logs/rule_measure/a/%j.log"
    assert first[:-1] == [
        *["--parsable", "--job-name", name, "--output", str(log), "--export=ALL"],
        *["--comment", "rule_measure_wildcards_a", "-A", "lab", "-p", "main", "-t", "5", "--mem", "2000"],
        *["--cpus-per-task=2", "-D", str(stubs.folder), "--gpus=1"],
    ]
    assert first[-1].startswith("--wrap=")
    [step] = stubs.calls("srun")
    assert step[:5] == ["-n1", "--cpu-bind=q", "--cpus-per-task=2", "--gpus=1", "--nodes=1"]


def test_each_way_to_fail_is_named(stubs: Stubs) -> None:
    states = {"limit": "TIMEOUT", "memory": "OUT_OF_MEMORY", "node": "NODE_FAIL", "unknown": "UNKNOWN"}
    workflow(stubs.folder, [*states, "account", "partition"])
    ends = {f"rule_measure_wildcards_{name}": [state] for name, state in states.items()}
    done = stubs.run(*SNAKEMAKE, "--keep-going", ENDS=ends)
    assert done.returncode == 1
    for state in ("TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"):
        assert f"SLURM status is: '{state}'" in done.stderr
    # The executor takes UNKNOWN for success; only the missing output shows that it was none.
    assert "out/unknown.txt (missing locally" in done.stderr
    assert "The given account nobody appears to be invalid" in done.stderr
    assert "Invalid partition name specified" in done.stderr
