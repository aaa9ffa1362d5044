"""Print the verdict table of an experiment's summary, and where summary and figures lie."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.settings.experiment import read_config


def main(
    config: Annotated[list[Path], typer.Option(help="the config files of the experiment, in their order")],
    results: Annotated[Path, typer.Option(help="the folder of all results")] = Path("results"),
) -> None:
    """Print the verdict table of an experiment's summary, and where summary and figures lie."""
    from speedproof.evidence import tables

    names = [read_config(path).get("experiment") for path in (Path("config/default.yaml"), *config)]
    folder = results / [name for name in names if name][-1]
    summary = files.read_json(folder / "summary.json")
    print(tables.verdict_table(summary))
    print(*(f"\n- {line}" for line in tables.notes(summary)), sep="")
    print(f"\nsummary: {folder / 'summary.md'}\nfigures: {folder / 'figures'}")


if __name__ == "__main__":
    run(main)
