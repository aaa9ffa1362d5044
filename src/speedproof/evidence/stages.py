"""The tuner's stages as a table: what each one varies, on how many executions, in how many places.

How many places a stage has follows from the config alone, so that the graph of jobs is known before anything has run.
"""

import itertools
from dataclasses import dataclass
from typing import Any

from speedproof.core.errors import UserError
from speedproof.core.identity import differences
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import Tuning
from speedproof.settings.recipe import Recipe


@dataclass(frozen=True)
class Stage:
    """One stage: the execution settings it varies, each with the key of `tuning` that lists its values.

    `bases` executions are varied, the incumbent first and then the fastest others; 0 means the default alone, with
    every combination of the values (a grid). `needs` is the setting without which the stage has no effect on a base.
    """

    name: str
    varies: dict[str, str]
    bases: int
    needs: tuple[str, Any] | None = None


STAGES = (
    Stage("grid", {"microbatch": "microbatches", "compile": "compile"}, bases=0),
    Stage("sdpa", {"sdpa_backend": "sdpa_backends"}, bases=2),
    Stage("compile_mode", {"compile_mode": "compile_modes"}, bases=1, needs=("compile", True)),
    Stage("kernels", {"loss": "losses", "projections": "projections"}, bases=1),
    Stage("update", {"optimizer": "optimizers", "finite_checks": "finite_checks", "capture": "captures"}, bases=1),
    Stage("cpu_threads", {"cpu_threads": "cpu_threads"}, bases=1),
    Stage("memory", {"allocator": "allocators", "tokens": "tokens"}, bases=1),
)
"""In the order they run. A later stage is one more line here and one more list in `tuning`."""


def combinations(stage: Stage, tuning: Tuning, default: Execution) -> list[dict[str, Any]]:
    """Settings that the stage puts on each base, in the order of the config; a grid always holds the default's.

    Left out are those that exclude each other on the default, a captured update without an arena for one.
    """
    own = {setting: getattr(default, setting) for setting in stage.varies}
    lists = [list(dict.fromkeys(getattr(tuning, key))) for key in stage.varies.values()]
    every = [dict(zip(stage.varies, values, strict=True)) for values in itertools.product(*lists)]
    found = [settings for settings in every if not default.model_copy(update=settings).contradiction()]
    if stage.bases == 0:
        return found if own in found else [own, *found]
    return [settings for settings in found if settings != own]


def stage_named(name: str) -> Stage:
    """The stage called `name`. Raises UserError listing the known ones."""
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise UserError(f"stage: found {name!r}; known stages are {', '.join(s.name for s in STAGES)}")


def slots(stage: str, tuning: Tuning, default: Execution) -> int:
    """Places of a stage, from the config alone."""
    entry = stage_named(stage)
    count = len(combinations(entry, tuning, default))
    grid = len(combinations(STAGES[0], tuning, default))
    return count * (min(entry.bases, grid) or 1)


def stage_names(tuning: Tuning, default: Execution) -> list[str]:
    """The stages that exist, in order; one whose lists hold nothing but the default's values does not."""
    return [stage.name for stage in STAGES if slots(stage.name, tuning, default)]


def check(tuning: Tuning, recipe: Recipe) -> None:
    """Raise UserError naming tuning.microbatches where one does not divide the recipe's update."""
    for microbatch in tuning.microbatches:
        if recipe.blocks_per_update % microbatch:
            fitting = [m for m in range(1, recipe.blocks_per_update + 1) if recipe.blocks_per_update % m == 0]
            raise UserError(
                f"tuning.microbatches: {microbatch} does not divide the {recipe.blocks_per_update} blocks of an update "
                f"(recipe.targets_per_update {recipe.targets_per_update}); use some of {fitting}"
            )


def name_of(execution: Execution, default: Execution) -> str:
    """What a table calls an execution: how it compiles, its microbatch, and what else differs from the default."""
    parts = ["compiled" if execution.compile else "eager", f"microbatch {execution.microbatch}"]
    for key, value in execution.plain().items():
        if key not in ("compile", "microbatch") and value != default.plain()[key]:
            parts.append(f"{key} {value}")
    return ", ".join(parts)


def simplicity(execution: Execution, default: Execution) -> tuple[Any, ...]:
    """Smaller is simpler: eager, then default compilation, then other modes; few changes; small microbatch."""
    mode = 0 if not execution.compile else 1 if execution.compile_mode == "default" else 2
    other = {key for key in differences(execution.plain(), default.plain()) if key not in ("compile", "microbatch")}
    return mode, execution.sdpa_backend != "auto", len(other), execution.microbatch
