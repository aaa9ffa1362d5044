"""A trained model as a folder that transformers loads without any code of ours.

`AutoModelForCausalLM.from_pretrained(folder)` and `AutoTokenizer.from_pretrained(folder)` are all it takes. Neither
torch nor transformers is needed to write it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import load_file, save

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.model.names import INNER, llama_config, theirs
from speedproof.settings.recipe import ModelShape, Recipe

FILES = ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
"""In the order they are written; without the last one nothing loads the folder."""


def export(recipe: Recipe, weights: Path, tokenizer: Path, manifest: dict[str, Any], folder: Path) -> None:
    """Write `FILES` into `folder`: the weights in FP32, and the tokenizer as it encoded the training data.

    `manifest` is the tokenizer's. Its end-of-document token is also where a text begins, since in training every
    document but the first follows one.
    Raises: UserError naming a file that does not fit the recipe.
    """
    if manifest["vocab_size"] != recipe.model.vocab_size:
        raise UserError(
            f"{tokenizer}: has {manifest['vocab_size']} entries, the recipe's model {recipe.model.vocab_size}; "
            "give the tokenizer of the token cache that it was trained on"
        )
    end = manifest["end_of_document"]
    ids = {"bos_token_id": end["id"], "eos_token_id": end["id"]}
    tensors = {theirs(name): value for name, value in _weights(recipe.model, weights).items()}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    dtype = {"dtype": "float32", "torch_dtype": "float32"}  # the key's name since version 5, and before
    with files.atomic(folder / "model.safetensors") as stream:
        stream.write(save(tensors, metadata={"format": "pt"}))
    files.write_text(folder / "tokenizer.json", _plain_tokenizer(tokenizer))
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end["token"],
        "eos_token": end["token"],
        "model_max_length": recipe.model.context_length,
        "model_input_names": ["input_ids", "attention_mask"],  # what `generate(**tokenizer(text))` may hand over
        "clean_up_tokenization_spaces": False,
    }
    files.write_json(folder / "tokenizer_config.json", special)
    files.write_json(folder / "generation_config.json", ids)
    files.write_json(folder / "config.json", kind | dtype | llama_config(recipe) | ids)


def shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every weight by its canonical name with its shape."""
    d, f = shape.width, shape.ffn_width
    wide, tall = ("ffn.gate", "ffn.up"), ("ffn.down",)
    inner = {name: (f, d) if name in wide else (d, f) if name in tall else (d, d) for name in INNER}
    inner |= {name: (d,) for name in INNER if name.endswith("norm")}
    blocks = {f"blocks.{i}.{name}.weight": size for i in range(shape.layers) for name, size in inner.items()}
    return {"embedding.weight": (shape.vocab_size, d)} | blocks | {"norm.weight": (d,)}


def _weights(shape: ModelShape, path: Path) -> dict[str, np.ndarray]:
    try:
        found = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the weights.safetensors of a training run") from None
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: is no whole safetensors file ({error}); train again") from None
    wanted = shapes(shape)
    for name in sorted(wanted.keys() ^ found.keys()):
        raise UserError(f"{path}: tensor {name} is {'missing' if name in wanted else 'unknown to the recipe'}")
    for name, size in wanted.items():
        if found[name].shape != size:
            raise UserError(f"{path}: {name} is {found[name].shape}, the recipe's is {size}")
    return {name: value.astype(np.float32, copy=False) for name, value in found.items()}


def _plain_tokenizer(path: Path) -> str:
    """The tokenizer.json without what puts tokens before or after a text: the training data were encoded without."""
    value = files.read_json(path)
    if not isinstance(value, dict) or "model" not in value:
        raise UserError(f"{path}: is no tokenizer.json; give the tokenizer of the token cache")
    value |= {"post_processor": None, "truncation": None, "padding": None}
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"
