"""An exported folder is the trained model: transformers loads it by itself and reads the same loss from it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.data import tokenizer as tokenizers
from speedproof.data.token_cache import TokenCache
from speedproof.evidence.export import FILES, export, shapes
from speedproof.model.llama import build
from speedproof.training.evaluate import evaluate

ROOT = Path(__file__).resolve().parents[2]
TEXT = ["The cat sat on the mat, and the dog ran after the ball.", "Numbers such as 12 and 345 come before words."] * 9


@pytest.fixture(scope="module")
def recipe(miniature_recipe):
    return miniature_recipe(model={"vocab_size": 270, "layers": 2}, init_std=0.2, rope_theta=500.0, norm_eps=1e-3)


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """A run's files: weights.safetensors, tokenizer.json, and the tokenizer's manifest."""
    folder = tmp_path_factory.mktemp("run")
    model = build(recipe, None, "cpu")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # scales of one would hide a mix-up of the norms
                weight.copy_(torch.linspace(0.5, 1.5, len(weight)) + 0.1 * len(name))
    save_file(model.state_dict(), folder / "weights.safetensors")
    files.write_text(folder / "tokenizer.json", tokenizers.train(TEXT, 270, tokenizers.TRAINED_END).to_str())
    return folder, tokenizers.describe(folder / "tokenizer.json", 270, None), model


@pytest.fixture(scope="module")
def exported(recipe, trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    run, manifest, _ = trained
    export(recipe, run / "weights.safetensors", run / "tokenizer.json", manifest, folder)
    return folder


def test_shapes_are_the_built_model_s(recipe):
    built = {name: tuple(value.shape) for name, value in build(recipe, None, "cpu").state_dict().items()}
    assert shapes(recipe.model) == built


def test_folder_holds_each_weight_once_and_the_recipe_s_numbers(recipe, exported, trained):
    assert sorted(path.name for path in exported.iterdir()) == sorted(FILES)
    found, kept = load_file(exported / "model.safetensors"), load_file(trained[0] / "weights.safetensors")
    assert len(found) == len(kept)
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], kept["blocks.1.ffn.up.weight"])
    config = json.loads((exported / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-3, 500.0, True)
    assert config["eos_token_id"] == trained[1]["end_of_document"]["id"]


def test_transformers_reads_the_same_loss(recipe, exported, trained, tmp_path, miniature_execution):
    """In a process that cannot import this project, on a validation split that ends in a partial block."""
    pytest.importorskip("transformers", reason="the peer's package is not installed; pip install -r envs/peers.txt")
    cache = TokenCache.synthetic(tmp_path / "cache", 270, 300, 203, seed=1)
    expected = evaluate(trained[2], cache.validation, recipe, miniature_execution(), "cpu")
    np.save(tmp_path / "tokens.npy", cache.validation.read(0, 203).astype(np.int64))
    program = f"""
import json, sys
import numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
assert "speedproof" not in sys.modules
model = AutoModelForCausalLM.from_pretrained({str(exported)!r})
tokenizer = AutoTokenizer.from_pretrained({str(exported)!r})
assert model.dtype == torch.float32 and model.lm_head.weight is model.model.embed_tokens.weight
tokens, total = torch.from_numpy(np.load({str(tmp_path / "tokens.npy")!r})), 0.0
for start in range(0, len(tokens) - 1, 16):
    block = tokens[start : start + 17]
    logits = model(block[None, :-1]).logits[0]
    total += torch.nn.functional.cross_entropy(logits, block[1:], reduction="sum").item()
text = "The cat ran. 🐈"
print(json.dumps({{
    "loss": total / (len(tokens) - 1), "ids": tokenizer(text)["input_ids"],
    "text": tokenizer.decode(tokenizer(text)["input_ids"]), "inputs": sorted(tokenizer(text)),
    "end": [tokenizer.eos_token, tokenizer.eos_token_id],
}}))
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found["loss"] == pytest.approx(expected.loss, abs=1e-4)
    text = "The cat ran. 🐈"
    assert found["ids"] == tokenizers.load(trained[0] / "tokenizer.json").encode(text, add_special_tokens=False).ids
    assert found["text"] == text
    assert found["inputs"] == ["attention_mask", "input_ids"]
    end = trained[1]["end_of_document"]
    assert found["end"] == [end["token"], end["id"]]


def test_what_a_tokenizer_adds_to_a_text_is_left_out(recipe, trained, tmp_path):
    run, manifest, _ = trained
    value = json.loads((run / "tokenizer.json").read_text())
    value["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    assert tokenizers.load(tmp_path / "tokenizer.json").encode("cat").ids[0] == 0
    export(recipe, run / "weights.safetensors", tmp_path / "tokenizer.json", manifest, tmp_path / "out")
    kept = tokenizers.load(tmp_path / "out" / "tokenizer.json")
    assert kept.encode("cat").ids == tokenizers.load(run / "tokenizer.json").encode("cat", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("norm.weight"), "tensor norm.weight is missing"),
        (lambda t: t.update(head=t["norm.weight"].clone()), "tensor head is unknown"),
        (lambda t: t.update({"norm.weight": t["norm.weight"][:3].clone()}), r"norm.weight is \(3,\), .* is \(32,\)"),
    ],
)
def test_weights_of_another_model_leave_nothing_that_loads(recipe, trained, tmp_path, change, said):
    run, manifest, _ = trained
    tensors = load_file(run / "weights.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match=said):
        export(recipe, tmp_path / "weights.safetensors", run / "tokenizer.json", manifest, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_script_needs_neither_torch_nor_transformers(recipe, trained, tmp_path):
    run, manifest, _ = trained
    files.write_yaml(tmp_path / "recipe.yaml", recipe.plain())
    files.write_json(tmp_path / "manifest.json", manifest)
    options = {
        "recipe": tmp_path / "recipe.yaml",
        "weights": run / "weights.safetensors",
        "tokenizer": run / "tokenizer.json",
        "manifest": tmp_path / "manifest.json",
        "output": tmp_path / "out",
    }
    blocked = "import sys; sys.modules.update(torch=None, transformers=None); sys.argv.pop(0); import runpy; "
    blocked += "runpy.run_path(sys.argv[0], run_name='__main__')"
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    answer = subprocess.run(
        [sys.executable, "-c", blocked, str(ROOT / "src/scripts/export.py"), *arguments],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)
