"""Check every C4 file and every shard against its checksum."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.core.store import Store


def main(
    caches: Annotated[list[Path], typer.Argument(help="manifests of token caches, token_cache.json")],
    sources: Annotated[Path, typer.Option(help="manifest of the files, sources.json")],
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
) -> None:
    """Check every C4 file and every shard against its checksum."""
    from speedproof.data import sources as corpus
    from speedproof.data.token_cache import TokenCache

    place = Store(store)
    checked = corpus.verify(files.read_json(sources, "source", "files"), place)
    shards = sum(TokenCache.open(path, place).verify() for path in caches)
    print(f"all as written: {checked} files, {shards} shards")


if __name__ == "__main__":
    run(main)
