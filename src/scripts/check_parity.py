"""Check whether an execution still computes the FP32 reference, on trained or on fresh weights."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.core.store import Store
from speedproof.settings.experiment import Parity, read_execution, read_recipe


def main(
    recipe: Annotated[Path, typer.Option(help="a recipe.yaml")],
    execution: Annotated[Path, typer.Option(help="the execution to check, complete")],
    cache: Annotated[Path, typer.Option(help="manifest of the token cache, token_cache.json")],
    parity: Annotated[Path, typer.Option(help="YAML or JSON with the keys of config's parity")],
    output: Annotated[Path, typer.Option(help="the check as JSON")],
    weights: Annotated[
        Path | None, typer.Option(help="weights.safetensors of a training run; without it fresh weights are checked")
    ] = None,
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
) -> None:
    """Check whether an execution still computes the FP32 reference, on trained or on fresh weights.

    A check that does not hold is a finding: it is written with its reason, and the exit code is 0.
    """
    settings = Parity.parse(files.read_yaml(parity), "parity")
    wanted, chosen = read_recipe(recipe), read_execution(execution)
    chosen.check(wanted)

    from speedproof.data.token_cache import TokenCache
    from speedproof.evidence.parity import describe, stored_parity
    from speedproof.training.precision import resolve_precision

    wanted, _ = resolve_precision(wanted, chosen.device)
    place = Store(store)
    value = stored_parity(wanted, chosen, weights, TokenCache.open(cache, place), settings, place)
    files.write_json(output, value)
    print(f"{wanted.preset}, {value['kind']} weights: {describe(value)}")


if __name__ == "__main__":
    run(main)
