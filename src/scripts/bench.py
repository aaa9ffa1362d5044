"""Compare this project's model with transformers' on this machine's CPU, mode by mode."""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.core.store import Store
from speedproof.settings.experiment import Experiment, read_execution, recipe_for

ROOT = Path(__file__).resolve().parents[2]


def main(
    modes: Annotated[str | None, typer.Option(help="some modes, as fp32-eager,bf16-compiled; without it all")] = None,
    blocks: Annotated[int, typer.Option(min=1, help="A B B A blocks a mode; under three there is no verdict")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="one block of short processes: shows only that it runs")
    ] = False,
    preset: Annotated[str, typer.Option(help="the model")] = "20m",
    execution: Annotated[Path, typer.Option(help="the native side; each mode sets its own compilation")] = ROOT
    / "config/executions/cpu-20m.yaml",
    output: Annotated[Path, typer.Option(help="the rows as JSON")] = Path("results/bench/bench.json"),
    store: Annotated[Path, typer.Option(help="the content-addressed store, which keeps the comparisons")] = Path(
        "store"
    ),
) -> None:
    """Compare this project's model with transformers' on this machine's CPU, mode by mode.

    Updates (forward, backward, clip, finite check, AdamW) and forward passes alone, on one random batch of microbatch
    times context, in A B B A blocks of fresh processes. The share is of what the machine's matrix products reach at
    the model's own shapes. Needs envs/peers.txt.
    """
    from speedproof.evidence import bench
    from speedproof.measure.environment import environment
    from speedproof.model.peers import TRANSFORMERS, require_transformers

    require_transformers()
    chosen = [bench.Mode.named(name.strip()) for name in modes.split(",")] if modes else list(bench.MODES)
    cpus = len(os.sched_getaffinity(0))
    native = read_execution(execution).model_copy(update={"device": "cpu", "cpu_threads": cpus})
    default = Experiment.parse(files.read_yaml(ROOT / "config/default.yaml"))
    recipe = recipe_for(preset, default, ROOT / "config/presets", None)
    # One microbatch is one update, so that the optimizer's share is the largest it can be.
    update = native.microbatch * recipe.model.context_length
    recipe = recipe.model_copy(update={"targets_per_update": update, "budget_targets": 100 * update})
    work = bench.effort(quick, 1 if quick else blocks)
    machine = environment("cpu")["class"]
    ceilings = bench.ceilings(recipe, native, {mode.precision for mode in chosen})
    rates = ", ".join(f"{p} {v['update'] / 1e9:,.0f}" for p, v in ceilings.items() if v["update"])
    print(f"{datetime.now(UTC):%Y-%m-%d}, {machine['cpu']}, {cpus} CPUs, {native.cpu_threads} threads")
    print(f"torch {machine['torch']}, transformers {TRANSFORMERS}; matmul GFLOP/s: {rates}", flush=True)
    rows = []
    for mode in chosen:
        if ceilings[mode.precision]["update"] is None:
            rows.append(bench.unsupported(mode, ceilings[mode.precision]["reason"]))
        else:

            def progress(done: int, total: int, said: str, name: str = mode.name) -> None:
                print(f"  {name}, {done} of {total}: {said}", file=sys.stderr, flush=True)

            comparison = bench.run_mode(mode, recipe, native, work, Store(store), progress)
            rows.append(bench.row(mode, recipe, comparison, ceilings))
        print(bench.describe(rows[-1]), flush=True)
    value = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine,
        "transformers": TRANSFORMERS,
        "quick": quick,
        "recipe": recipe.plain(),
        "execution": native.plain(),
        "matmul_flops_per_s": ceilings,
        "rows": rows,
    }
    files.write_json(output, value)
    print(f"written to {output}")


if __name__ == "__main__":
    run(main)
