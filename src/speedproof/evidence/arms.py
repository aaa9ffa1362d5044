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
    for name, arm in arms.items():
        where = f"matched.arms.{name}"
        if not re.match(NAME, name):
            raise UserError(f"{where}: the name becomes a folder's; use letters, digits, '.', '_' and '-'")
        for key in arm.set:
            if key in Recipe.model_fields:
                raise UserError(f"{where}.set.{key}: belongs to the recipe, which all arms share; set it under recipe")
        if arm.base not in bases:
            raise UserError(f"{where}.base: {arm.base!r} was not given; pass --{arm.base}")
        executions[name] = changed(bases[arm.base], arm.set, f"{where}.set")
        executions[name].check(recipe)
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


def _effective(execution: dict[str, Any]) -> dict[str, Any]:
    """The execution without what has no effect in it."""
    return execution if execution["compile"] else execution | {"compile_mode": "default", "partial": "eager"}
