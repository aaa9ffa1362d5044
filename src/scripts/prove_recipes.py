"""Prove that the arms of the matched runs differ in execution only, and write each arm's execution."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import UserError, run
from speedproof.evidence.arms import resolve_arms
from speedproof.settings.experiment import Arm, read_execution, read_recipe


def main(
    recipe: Annotated[Path, typer.Option(help="the recipe that all arms share")],
    default: Annotated[Path, typer.Option(help="the default execution")],
    arms: Annotated[Path, typer.Option(help="the config's matched.arms")],
    output: Annotated[Path, typer.Option(help="the table of arms to write")],
    folder: Annotated[Path, typer.Option(help="folder for <arm>.yaml, the arms' executions")],
    selected: Annotated[Path | None, typer.Option(help="the tuner's numerically fastest execution")] = None,
    recommended: Annotated[Path | None, typer.Option(help="the tuner's confirmed execution")] = None,
) -> None:
    """Resolve every arm to a complete execution and print the keys in which they differ."""
    settings = files.read_yaml(arms)
    if not isinstance(settings, dict):
        raise UserError(f"{arms}: found {settings!r}; expected arms by name")
    paths = {"default": default, "selected": selected, "recommended": recommended}
    found = resolve_arms(
        read_recipe(recipe),
        {name: Arm.parse(arm, f"matched.arms.{name}") for name, arm in settings.items()},
        {name: read_execution(path) for name, path in paths.items() if path},
    )
    for name, arm in found["arms"].items():
        files.write_yaml(folder / f"{name}.yaml", arm["execution"])
    files.write_json(output, found)
    print(f"recipe of all {len(found['arms'])} arms: {found['recipe_digest'][:12]}")
    for key, values in found["differing"].items():
        print(f"{key:<20} " + "  ".join(f"{name}: {value}" for name, value in values.items()))
    for a, b in found["identical"]:
        print(f"{a} and {b} are the same execution: nothing but noise can lie between them")


if __name__ == "__main__":
    run(main)
