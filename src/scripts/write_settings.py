"""Write a slice of the config as a file, so that what depends on it can name it as an input."""

import ast
from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run


def main(
    value: Annotated[str, typer.Option(help="the slice, as Python or JSON writes a dictionary of plain values")],
    output: Annotated[Path, typer.Option(help="the YAML file to write")],
) -> None:
    """Write a slice of the config as YAML."""
    files.write_yaml(output, ast.literal_eval(value))


if __name__ == "__main__":
    run(main)
