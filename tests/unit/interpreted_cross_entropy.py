"""The one-pass kernel in Triton's interpreter; test_cross_entropy.py runs these in a process of their own."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from speedproof.data.token_cache import TokenCache
from speedproof.model import loss
from speedproof.model.cross_entropy import LARGEST, cross_entropy
from speedproof.model.fused import by_name
from speedproof.training.compile import compiles, graph_breaks
from speedproof.training.evaluate import evaluate
from speedproof.training.update import Updater

MICRO = yaml.safe_load((Path(__file__).resolve().parents[2] / "config/presets/micro.yaml").read_text(encoding="utf-8"))
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8}
"""Of a gradient between -1 and 1: its rounding to the logits' dtype, or, in FP32, the twin's own of ln p."""


def rows(entries: int, dtype: torch.dtype = torch.float32, spread: float = 3.0, count: int = 5):
    generator = torch.Generator().manual_seed(entries)
    logits = (torch.randn(count, entries, generator=generator) * spread).to(dtype)
    return logits, torch.randint(0, entries, (count,), generator=generator)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("entries", [2, 257, 1000, 2048, 32_000, LARGEST])
def test_it_is_its_plain_twin(entries, dtype):
    logits, labels = rows(entries, dtype)
    labels[0], labels[1] = 0, entries - 1
    before = logits.clone()
    wanted, slope = loss._slope(logits.clone(), labels)
    alone = cross_entropy(logits, labels, slope=False)
    assert torch.equal(logits, before), "a forward pass alone writes nothing"
    found = cross_entropy(logits, labels, slope=True)
    assert torch.equal(found, alone)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, loss._nll(before, labels)[0], rtol=1e-6, atol=1e-6)
    assert logits.dtype == slope.dtype
    assert (logits - slope).abs().max() <= TOLERANCE[dtype]
    assert not torch.equal(logits, before)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_large_logits_neither_overflow_nor_vanish(dtype):
    logits, labels = rows(1000, dtype, spread=1e4)
    logits[0, 7], labels[0] = 3e38, 7
    wanted, slope = loss._slope(logits.clone(), labels)
    found = cross_entropy(logits, labels, slope=True)
    assert found.isfinite().all()
    assert found[0] == 0
    torch.testing.assert_close(found, wanted)
    assert (logits - slope).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad):
    logits, labels = rows(257)
    logits[2, 5] = bad
    found = cross_entropy(logits, labels, slope=True)
    assert found.isfinite().squeeze(1).tolist() == [True, True, False, True, True]


def test_more_entries_than_a_program_holds_are_refused():
    with pytest.raises(ValueError, match=str(LARGEST)):
        cross_entropy(*rows(LARGEST + 1, count=1), slope=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_whole_model_has_the_plain_loss_and_gradients(precision, miniature_recipe, miniature_execution):
    recipe = miniature_recipe(model=MICRO, precision=precision, targets_per_update=2 * MICRO["context_length"])
    ids = np.random.default_rng(5).integers(0, MICRO["vocab_size"], (2, MICRO["context_length"] + 1)).astype(np.uint16)
    found = {}
    for way in ("plain", "triton"):
        updater = Updater(recipe, miniature_execution(loss=way, microbatch=1), "cpu")
        nll = sum(updater.backward(ids[block : block + 1], ids[:, 1:].size).item() for block in range(2))
        found[way] = nll / ids[:, 1:].size, by_name(updater.model, lambda weight: weight.grad)
    (wanted_loss, wanted), (found_loss, gradients) = found["plain"], found["triton"]
    near, of_norm = (1e-6, 1e-5) if precision == "fp32" else (1e-3, 0.05)
    assert found_loss == pytest.approx(wanted_loss, abs=near)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).norm() <= of_norm * wanted[name].norm(), name


def test_the_compiler_gets_what_is_before_it_as_one_graph(monkeypatch, miniature_recipe, miniature_execution):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled, eager = (
        Updater(miniature_recipe(), miniature_execution(loss="triton", microbatch=2, compile=kind), "cpu")
        for kind in (True, False)
    )
    before = compiles(), graph_breaks()
    for seed in range(2):
        ids = np.random.default_rng(seed).integers(0, 61, (4, 17)).astype(np.uint16)
        assert compiled.step(ids).loss_sum == pytest.approx(eager.step(ids).loss_sum, rel=1e-5)
    assert (compiles() - before[0], graph_breaks() - before[1]) == (1, 0)
    torch._dynamo.reset()


def test_validation_is_that_of_the_plain_loss(tmp_path, miniature_recipe, miniature_execution):
    tokens = TokenCache.synthetic(tmp_path, 61, 400, 16 * 5 + 6, seed=0).validation
    found = []
    for way in ("plain", "triton"):
        execution = miniature_execution(loss=way, evaluation_batch=3)
        model = Updater(miniature_recipe(), execution, "cpu").model
        found.append(evaluate(model, tokens, miniature_recipe(), execution, "cpu"))
    assert found[0].targets == found[1].targets == 16 * 5 + 5
    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-6)
