"""Tokenise one C4 file into one shard of the store."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.core.store import Store
from speedproof.settings.experiment import Data


def main(
    data: Annotated[Path, typer.Option(help="YAML or JSON with the keys of config's data")],
    sources: Annotated[Path, typer.Option(help="manifest of the files, sources.json")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json")],
    manifest: Annotated[Path, typer.Option(help="the tokenizer's manifest")],
    split: Annotated[str, typer.Option(help="train or validation")],
    index: Annotated[int, typer.Option(help="number of the file within its split")],
    output: Annotated[Path, typer.Option(help="the shard's manifest")],
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
    threads: Annotated[int, typer.Option(help="threads of the tokenizer")] = 2,
) -> None:
    """Tokenise one C4 file into one shard of the store."""
    from speedproof.data.shards import make_shard
    from speedproof.data.tokenizer import use_threads

    use_threads(threads)
    order_seed = Data.parse(files.read_yaml(data), "data").order_seed
    value = make_shard(
        files.read_json(sources, "source", "files"),
        split,
        index,
        tokenizer,
        files.read_json(manifest, "sha256", "vocab_size", "end_of_document"),
        order_seed,
        Store(store),
    )
    files.write_json(output, value)
    print(f"{split} {index}: {value['documents']:,} documents, {value['tokens']:,} tokens")


if __name__ == "__main__":
    run(main)
