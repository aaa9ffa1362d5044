"""Compare the matched runs of a preset: rates, sessions, losses, and where the time went."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.evidence.matched import compare, read_run


def main(
    arms: Annotated[Path, typer.Option(help="the proved table of arms")],
    reference: Annotated[str, typer.Option(help="the arm that the others are compared with")],
    output: Annotated[Path, typer.Option(help="the comparison to write")],
    results: Annotated[list[Path], typer.Argument(help="result.json of each run, in its folder as trained")],
) -> None:
    """Compare every arm with the reference; refuses runs of different recipes."""
    found = compare([read_run(path) for path in results], files.read_json(arms, "arms"), reference)
    files.write_json(output, found)
    for name, arm in found["arms"].items():
        ratios = ", ".join(
            f"{what} {arm[f'speedup_{what}']:.2f}x" for what in ("steady", "session") if arm[f"speedup_{what}"]
        )
        print(f"{name:<20} {arm['targets_per_s']:>12,.0f} targets/s  {ratios}  {arm['loss_statement']}")
        if arm["reason"]:
            print(f"{'':<20} {arm['reason']}")


if __name__ == "__main__":
    run(main)
