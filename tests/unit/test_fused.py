"""Fused projections against separate ones: the same weights, losses, gradients and states under the same names."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from speedproof.model.fused import by_name
from speedproof.model.llama import build
from speedproof.training import checkpoint
from speedproof.training.update import Updater

MODEL = {"layers": 2}


def rows(blocks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, (blocks, 17)).astype(np.uint16)


@pytest.fixture
def pair(miniature_recipe, miniature_execution):
    """Updaters with separate and with fused projections."""
    recipe = miniature_recipe(model=MODEL)
    return [Updater(recipe, miniature_execution(projections=way), "cpu") for way in ("separate", "fused")]


def test_names_order_and_values_are_those_of_separate_ones(pair):
    separate, fused = (updater.model for updater in pair)
    assert "blocks.1.attention.qkv.weight" in dict(fused.named_parameters())
    for found in (fused.state_dict(), by_name(fused)):
        assert list(found) == list(separate.state_dict())
        for name, weight in separate.state_dict().items():
            assert torch.equal(found[name], weight), name


def test_updates_are_those_of_separate_ones(pair):
    separate, fused = pair
    for seed in range(4):
        a, b = separate.step(rows(4, seed)), fused.step(rows(4, seed))
        assert b.loss_sum == pytest.approx(a.loss_sum, rel=1e-6)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    for part in ("model", "moments"):
        found, wanted = fused.state_dict()[part], separate.state_dict()[part]
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_state_goes_both_ways(pair, tmp_path):
    separate, fused = pair
    separate.step(rows(4, 0))
    fused.load_state_dict(separate.state_dict())
    a, b = separate.step(rows(4, 1)), fused.step(rows(4, 1))
    assert b.loss_sum == pytest.approx(a.loss_sum, rel=1e-6)
    state = fused.state_dict()
    checkpoint.save_weights(tmp_path / "w.safetensors", state["model"])  # refuses tensors that share memory
    loaded = load_file(tmp_path / "w.safetensors")
    separate.model.load_state_dict(loaded, strict=True)
    separate.load_state_dict(state)
    for name, moment in state["moments"].items():
        assert torch.equal(separate.state_dict()["moments"][name], moment), name


def test_what_does_not_fit_is_named(pair):
    fused = pair[1].model
    good = fused.state_dict()
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attention\.qkv\.weight"):
        fused.load_state_dict({n: w for n, w in good.items() if n != "blocks.0.attention.k.weight"})
    with pytest.raises(RuntimeError, match=r"blocks\.0\.ffn\.gate_up\.weight"):
        fused.load_state_dict(good | {"blocks.0.ffn.up.weight": torch.ones(3, 32)})


def test_parts_can_be_written_and_named_by_gradient(miniature_recipe, miniature_execution):
    model = build(miniature_recipe(), miniature_execution(projections="fused"), "cpu")
    by_name(model)["blocks.0.attention.k.weight"].fill_(3.0)
    assert (model.blocks[0].attention.qkv.weight[32:64] == 3.0).all()
    gradients = by_name(model, lambda weight: torch.full_like(weight, float(weight.shape[0])))
    assert gradients["blocks.0.ffn.up.weight"].shape == (48, 32)
    assert gradients["blocks.0.ffn.up.weight"][0, 0] == 96
