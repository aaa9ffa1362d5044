"""Write a recipe with another seed."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.settings.experiment import read_recipe
from speedproof.settings.recipe import Recipe


def main(
    recipe: Annotated[Path, typer.Option(help="a resolved recipe")],
    seed: Annotated[int, typer.Option(min=0, help="seed of the weights and of the order of the data")],
    output: Annotated[Path, typer.Option(help="the recipe to write")],
) -> None:
    """Write a recipe that differs from another in its seed only."""
    files.write_yaml(output, Recipe.parse(read_recipe(recipe).plain() | {"seed": seed}).plain())


if __name__ == "__main__":
    run(main)
