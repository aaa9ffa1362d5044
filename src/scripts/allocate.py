"""Ask SLURM for one job that runs the whole graph inside: profiles/allocation/job.sh with the config's resources."""

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from speedproof.core.errors import UserError, run
from speedproof.settings.experiment import Slurm, read_config

JOB = "profiles/allocation/job.sh"


def main(
    config: Annotated[list[Path], typer.Option(help="the config files of the experiment, in their order")],
    target: Annotated[str, typer.Option(help="what to make")] = "all",
    budget_minutes: Annotated[
        float | None, typer.Option(help="stop after this time; None: three minutes before the allocation ends")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command and submit nothing")] = False,
) -> None:
    """Ask SLURM for one job that runs the whole graph inside, one measurement after another.

    It takes account, partition, GPU and the rest from `slurm` in the config, for at most `slurm.allocation_minutes`.
    """
    settings: dict = {}
    for path in dict.fromkeys([Path("config/default.yaml"), *config]):
        given = read_config(path).get("slurm", {})
        if not isinstance(given, dict):
            raise UserError(f"{path}: slurm: found {given!r}; give keys below it, such as account, or leave it out")
        settings |= given
    command = submission(Slurm.parse(settings, "slurm"))
    budget = ["--budget-minutes", f"{budget_minutes:g}"] if budget_minutes else []
    command += [JOB, *budget, "--configfile", *map(str, config), "--", target]
    print(shlex.join(command), flush=True)
    if dry_run:
        return
    Path("logs").mkdir(exist_ok=True)
    try:
        answer = subprocess.run(command, text=True, capture_output=True)
    except FileNotFoundError:
        raise UserError(f"sbatch: not found on PATH; run it on a login node, or {JOB} itself without SLURM") from None
    if answer.returncode:
        raise UserError(f"slurm: {answer.stderr.strip()}; correct it in the config")
    job = answer.stdout.strip().partition(";")[0]
    print(
        f"job {job}: follow it with tail -F logs/allocation-{job}.log, end it with scancel --signal=TERM --batch {job}"
    )


def submission(slurm: Slurm) -> list[str]:
    """The sbatch command with what the largest step of the graph needs."""
    gpus = f"{slurm.gpu_type}:{slurm.gpus}" if slurm.gpu_type else str(slurm.gpus)
    options = {
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "reservation": slurm.reservation,
        "time": slurm.allocation_minutes,
        "mem": max(slurm.mem_mb, slurm.data_mem_mb),
        "cpus-per-task": max(slurm.cpus, slurm.data_cpus),
        "gpus": gpus if slurm.gpus else None,
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return ["sbatch", "--parsable", "--nodes=1", "--ntasks=1", *given]


if __name__ == "__main__":
    run(main)
