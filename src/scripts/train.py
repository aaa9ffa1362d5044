"""Train a recipe under an execution, from its beginning or from where an earlier attempt was stopped."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from speedproof.core import files
from speedproof.core.errors import UserError, run
from speedproof.core.identity import digest, source_digest
from speedproof.core.store import Store
from speedproof.measure.compiler_cache import compiler_cache, is_warm
from speedproof.measure.device_lock import device_lock
from speedproof.measure.environment import environment
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import read_execution, read_recipe
from speedproof.settings.recipe import Recipe

KIND = "runs"
OUTPUTS = ("recipe.yaml", "execution.yaml", "metrics.jsonl", "weights.safetensors", "result.json")
"""What a run leaves; the result comes last."""


def main(
    recipe: Annotated[Path, typer.Option(help="what is trained: a resolved recipe.yaml")],
    execution: Annotated[Path, typer.Option(help="how it is run: a complete execution, selected.yaml for one")],
    cache: Annotated[Path, typer.Option(help="manifest of the token cache, token_cache.json")],
    output: Annotated[
        Path,
        typer.Option(help="folder for result.json, metrics.jsonl, weights.safetensors, recipe.yaml, execution.yaml"),
    ],
    store: Annotated[Path, typer.Option(help="the content-addressed store, which also keeps the resume state")] = Path(
        "store"
    ),
    checkpoint_minutes: Annotated[float, typer.Option(min=0, help="time between two saves of the resume state")] = 10.0,
    repeat: Annotated[int, typer.Option(min=0, help="number of this run among identical ones")] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="use deterministic kernels: a resumed run has bitwise equal weights")
    ] = False,
    record_compile_error: Annotated[
        bool, typer.Option("--record-compile-error", help="write a result with that status and reason, and exit with 0")
    ] = False,
    end_time: Annotated[
        float | None,
        typer.Option(help="UNIX seconds at which this job is ended; known by itself within a SLURM job"),
    ] = None,
) -> None:
    """Train a recipe under an execution, from its beginning or from where an earlier attempt was stopped.

    A run that was finished before comes from the store. On TERM, Ctrl-C or shortly before the job's end the state is
    saved and the exit code is 75; the same command then goes on. One run or measurement at a time uses a device.
    """
    wanted, chosen = read_recipe(recipe), read_execution(execution)
    chosen.check(wanted)
    place = Store(store)
    machine = environment(chosen.device)

    # Here and not above: a run that only comes from the store has no use for three seconds of torch.
    if wanted.precision == "auto":
        from speedproof.training.precision import resolve_precision

        wanted, reason = resolve_precision(wanted, chosen.device)
        print(f"precision {reason}", flush=True)
    identity = {
        "source": source_digest("training"),
        "recipe": wanted.plain(),
        "execution": chosen.plain(),
        "repeat": repeat,
        "deterministic": deterministic,
        "class": machine["class"],
    }
    how = "from the store"
    if place.find(KIND, identity) is None:
        with contextlib.ExitStack() as held:
            waited = held.enter_context(place.lock(KIND, identity))
            if place.find(KIND, identity) is None:
                how = "trained"
                waited += held.enter_context(device_lock(chosen.device))
                if chosen.compile or chosen.evaluation_compile:
                    caches = held.enter_context(compiler_cache())
                    machine["facts"]["compiler_cache_warm"] = is_warm(caches)
                    os.environ.update(caches)
                scratch = place.scratch(KIND, identity)
                from speedproof.data.token_cache import TokenCache
                from speedproof.training import session, stopping, update
                from speedproof.training.compile import CompileError

                if deterministic:
                    update.deterministic()
                tokens = TokenCache.open(cache, place)
                training = session.Session(
                    wanted,
                    chosen,
                    tokens,
                    identity,
                    scratch,
                    checkpoint_interval_s=60 * checkpoint_minutes,
                    stop=stopping.Stop(end_time or stopping.job_end_time(os.environ)),
                    waited_s=waited,
                )
                tokens.verify()  # the run is kept under the identity of these data, so it has to be these
                try:
                    training.run()
                except CompileError as error:
                    if not record_compile_error:
                        raise
                    _write_failure(output, wanted, chosen, repeat, str(error), machine)
                    print(f"{output}: compile_error: {error}")
                    return
                with place.publish(KIND, identity) as folder:
                    training.write(folder, machine)
                shutil.rmtree(scratch, ignore_errors=True)
    entry = place.path(KIND, identity)
    for name in OUTPUTS:
        if not (entry / name).is_file():
            raise UserError(f"{entry}: this run lost its {name}; delete the folder and train again")
        files.place(entry / name, output / name)
    result = files.read_json(output / "result.json")
    print(
        f"{output}: {how}; {result['targets']:,} targets, loss {result['full_validation_loss']:.4f}, "
        f"{result['median_targets_per_s']:,.0f} targets/s steady, session {result['session_s']:,.1f} s"
        + (" (resumed)" if result["resumed"] else "")
    )


def _write_failure(
    output: Path, recipe: Recipe, execution: Execution, repeat: int, reason: str, machine: dict[str, Any]
) -> None:
    """Fill `output` for a run that could not be compiled: a status and its reason, no metrics and no weights.

    It never enters the store, so that the same command trains once there is a compiler.
    """
    files.write_yaml(output / "recipe.yaml", recipe.plain())
    files.write_yaml(output / "execution.yaml", execution.plain())
    for name in ("metrics.jsonl", "weights.safetensors"):
        files.write_text(output / name, "")
    result = {"status": "compile_error", "reason": reason, "recipe_digest": digest(recipe.plain())}
    result |= {"execution": execution.plain(), "seed": recipe.seed, "repeat": repeat, "environment": machine}
    files.write_json(output / "result.json", result)


if __name__ == "__main__":
    run(main)
