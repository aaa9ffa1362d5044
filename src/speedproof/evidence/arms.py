"""The arms of the matched runs, proved before they train to share one recipe and differ in execution only."""

import re
from itertools import combinations
from typing import Any

from speedproof.core.errors import UserError
from speedproof.core.identity import digest
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import NAME, Arm, changed
from speedproof.settings.recipe import Recipe


def resolve_arms(recipe: Recipe, arms: dict[str, Arm], bases: dict[str, Execution]) -> dict[str, Any]:
    """Each arm's complete execution, the keys in which they differ, and the one recipe that all of them share.

    `bases` are the executions that arms start from, by name. Raises UserError naming the arm and the key where one
    would change the recipe, cannot run it, or starts from a base that was not given.
    """
    executions: dict[str, Execution] = {}
    check_settings(arms, next(iter(bases.values())))
    for name, arm in arms.items():
        where = f"matched.arms.{name}"
        if arm.base not in bases:
            raise UserError(f"{where}.base: {arm.base!r} was not given; pass --{arm.base}")
        executions[name] = changed(bases[arm.base], arm.set, f"{where}.set")
        _check(executions[name], recipe, where)
    plain = {name: execution.plain() for name, execution in executions.items()}
    keys = [key for key in Execution.model_fields if len({digest(e[key]) for e in plain.values()}) > 1]
    return {
        "recipe": recipe.plain(),
        "recipe_digest": digest(recipe.plain()),
        "order": list(arms),
        "arms": {
            name: {
                "base": arms[name].base,
                "set": arms[name].set,
                "execution": plain[name],
                "recipe_digest": digest(recipe.plain()),
            }
            for name in arms
        },
        "differing": {key: {name: plain[name][key] for name in arms} for key in keys},
        "identical": [[a, b] for a, b in combinations(arms, 2) if _effective(plain[a]) == _effective(plain[b])],
    }


def check_settings(arms: dict[str, Arm], default: Execution, recipe: Recipe | None = None) -> None:
    """What of the arms can be checked before anything is tuned: names, keys and values, and whatever starts from
    `default` against `recipe` where that is given. Raises UserError naming the arm and the key.
    """
    for name, arm in arms.items():
        where = f"matched.arms.{name}"
        if not re.fullmatch(NAME, name):
            raise UserError(f"{where}: the name becomes a folder's; use letters, digits, '.', '_' and '-'")
        for key in arm.set:
            if key in Recipe.model_fields:
                raise UserError(f"{where}.set.{key}: belongs to the recipe, which all arms share; set it under recipe")
        execution = changed(default, arm.set, f"{where}.set")
        if recipe is None:
            continue
        if arm.base == "default":
            _check(execution, recipe, where)
        elif "microbatch" in arm.set:
            _check(default.model_copy(update={"microbatch": execution.microbatch}), recipe, where)


def _check(execution: Execution, recipe: Recipe, where: str) -> None:
    try:
        execution.check(recipe)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _effective(execution: dict[str, Any]) -> dict[str, Any]:
    """The execution without what has no effect in it."""
    return execution if execution["compile"] else execution | {"compile_mode": "default", "partial": "eager"}
