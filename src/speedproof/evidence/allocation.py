"""What the scheduler gave for an experiment: seconds and GPU-hours of its jobs, from sacct."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from typing import Any

ANSWER_S = 60.0


def allocation(jobs: Iterable[str]) -> dict[str, Any]:
    """`seconds` and `gpu_hours` of these SLURM jobs and of the one around this process; null with the `reason`.

    A job that was requeued counts each time it ran; one that still runs counts up to now (`running` names it).
    """
    around = os.environ.get("SLURM_JOB_ID")
    names = sorted({*jobs, *([around] if around else [])})
    nothing = {"seconds": None, "gpu_hours": None, "jobs": names, "running": []}
    if not names:
        return nothing | {"reason": "no result was made in a SLURM job"}
    if shutil.which("sacct") is None:
        return nothing | {"reason": "sacct is not on PATH here; write the summary where it is"}
    fields = "JobID,State,ElapsedRaw,AllocTRES"
    command = ["sacct", "-X", "--duplicates", "--parsable2", "--noheader", f"--format={fields}", "-j", ",".join(names)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
    except subprocess.TimeoutExpired:
        return nothing | {"reason": f"sacct did not answer within {ANSWER_S:.0f} s"}
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["no word"])[0]
        return nothing | {"reason": f"sacct failed with exit code {error.returncode}: {said}"}
    return nothing | totals(answer, names)


def totals(answer: str, names: list[str]) -> dict[str, Any]:
    """Sums over sacct's lines `JobID|State|ElapsedRaw|AllocTRES`; null where a job is missing from them."""
    lines = [line.split("|") for line in answer.splitlines() if line.count("|") == 3]
    missing = sorted(set(names) - {line[0] for line in lines})
    if missing:
        return {"reason": f"sacct does not know the jobs {', '.join(missing)}"}
    spent = [(int(elapsed or 0), _gpus(granted)) for _, _, elapsed, granted in lines]
    return {
        "seconds": sum(seconds for seconds, _ in spent),
        "gpu_hours": sum(seconds * gpus for seconds, gpus in spent) / 3600,
        "running": sorted({name for name, state, _, _ in lines if state == "RUNNING"}),
        "reason": None,
    }


def _gpus(granted: str) -> int:
    found = re.search(r"(?:^|,)gres/gpu=(\d+)", granted)
    return int(found.group(1)) if found else 0
