"""Latched updates: the same as those that are looked at, and none applied from the first nonfinite one on."""

import numpy as np
import pytest
import torch

from speedproof.core.errors import UserError
from speedproof.training import latch
from speedproof.training.schedule import learning_rate
from speedproof.training.update import NonFinite, Updater
from speedproof.training.window import run_window

CONTEXT = 16
PLAN = [4, 4, 3, 4, 4, 1, 4, 4, 4]
"""Blocks of nine updates; the host looks after four, eight, and at the end."""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(latch, "LATCH_UPDATES", 4)


@pytest.fixture(params=["fused", "arena"])
def make(request, miniature_recipe, miniature_execution):
    def made(finite_checks="latched"):
        execution = miniature_execution(microbatch=2, optimizer=request.param, finite_checks=finite_checks)
        return Updater(miniature_recipe(), execution, "cpu")

    return made


class Rows:
    """Rows that depend on the cursor alone."""

    def __init__(self):
        self.cursor = 0

    def take(self, blocks: int) -> np.ndarray:
        rows = [np.random.default_rng(self.cursor + b).integers(0, 61, CONTEXT + 1) for b in range(blocks)]
        self.cursor += blocks
        return np.stack(rows).astype(np.uint16)


def everything(updater: Updater) -> dict:
    state = updater.state_dict()
    return state | {part: {n: t.clone() for n, t in state[part].items()} for part in ("model", "moments")}


def same(a: dict, b: dict) -> bool:
    tensors = all(torch.equal(a[p][n], b[p][n]) for p in ("model", "moments") for n in a[p].keys() | b[p].keys())
    return tensors and all(a[key] == b[key] for key in ("step", "targets_seen", "updates"))


def poison(updater: Updater, after: int) -> None:
    """Have the gradient of one weight be infinite in the backward pass that follows `after` others."""
    calls = []

    def hook(gradient):
        calls.append(True)
        return gradient * float("inf") if len(calls) == after + 1 else gradient

    updater.model.blocks[0].ffn.up.weight.register_hook(hook)


def test_updates_are_those_that_are_looked_at(make):
    looked, latched = make("merged"), make()
    seen = {looked: [], latched: []}
    windows = [run_window(updater, Rows(), PLAN, on_update=seen[updater].append) for updater in seen]
    for a, b in zip(seen[latched], seen[looked], strict=True):
        assert (a.loss_sum, a.grad_norm) == pytest.approx((b.loss_sum, b.grad_norm), rel=1e-5)
    assert [r.targets for r in seen[latched]] == [blocks * CONTEXT for blocks in PLAN]
    assert (windows[1].loss, windows[1].grad_norm) == pytest.approx((windows[0].loss, windows[0].grad_norm))
    assert (windows[1].targets, windows[1].updates) == (windows[0].targets, windows[0].updates)
    a, b = everything(latched), everything(looked)
    assert (a["updates"], a["targets_seen"]) == (b["updates"], b["targets_seen"])
    for part in ("model", "moments"):
        for name, value in b[part].items():
            torch.testing.assert_close(a[part][name], value, rtol=1e-5, atol=1e-6)
    rates = {float(group["lr"]) for group in latched.optimizer.param_groups}
    assert list(rates) == [pytest.approx(learning_rate(latched.recipe, latched.targets_seen))]


def test_the_host_looks_now_and_then(make):
    updater, batches = make(), Rows()
    known = [len(updater.submit(batches.take(4))) for _ in range(9)]
    assert known == [0, 0, 0, 4, 0, 0, 0, 4, 0]
    assert len(updater.finish()) == 1
    assert updater.finish() == []
    assert updater.step(batches.take(4)).targets == 64


@pytest.mark.parametrize("bad", [0, 2, 3, 4, 8])
def test_neither_the_nonfinite_update_nor_any_after_it_is_applied(bad, make):
    """Blocks of two: an update of four blocks has two backward passes, of three two, of one one."""
    updater, wanted = make(), make()
    passes = [-(-blocks // 2) for blocks in PLAN]
    poison(updater, sum(passes[:bad]))
    batches, good = Rows(), Rows()
    if bad:
        run_window(wanted, good, PLAN[:bad])
    with pytest.raises(
        NonFinite, match=rf"update {bad + 1}: gradient norm is not finite; .*after update {bad}\."
    ) as stop:
        run_window(updater, batches, PLAN)
    # The poison is gone when the gradients are computed once more, so that no single one is to blame.
    looked_at = min(len(PLAN), bad // 4 * 4 + 4)
    assert stop.value.blocks == sum(PLAN[bad:looked_at])
    assert batches.cursor == good.cursor == sum(PLAN[:bad])
    assert same(everything(updater), everything(wanted))
    run_window(updater, batches, PLAN[:2])
    run_window(wanted, good, PLAN[:2])
    assert same(everything(updater), everything(wanted)), "the latch must be open again and the gradients gone"


def test_a_gradient_that_is_to_blame_is_named(make):
    updater = make()
    updater.step(Rows().take(4))
    updater.model.blocks[0].ffn.up.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFinite, match=r"update 2: gradient of blocks\.0\.ffn\.up\.weight is not finite"):
        run_window(updater, Rows(), [4, 4])
    assert updater.updates == 1


def test_a_loss_that_is_to_blame_is_named(make, monkeypatch):
    updater = make()
    whole = updater.model.nll_sum
    monkeypatch.setattr(updater.model, "nll_sum", lambda *batch: whole(*batch) * float("nan"))
    with pytest.raises(NonFinite, match="update 1: loss is not finite"):
        updater.step(Rows().take(4))


def test_a_captured_update_needs_what_it_is_made_of(miniature_recipe, miniature_execution):
    cuda = miniature_execution(device="cuda", optimizer="arena", finite_checks="latched", capture="graph", compile=True)
    cuda.check(miniature_recipe())
    for changed, wanted in (
        ({"device": "cpu"}, r"execution\.capture: 'graph' does not exist on cpu; use none"),
        ({"optimizer": "fused"}, r"execution\.optimizer: found 'fused' with capture 'graph', which needs 'arena'"),
        ({"finite_checks": "merged"}, r"execution\.finite_checks: found 'merged' .* needs 'latched'"),
        ({"compile_mode": "reduce-overhead"}, r"execution\.compile_mode: 'reduce-overhead' makes CUDA graphs"),
    ):
        with pytest.raises(UserError, match=wanted):
            cuda.model_copy(update=changed).check(miniature_recipe())
