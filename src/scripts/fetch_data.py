"""Find, make or fetch the C4 files of an experiment, and its tokenizer where that comes from the hub."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.core.store import Store
from speedproof.settings.experiment import Data, Tokenizer


def main(
    data: Annotated[Path, typer.Option(help="YAML or JSON with the keys of config's data")],
    output: Annotated[Path, typer.Option(help="manifest of the files, sources.json")],
    tokenizer: Annotated[Path | None, typer.Option(help="YAML or JSON with the keys of config's tokenizer")] = None,
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
) -> None:
    """Find, make or fetch the C4 files of an experiment, and its tokenizer where that comes from the hub."""
    from speedproof.data import sources

    wanted = Data.parse(files.read_yaml(data), "data")
    also = None if tokenizer is None else Tokenizer.parse(files.read_yaml(tokenizer), "tokenizer")
    manifest = sources.find(wanted, also, Store(store))
    files.write_json(output, manifest)
    size = sum(row["bytes"] for row in manifest["files"])
    print(f"{wanted.source}: {len(manifest['files'])} files, {size:,} bytes")


if __name__ == "__main__":
    run(main)
