"""Check parity of the tuner's finalists: from the fastest down until one holds, the recommended and the default."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.core.store import Store
from speedproof.settings.experiment import Parity, read_recipe


def main(
    finalists: Annotated[Path, typer.Option(help="finalists.json of the tuner")],
    recipe: Annotated[Path, typer.Option(help="a recipe.yaml")],
    cache: Annotated[Path, typer.Option(help="manifest of the token cache, token_cache.json")],
    parity: Annotated[Path, typer.Option(help="YAML or JSON with the keys of config's parity")],
    output: Annotated[Path, typer.Option(help="the checks as JSON")],
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
) -> None:
    """Check parity of the tuner's finalists: from the fastest down until one holds, the recommended and the default."""
    settings = Parity.parse(files.read_yaml(parity), "parity")
    ranking, wanted = files.read_json(finalists, "selected", "recommended", "default"), read_recipe(recipe)

    from speedproof.data.token_cache import TokenCache
    from speedproof.evidence.parity import check_finalists, describe

    place = Store(store)
    value = check_finalists(ranking, wanted, TokenCache.open(cache, place), settings, place)
    files.write_json(output, value)
    for check in [*value["checks"], value["recommended"]]:
        print(f"{check['name']}: {describe(check)}")


if __name__ == "__main__":
    run(main)
