"""Compare the default and the recommended execution with their peers of another implementation."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.core.store import Store
from speedproof.settings.experiment import Parity, read_execution, read_recipe


def main(
    recipe: Annotated[Path, typer.Option(help="what is trained: a resolved recipe.yaml")],
    default: Annotated[Path, typer.Option(help="the default execution")],
    recommended: Annotated[Path, typer.Option(help="the recommended execution")],
    protocol: Annotated[Path, typer.Option(help="how each process measures")],
    parity: Annotated[Path, typer.Option(help="YAML or JSON with the keys of config's parity")],
    blocks: Annotated[int, typer.Option(min=1, help="blocks of four processes, fixed beforehand")],
    cache: Annotated[Path, typer.Option(help="manifest of the token cache, token_cache.json")],
    output: Annotated[Path, typer.Option(help="the rows to write")],
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
) -> None:
    """Compare the default and the recommended execution with their peers: the same recipe by transformers' Llama.

    Each pair runs in A B B A blocks of fresh processes, and each peer's parity is checked. Needs envs/peers.txt.
    """
    settings, wanted = Parity.parse(files.read_yaml(parity), "parity"), read_recipe(recipe)
    executions = {"default": read_execution(default), "recommended": read_execution(recommended)}

    from speedproof.evidence.peers import compare_peers, describe
    from speedproof.training.precision import resolve_precision

    wanted, _ = resolve_precision(wanted, executions["default"].device)
    value = compare_peers(
        executions,
        wanted,
        files.read_yaml(protocol),
        settings,
        blocks,
        store=Store(store),
        cache_manifest=cache,
        progress=lambda done, total, said: print(f"{done} of {total}: {said}", file=sys.stderr, flush=True),
    )
    files.write_json(output, value)
    for row in value["rows"]:
        print(describe(row))


if __name__ == "__main__":
    run(main)
