"""The chunked losses against the plain one: one tolerance, and gradients that do not depend on the chunk.

The one-pass loss is among them where Triton interprets its kernel; test_cross_entropy.py runs this file so.
"""

import os

import numpy as np
import pytest
import torch

from speedproof.model import loss
from speedproof.training.update import Updater

B, T, D, V = 2, 9, 8, 31
CHUNKED = ["chunked", "triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["chunked"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative to the largest value."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Eighteen targets in chunks of 6, 6 and 6, or of 5, 5, 5 and 3."""
    monkeypatch.setitem(loss.CHUNK, "cpu", 6)


def batch(dtype=torch.float32, ignored=True):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(B, T, D, generator=generator, dtype=dtype, requires_grad=True)
    head = torch.randn(V, D, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, V, (B, T), generator=generator)
    if ignored:
        targets[0, 2] = targets[1, 4:] = loss.IGNORED
    return hidden, head, targets


def gradients(function, hidden, head, targets, scale=0.25):
    total = function(hidden, head, targets)
    return total.detach(), *torch.autograd.grad(total * scale, (hidden, head))


def check(found, wanted, dtype):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (a - b).abs().max() <= TOLERANCE[dtype] * b.abs().max()


@pytest.fixture(params=CHUNKED)
def way(request):
    return request.param


@pytest.mark.parametrize("chunk", [1, 5, 6, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_are_those_of_the_plain_one(way, chunk, dtype, monkeypatch):
    if way == "triton" and dtype == torch.float64:
        dtype = torch.float32  # whatever the logits are, its softmax is in FP32
    monkeypatch.setitem(loss.CHUNK, "cpu", chunk)
    chunked = loss.LOSSES[way]()
    check(gradients(chunked, *batch(dtype)), gradients(loss.plain, *batch(dtype)), dtype)
    check(gradients(chunked, *batch(dtype, False)), gradients(loss.plain, *batch(dtype, False)), dtype)


def test_under_autocast_the_sums_stay_in_fp32(way):
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = gradients(loss.LOSSES[way](), *batch()), gradients(loss.plain, *batch())
    assert {value.dtype for value in found} == {torch.float32}
    check(found, wanted, torch.bfloat16)
    assert not torch.equal(found[0], gradients(loss.plain, *batch())[0]), "it must have been computed in BF16"


def test_without_gradients_no_gradient_is_held(way):
    chunked = loss.LOSSES[way]()
    with torch.no_grad():
        found = chunked(*batch())
    torch.testing.assert_close(found, loss.plain(*batch()).detach())
    assert [(name, shape) for name, shape, *_ in chunked._buffers] == [("logits", (6, V))]
    assert chunked(*batch(), compiled=False).requires_grad


def test_nothing_but_padding_counts_nothing(way):
    hidden, head, targets = batch()
    found = gradients(loss.LOSSES[way](), hidden, head, torch.full_like(targets, loss.IGNORED))
    assert all(torch.count_nonzero(value) == 0 for value in found)


def test_buffers_are_used_again_and_a_forgotten_backward_is_not_silent(way):
    chunked = loss.LOSSES[way]()
    first = chunked(*batch())
    places = {name: buffer.data_ptr() for name, buffer in chunked._buffers.items()}
    second = chunked(*batch())
    assert {name: buffer.data_ptr() for name, buffer in chunked._buffers.items()} == places
    second.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_are_those_of_the_plain_loss(way, precision, miniature_recipe, miniature_execution):
    recipe = miniature_recipe(precision=precision)
    plain, chunked = (Updater(recipe, miniature_execution(loss=w, microbatch=2), "cpu") for w in ("plain", way))
    near, of_norm = (1e-6, 1e-4) if precision == "fp32" else (1e-3, 0.05)
    for seed, blocks in enumerate((4, 3, 4)):
        rows = np.random.default_rng(seed).integers(0, 61, (blocks, 17)).astype(np.uint16)
        a, b = plain.step(rows), chunked.step(rows)
        assert b.loss_sum / b.targets == pytest.approx(a.loss_sum / a.targets, abs=near)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=of_norm)
