"""Join the shards of both splits into a token cache."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.core.store import Store


def main(
    shards: Annotated[list[Path], typer.Argument(help="manifests of the shards")],
    tokenizer_manifest: Annotated[Path, typer.Option(help="the tokenizer's manifest")],
    output: Annotated[Path, typer.Option(help="manifest of the token cache, token_cache.json")],
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
) -> None:
    """Join the shards of both splits into a token cache."""
    from speedproof.data.token_cache import TokenCache, gather

    value = gather(
        [files.read_json(path, "split", "tokens", "sha256") for path in shards],
        files.read_json(tokenizer_manifest, "sha256", "vocab_size"),
    )
    cache = TokenCache(value, Store(store))
    files.write_json(output, value)
    print(
        f"token cache {cache.identity[:12]}: {len(cache.train):,} training, {len(cache.validation):,} validation tokens"
    )


if __name__ == "__main__":
    run(main)
