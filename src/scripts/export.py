"""Write a trained model as a folder that transformers loads."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.evidence.export import export
from speedproof.settings.experiment import read_recipe


def main(
    recipe: Annotated[Path, typer.Option(help="the run's recipe.yaml")],
    weights: Annotated[Path, typer.Option(help="the run's weights.safetensors")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json of the run's token cache")],
    manifest: Annotated[Path, typer.Option(help="tokenizer_manifest.json beside it")],
    output: Annotated[Path, typer.Option(help="folder to write")],
) -> None:
    """Write a trained model as a folder that transformers loads without any code of this project."""
    export(read_recipe(recipe), weights, tokenizer, files.read_json(manifest, "end_of_document"), output)
    print(
        f"{output}: load it with transformers' AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained"
    )


if __name__ == "__main__":
    run(main)
