"""Compare two executions in blocks of fresh processes, A B B A and B A A B in turn."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import UserError, run
from speedproof.core.store import Store
from speedproof.measure.comparison import compare
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import changed, read_execution, read_recipe


def main(
    recipe: Annotated[Path, typer.Option(help="what is trained: a resolved recipe.yaml")],
    protocol: Annotated[Path, typer.Option(help="how each process measures")],
    blocks: Annotated[int, typer.Option(min=1, help="blocks of four processes, fixed beforehand")],
    output: Annotated[Path, typer.Option(help="the comparison to write")],
    a: Annotated[Path | None, typer.Option(help="the incumbent's execution")] = None,
    b: Annotated[Path | None, typer.Option(help="the challenger's execution")] = None,
    set_a: Annotated[str, typer.Option(help="settings to change in --a: '{microbatch: 8}'")] = "{}",
    set_b: Annotated[str, typer.Option(help="settings to change in --b")] = "{}",
    finalists: Annotated[
        Path | None, typer.Option(help="finalists.json: its default is A, its recommended is B")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="manifest of the token cache; needed for real data")] = None,
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
    data_mode: Annotated[str, typer.Option(help="real, or synthetic: one batch kept on the device")] = "real",
    fresh: Annotated[bool, typer.Option("--fresh", help="compare even where the store holds this comparison")] = False,
) -> None:
    """Compare two executions in blocks of fresh processes, A B B A and B A A B in turn.

    A block with a failed process is repeated once, and both are reported. The same execution twice is a control: its
    ratio shows the noise of the node.
    """
    if finalists is not None and a is None and b is None:
        named = files.read_json(finalists, "default", "recommended")
        incumbent = Execution.parse(named["default"], f"{finalists}: default")
        challenger = Execution.parse(named["recommended"], f"{finalists}: recommended")
    elif a is not None and b is not None and finalists is None:
        incumbent = changed(read_execution(a), files.parse_yaml(set_a, "set-a"), "set-a")
        challenger = changed(read_execution(b), files.parse_yaml(set_b, "set-b"), "set-b")
    else:
        raise UserError("a, b: give both executions, or --finalists alone")
    if incumbent == challenger:
        print("A and B are the same execution: this is a control of the node's noise")
    value = compare(
        incumbent,
        challenger,
        read_recipe(recipe),
        files.read_yaml(protocol),
        blocks,
        store=Store(store),
        cache_manifest=cache,
        mode=data_mode,
        reuse=not fresh,
        progress=lambda done, total, said: print(f"{done} of {total}: {said}", file=sys.stderr, flush=True),
    )
    files.write_json(output, value)
    for order, (a1, b1, b2, a2) in zip(value["orders"], value["blocks"], strict=True):
        print(f"{order}: A {a1:,.0f} and {a2:,.0f}, B {b1:,.0f} and {b2:,.0f} targets/s")
    if value["status"] != "ok":
        print(f"{value['status']}: {value['reason']}")


if __name__ == "__main__":
    run(main)
