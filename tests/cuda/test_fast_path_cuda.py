"""Each way to be faster on a GPU against its plain twin there. Every test skips where there is none."""

import numpy as np
import pytest
import torch

from speedproof.model.fused import by_name
from speedproof.model.llama import build
from speedproof.model.loss import OnePass, _slope
from speedproof.training.latch import LATCH_UPDATES
from speedproof.training.precision import bf16_support
from speedproof.training.update import NonFinite, Updater

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE, CONTEXT = "cuda", 128
MODEL = {"vocab_size": 512, "layers": 2, "width": 128, "heads": 2, "ffn_width": 256, "context_length": CONTEXT}
GRAPH = {"optimizer": "arena", "finite_checks": "latched", "capture": "graph"}


@pytest.fixture
def recipe(miniature_recipe):
    if not bf16_support(DEVICE)[0]:
        pytest.skip(f"needs BF16: {bf16_support(DEVICE)[1]}")
    return miniature_recipe(model=MODEL, precision="bf16", targets_per_update=4 * CONTEXT, budget_targets=400 * CONTEXT)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entries", [257, 2048, 32_000, 65_536])
def test_the_one_pass_kernel_is_its_plain_twin(entries, dtype):
    generator = torch.Generator(DEVICE).manual_seed(entries)
    logits = (torch.randn(300, entries, generator=generator, device=DEVICE) * 3).to(dtype)
    labels = torch.randint(0, entries, (300,), generator=generator, device=DEVICE)
    one_pass, before = OnePass(), logits.clone()
    wanted, slope = _slope(logits.clone(), labels)
    alone, nothing = one_pass._between(False, False)(logits, labels)
    assert nothing is None
    assert torch.equal(logits, before)
    found, gradient = one_pass._between(True, False)(logits, labels)
    assert gradient is logits
    assert torch.equal(found, alone)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert (gradient - slope).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-8)


def rows(blocks: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, (blocks, CONTEXT + 1)).astype(np.uint16)


def weights(updater: Updater) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in by_name(updater.model).items()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "settings",
    [{"loss": "chunked"}, {"loss": "triton"}, {"projections": "fused"}, {"optimizer": "arena"}],
    ids=lambda settings: next(iter(settings.values())),
)
def test_gradients_agree_with_the_reference(settings, compiled, recipe, miniature_execution):
    updater = Updater(recipe, miniature_execution(device="cuda", microbatch=2, compile=compiled, **settings), DEVICE)
    reference = build(recipe, None, DEVICE)
    for seed in range(2):
        updater.weights.clear()
        reference.zero_grad()
        batch = rows(4, seed)
        loss = sum(updater.backward(batch[start : start + 2], 4 * CONTEXT).item() for start in (0, 2))
        ids = torch.from_numpy(batch.astype(np.int64)).to(DEVICE)
        nll = reference.nll_sum(ids[:, :-1], ids[:, 1:])
        (nll / (4 * CONTEXT)).backward()
        assert abs(loss - nll.item()) / (4 * CONTEXT) < 1e-3
        found = by_name(updater.model, lambda weight: weight.grad)
        error = sum((found[n] - w.grad).square().sum().item() for n, w in reference.named_parameters())
        assert error < 0.05**2 * sum(w.grad.square().sum().item() for w in reference.parameters())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("loss", ["plain", "chunked", "triton"])
def test_captured_updates_are_those_that_are_not_captured(loss, compiled, recipe, miniature_execution):
    """Short updates in between run outside the graph, on the same weights and moments."""
    ways = {"device": "cuda", "microbatch": 2, "compile": compiled, "loss": loss}
    captured = Updater(recipe, miniature_execution(**ways | GRAPH), DEVICE)
    plain = Updater(recipe, miniature_execution(**ways | GRAPH | {"capture": "none"}), DEVICE)
    plan = [4, 4, 3, 4, 1] * 5
    found, wanted = ([], [])
    for updater, results in ((captured, found), (plain, wanted)):
        for seed, blocks in enumerate(plan):
            results += updater.submit(rows(blocks, seed))
        results += updater.finish()
    assert [r.targets for r in found] == [r.targets for r in wanted] == [blocks * CONTEXT for blocks in plan]
    for a, b in zip(found, wanted, strict=True):
        assert a.loss_sum / a.targets == pytest.approx(b.loss_sum / b.targets, abs=5e-3)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=0.02)
    assert captured.updates == plain.updates == len(plan)
    assert {float(state["step"]) for state in captured.optimizer.state.values()} == {float(len(plan))}


def test_capturing_changes_nothing(recipe, miniature_execution):
    updater = Updater(recipe, miniature_execution(device="cuda", microbatch=2, **GRAPH), DEVICE)
    before = weights(updater)
    updater.latch.rate.fill_(0.1)
    updater._replayed(rows())  # captures, then replays once
    updater.latch.note(rows(), 4 * CONTEXT)
    once = weights(updater)
    plain = Updater(recipe, miniature_execution(device="cuda", microbatch=2, **GRAPH | {"capture": "none"}), DEVICE)
    plain.latch.rate.fill_(0.1)
    plain._latched(rows())
    for name, weight in weights(plain).items():
        torch.testing.assert_close(once[name], weight, rtol=1e-3, atol=1e-3)
        assert not torch.equal(before[name], weight)


def test_no_captured_update_is_applied_from_a_nonfinite_one_on(recipe, miniature_execution):
    updater = Updater(recipe, miniature_execution(device="cuda", microbatch=2, **GRAPH), DEVICE)
    for seed in range(3):
        updater.submit(rows(4, seed))
    updater.finish()
    scale = updater.model.norm.weight
    with torch.no_grad():
        kept, before = scale.clone(), weights(updater)
        scale.fill_(float("inf"))
        assert updater.submit(rows(4, 3)) == []
        scale.copy_(kept)  # finite again, and refused all the same
        for seed in range(LATCH_UPDATES - 2):
            assert updater.submit(rows(4, 4 + seed)) == []
    with pytest.raises(NonFinite, match="update 4: loss is not finite") as stop:
        updater.submit(rows(4, 99))
    assert stop.value.blocks == 4 * LATCH_UPDATES
    assert all(torch.equal(weight, before[name]) for name, weight in weights(updater).items())
    assert (updater.updates, updater.targets_seen) == (3, 12 * CONTEXT)
    updater.submit(rows(4, 3))
    assert len(updater.finish()) == 1
    assert not torch.equal(weights(updater)["norm.weight"], before["norm.weight"])
