"""Write the recipe of a preset as it will be trained: data by identity, precision of this device."""

import ast
from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import UserError, run
from speedproof.core.store import Store
from speedproof.data.token_cache import TokenCache
from speedproof.settings.recipe import Recipe


def main(
    recipe: Annotated[str, typer.Option(help="the preset's recipe as a dictionary of plain values")],
    cache: Annotated[Path, typer.Option(help="manifest of the token cache")],
    output: Annotated[Path, typer.Option(help="the recipe to write")],
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
) -> None:
    """Resolve a recipe once, so that every arm trains the same one, and check that the data suffice for it."""
    tokens = TokenCache.open(cache, Store(store))
    resolved = Recipe.parse(ast.literal_eval(recipe) | {"data": tokens.identity}, "recipe")
    if tokens.vocab_size != resolved.model.vocab_size:
        raise UserError(
            f"config/presets/{resolved.preset}.yaml: vocab_size is {resolved.model.vocab_size}, but the tokenizer "
            f"has {tokens.vocab_size} entries; make the two equal"
        )
    if resolved.total_targets > len(tokens.train) - 1:
        raise UserError(
            f"recipe.budget_targets: {resolved.total_targets} targets are asked for, but the training data hold "
            f"{max(0, len(tokens.train) - 1)}; lower the budget or raise data.train_files"
        )
    reason = "as set"
    if resolved.precision == "auto":
        from speedproof.training.precision import resolve_precision

        resolved, reason = resolve_precision(resolved, device)
    files.write_yaml(output, resolved.plain())
    print(f"{resolved.preset}: {resolved.model.parameters:,} parameters, {resolved.total_targets:,} targets, ", end="")
    print(f"precision {resolved.precision} ({reason})")


if __name__ == "__main__":
    run(main)
