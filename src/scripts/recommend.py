"""Settle the tuning: selected.yaml, recommended.yaml and the table behind them."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.evidence.recommend import recommend
from speedproof.settings.execution import Execution


def _write(path: Path, what: str, choice: dict[str, Any], table: Path) -> None:
    """A complete execution, only its keys below the comments, so that it can be passed back in."""
    execution = Execution.parse(choice["execution"], what).plain()
    rate = f"{choice['targets_per_s']:,.0f} targets/s" if choice["targets_per_s"] else "no rate"
    head = [f"{what}: {choice['name']}, {rate} in tuning", choice["reason"], f"source: {table.name} beside this file"]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in head)
    files.write_text(path, comments + yaml.safe_dump(execution, sort_keys=False))


def main(
    finalists: Annotated[Path, typer.Option(help="ranking and last incumbent")],
    comparison: Annotated[Path, typer.Option(help="fresh blocks of that incumbent against the default")],
    parity: Annotated[Path, typer.Option(help="parity checks of the finalists")],
    deciding: Annotated[Path, typer.Option(help="the protocol's retention and no_regression")],
    selected: Annotated[Path, typer.Option(help="execution to write: numerically fastest that holds parity")],
    recommended: Annotated[Path, typer.Option(help="execution to write: confirmed, or the default")],
    table: Annotated[Path, typer.Option(help="tuning table to write")],
    records: Annotated[list[Path], typer.Argument(help="records of all slots")],
) -> None:
    """Write the two settled executions and the tuning table."""
    protocol = files.read_yaml(deciding)
    found = recommend(
        files.read_json(finalists),
        files.read_json(comparison),
        files.read_json(parity),
        [files.read_json(path) for path in records],
        retention=protocol["retention"],
        no_regression=protocol["no_regression"],
    )
    _write(selected, "selected", found["selected"], table)
    _write(recommended, "recommended", found["recommended"], table)
    files.write_json(table, found)
    for row in found["rows"]:
        rate = f"{row['targets_per_s']:>12,.0f} targets/s" if row["targets_per_s"] else f"{row['status']:>22}"
        print(f"{row['stage']:<14} {row['name']:<50} {rate}")
    print(f"selected     {found['selected']['name']}: {found['selected']['reason']}")
    print(f"recommended  {found['recommended']['name']}: {found['recommended']['reason']}")


if __name__ == "__main__":
    run(main)
