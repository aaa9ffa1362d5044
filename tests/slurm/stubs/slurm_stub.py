#!/usr/bin/env python3
"""SLURM's commands without SLURM: sbatch, srun, sacct, squeue, scancel, sinfo, scontrol and sacctmgr as one program.

Put this folder first on PATH and set STUB_SLURM_LOG to a file in an empty folder. Each call appends one JSON line to
it, `{"command": "sbatch", "argv": [...]}`. A submitted script runs at once as a local process; its state lies beside
the log in `<log>.jobs/<id>.json`, and sacct and squeue report that. Nothing is scheduled, limited or confined.

What goes wrong is set by a test, as JSON in the environment:

STUB_SLURM_ENDS     how jobs end, by comment (Snakemake's `rule_<name>_wildcards_<values>`, with * and ?), one entry a
                    submission, natural ends afterwards: {"rule_train*": ["TIMEOUT@2", "FAILED"]}
                      STATE            the script never starts; UNKNOWN, OUT_OF_MEMORY, NODE_FAIL, "CANCELLED by 1000"
                      STATE@SECONDS    the script runs that long, then gets TERM and a second later KILL (OUT_OF_MEMORY
                                       and NODE_FAIL: KILL at once)
                      PREEMPTED@S      the same, then the script is run again with SLURM_RESTART_COUNT=1
                      EARLY            told as COMPLETED while the script still runs, as where files are seen late
STUB_SLURM_REFUSE   the first so many submissions fail: 2
STUB_SLURM_AWAY     the first so many calls of sacct fail, and of squeue: 3; or those after the third up to the
                    tenth: [3, 10]
STUB_SLURM_ACCOUNTS, STUB_SLURM_PARTITIONS    what exists, the first is the default: ["lab"], ["main", "spare"]
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import getpass
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

SENTENCE = {
    "refuse": "Batch job submission failed: Socket timed out on send/recv operation",
    "account": "Batch job submission failed: Invalid account or account/partition combination specified",
    "partition": "Batch job submission failed: Invalid partition name specified",
    "away": "slurm_persist_conn_open_without_init: failed to open persistent connection to host:localhost:6819: "
    "Connection refused",
}
GRACE_S = 1.0
# Options of sbatch and srun that stand alone; of any other, the next word is the value unless `=` gives it.
FLAGS = {"--parsable", "--requeue", "--no-requeue", "--exclusive", "--overlap", "--hold", "-H"}
LONG = {"-A": "--account", "-p": "--partition", "-t": "--time", "-C": "--constraint", "-D": "--chdir", "-n": "--ntasks"}
LONG |= {"-c": "--cpus-per-task", "-o": "--output", "-J": "--job-name", "-N": "--nodes", "-q": "--qos"}


def setting(name: str, default):
    """One of the STUB_SLURM_ settings, decoded."""
    return json.loads(os.environ.get(f"STUB_SLURM_{name}") or json.dumps(default))


def fail(sentence: str) -> None:
    print(f"{Path(sys.argv[0]).name}: error: {sentence}", file=sys.stderr)
    sys.exit(1)


LOG = Path(
    os.environ.get("STUB_SLURM_LOG") or fail("STUB_SLURM_LOG: not set; name a file in an empty folder")
).resolve()
JOBS = LOG.with_name(LOG.name + ".jobs")


def record(command: str, argv: list[str]) -> int:
    """Write the call down; return how many calls of this command came before it."""
    JOBS.mkdir(parents=True, exist_ok=True)
    with LOG.open("a+") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        log.seek(0)
        before = sum(json.loads(line)["command"] == command for line in log)
        log.write(json.dumps({"command": command, "argv": argv}) + "\n")
    return before


def options(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line of sbatch or srun into options by their long names, and the words after them."""
    found: dict[str, str] = {}
    words = list(argv)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") and len(name) > 2:  # -n1
            name, equals, value = name[:2], "=", name[2:]
        if not equals and name not in FLAGS:
            value = words.pop(0)
        found[LONG.get(name, name)] = value
    return found, words


# ---- jobs -----------------------------------------------------------------------------------------------------------


def save(job: dict) -> None:
    """Write a job's state whole; readers never see half of it."""
    partial = JOBS / f"{job['id']}.{os.getpid()}.partial"
    partial.write_text(json.dumps(job, indent=1))
    partial.replace(JOBS / f"{job['id']}.json")


