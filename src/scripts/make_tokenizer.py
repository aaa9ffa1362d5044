"""Train or find the tokenizer, and check that it fits the vocabulary and can end a document."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.core.store import Store
from speedproof.settings.experiment import Tokenizer


def main(
    tokenizer: Annotated[Path, typer.Option(help="YAML or JSON with the keys of config's tokenizer")],
    vocab: Annotated[int, typer.Option(help="entries of the recipe's vocabulary")],
    sources: Annotated[Path, typer.Option(help="manifest of the files, sources.json")],
    output: Annotated[Path, typer.Option(help="tokenizer.json")],
    manifest: Annotated[Path, typer.Option(help="the tokenizer's manifest")],
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
    threads: Annotated[int, typer.Option(help="threads of the training")] = 2,
) -> None:
    """Train or find the tokenizer, and check that it fits the vocabulary and can end a document."""
    from speedproof.data import tokenizer as tokenizers

    tokenizers.use_threads(threads)
    settings = Tokenizer.parse(files.read_yaml(tokenizer), "tokenizer")
    path, value = tokenizers.make(settings, vocab, files.read_json(sources, "source", "files"), Store(store))
    files.place(path, output)
    files.write_json(manifest, value)
    end = value["end_of_document"]
    print(f"{settings.source}: {value['vocab_size']:,} entries, end of document {end['token']} (id {end['id']})")


if __name__ == "__main__":
    run(main)
