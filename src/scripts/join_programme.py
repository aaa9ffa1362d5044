"""Join the programme's results: rows set against each other, pairs judged."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import UserError, run
from speedproof.evidence.programme import join
from speedproof.settings.experiment import read_execution
from speedproof.settings.programme import Programme


def main(
    programme: Annotated[Path, typer.Option(help="the config's programme: what each row and pair is")],
    execution: Annotated[Path, typer.Option(help="the execution that its settings change")],
    deciding: Annotated[Path, typer.Option(help="the deciding part of the protocol")],
    output: Annotated[Path, typer.Option(help="the joined programme to write")],
    results: Annotated[list[Path] | None, typer.Argument(help="rows/<name>.json and pairs/<name>.json")] = None,
) -> None:
    """Join the programme's results: rows set against each other, pairs judged."""
    found: dict[str, dict] = {"rows": {}, "pairs": {}}
    for path in results or []:
        if path.parent.name not in found:
            raise UserError(f"{path}: lies in no folder called rows or pairs; pass results as the programme left them")
        found[path.parent.name][path.stem] = files.read_json(path)
    thresholds = files.read_yaml(deciding)
    value = join(
        Programme.parse(files.read_yaml(programme), str(programme)),
        read_execution(execution),
        found["rows"],
        found["pairs"],
        retention=thresholds["retention"],
        no_regression=thresholds["no_regression"],
    )
    files.write_json(output, value)
    for name, row in value["rows"].items():
        rate = f"{row['targets_per_s']:,.0f} targets/s" if row["targets_per_s"] else f"{row['status']}: {row['reason']}"
        against = f", {row['ratio']:.3f} × {row['against']}" if row["ratio"] else ""
        print(f"{name}: {rate}{against}")
    for name, pair in value["pairs"].items():
        print(f"{name}: {pair['reason']}; {pair['no_regression']}")


if __name__ == "__main__":
    run(main)