def load() -> list[dict]:
    """All jobs, oldest first."""
    return sorted((json.loads(path.read_text()) for path in JOBS.glob("*.json")), key=lambda job: int(job["id"]))


def sbatch(argv: list[str], before: int) -> None:
    given, words = options(argv)
    if before < setting("REFUSE", 0):
        fail(SENTENCE["refuse"])
    accounts, partitions = setting("ACCOUNTS", ["lab"]), setting("PARTITIONS", ["main", "spare"])
    account, partition = given.get("--account", accounts[0]), given.get("--partition", partitions[0])
    if account not in accounts:
        fail(SENTENCE["account"])
    if partition not in partitions:
        fail(SENTENCE["partition"])
    if "--wrap" in given:
        script = f"#!/bin/sh\n{given['--wrap']}\n"
    else:
        script = Path(words[0]).read_text() if words else sys.stdin.read()
    comment = given.get("--comment", "")
    same = sum(job["Comment"] == comment for job in load())
    ends = next((ends for glob, ends in setting("ENDS", {}).items() if fnmatch.fnmatchcase(comment, glob)), [])
    job = {
        "id": str(before + 1),
        "JobName": given.get("--job-name", "wrap"),
        "Account": account,
        "Partition": partition,
        "Comment": comment,
        "State": "PENDING",
        "ExitCode": "0:0",
        "NCPUS": given.get("--cpus-per-task", "1"),
        "ReqMem": f"{given.get('--mem', '256')}M",
        "AllocTRES": f"cpu={given.get('--cpus-per-task', '1')},mem={given.get('--mem', '256')}M,node=1",
        "gpus": given.get("--gpus", "").rpartition(":")[2],
        "minutes": given.get("--time", ""),
        "output": given.get("--output", "slurm-%j.out").replace("%j", str(before + 1)),
        "folder": given.get("--chdir", str(Path.cwd())),
        "end": ends[same] if same < len(ends) else "",
        "restarts": 0,
    }
    if job["gpus"]:
        job["AllocTRES"] += f",gres/gpu={job['gpus']}"
    script_file = JOBS / f"{job['id']}.sh"
    script_file.write_text(script)
    script_file.chmod(0o755)
    save(job)
    print(job["id"] if "--parsable" in given else f"Submitted batch job {job['id']}", flush=True)
    if os.fork() == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        run(job)
        os._exit(0)


def run(job: dict) -> None:
    """Run a job's script to its end, as planned, on its own, or by scancel. Only this process writes its state."""
    state, _, seconds = job["end"].partition("@")
    started = time.monotonic()
    job |= {"State": "RUNNING", "start": datetime.now().isoformat(timespec="seconds")}
    if state == "EARLY":
        save(job | {"State": "COMPLETED"})
    elif state and not seconds:
        job |= {"State": state, "ExitCode": "1:0"}
        return save(job)
    else:
        save(job)
    code = None
    with (Path(job["folder"]) / job["output"]).open("ab") as out:
        script = subprocess.Popen(
            [JOBS / f"{job['id']}.sh"],
            cwd=job["folder"],
            env=environment(job),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while (code := script.poll()) is None:
            cancelled = JOBS / f"{job['id']}.cancel"
            if cancelled.exists():
                state = f"CANCELLED by {cancelled.read_text()}"
            elif not seconds or time.monotonic() < started + float(seconds):
                time.sleep(0.05)
                continue
            end_group(script, gently=state not in ("OUT_OF_MEMORY", "NODE_FAIL"))
            break
    if code is not None:
        state = "FAILED" if code else "COMPLETED"
    job |= {"State": state, "ExitCode": f"{max(code or 0, 0)}:{max(-(code or 0), 0)}", "end": ""}
    job["elapsed"] = round(time.monotonic() - started)
    save(job)
    if state == "PREEMPTED":
        time.sleep(GRACE_S)
        run(job | {"restarts": job["restarts"] + 1})


def end_group(script: subprocess.Popen, gently: bool) -> None:
    """End a script and all that it started."""
    if gently:
        os.killpg(script.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            script.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(script.pid, signal.SIGKILL)
    script.wait()


def environment(job: dict) -> dict[str, str]:
    """What SLURM 22.05 sets in a job, as far as programs ask for it: it gives no start or end time."""
    given = {
        "SLURM_JOB_ID": job["id"],
        "SLURM_JOBID": job["id"],
        "SLURM_JOB_NAME": job["JobName"],
        "SLURM_JOB_ACCOUNT": job["Account"],
        "SLURM_JOB_PARTITION": job["Partition"],
        "SLURM_CPUS_PER_TASK": job["NCPUS"],
        "SLURM_JOB_NODELIST": "node1",
        "SLURMD_NODENAME": "node1",
        "SLURM_CLUSTER_NAME": "stub",
    }
    if job["gpus"]:
        given["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(int(job["gpus"]))))
    if job["restarts"]:
        given["SLURM_RESTART_COUNT"] = str(job["restarts"])
    return os.environ | given


def srun(argv: list[str], before: int) -> None:
    """Run the command as the job step's one task."""
    _, command = options(argv)
    os.environ |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": str(before)}
    os.execvp(command[0], command)


def scancel(argv: list[str], before: int) -> None:
    for job in load():
        if job["id"] in argv and job["State"] in ("PENDING", "RUNNING"):
            (JOBS / f"{job['id']}.cancel").write_text(str(os.getuid()))


# ---- reports --------------------------------------------------------------------------------------------------------


def away(before: int) -> None:
    """Fail as sacct does while slurmdbd is not there."""
    first, last = span if isinstance(span := setting("AWAY", 0), list) else (0, span)
    if first <= before < last:
        fail(SENTENCE["away"])


def selected(argv: list[str]) -> list[dict]:
    """The jobs that -j or --name asks for."""
    line = shlex.join(argv)
    number, name = re.search(r"(?:-j|--jobs)[ =]?(\d+)", line), re.search(r"--name[ =](\S+)", line)
    return [
        job
        for job in load()
        if (not number or job["id"] == number[1]) and (not name or job["JobName"] == name[1].strip("'"))
    ]


def sacct(argv: list[str], before: int) -> None:
    away(before)
    line = shlex.join(argv)
    asked = re.search(r"(?:--format|-o)[ =]?(\S+)", line)
    fields = re.sub(r"%-?\d+", "", asked[1]).split(",") if asked else ["JobID", "State"]
    steps = re.search(r"-j[ =]?\d+\.\d+", line)
    for job in [] if steps else selected(argv):
        known = {name.lower(): str(value) for name, value in job.items()}
        known |= {"jobid": job["id"], "jobidraw": job["id"], "nodelist": "node1", "nnodes": "1", "restarts": ""}
        known |= {"elapsed": str(timedelta(seconds=job.get("elapsed", 0))).rjust(8, "0"), "totalcpu": "00:00.000"}
        print("|".join(known.get(field.lower(), "") for field in fields))


def squeue(argv: list[str], before: int) -> None:
    away(before)
    everything = "--states=all" in argv
    for job in selected(argv):
        state = job["State"].split()[0]
        if everything or state in ("PENDING", "RUNNING"):
            print(f"{job['id']}|{state}")


def sinfo(argv: list[str], before: int) -> None:
    first, *others = setting("PARTITIONS", ["main", "spare"])
    print("PARTITION", f"{first}*", *others, sep="\n")


def scontrol(argv: list[str], before: int) -> None:
    """`show config`, and of `show job N` what tells a job its end."""
    if argv[:2] == ["show", "config"]:
        print("MaxArraySize            = 1001\nMinJobAge               = 300 sec")
    for job in load() if argv[:2] == ["show", "job"] else []:
        if job["id"] in argv and "start" in job:
            end = datetime.fromisoformat(job["start"]) + timedelta(minutes=int(job["minutes"] or 0))
            print(f"JobId={job['id']} JobState={job['State'].split()[0]}")
            print(f"   StartTime={job['start']} EndTime={end.isoformat(timespec='seconds')} Deadline=N/A")


def sacctmgr(argv: list[str], before: int) -> None:
    """The accounts of the calling user."""
    if getpass.getuser() in argv:
        print(*setting("ACCOUNTS", ["lab"]), sep="\n")


COMMANDS = {f.__name__: f for f in (sbatch, srun, sacct, squeue, scancel, sinfo, scontrol, sacctmgr)}

if __name__ == "__main__":
    name = Path(sys.argv[0]).name
    if name not in COMMANDS:
        fail(f"call it by one of {', '.join(COMMANDS)}")
    COMMANDS[name](sys.argv[1:], record(name, sys.argv[1:]))
