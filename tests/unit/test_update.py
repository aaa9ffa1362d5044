import gc
import itertools
import math

import numpy as np
import pytest
import torch

from speedproof.core.errors import UserError
from speedproof.model.llama import build
from speedproof.training import update
from speedproof.training.schedule import learning_rate
from speedproof.training.update import NonFinite, Updater
from speedproof.training.window import run_window

CONTEXT = 16


def rows(blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, (blocks, CONTEXT + 1)).astype(np.uint16)


def everything(updater: Updater) -> dict:
    """A copy of the whole state."""
    state = updater.state_dict()
    return state | {part: {n: t.clone() for n, t in state[part].items()} for part in ("model", "moments")}


def same(a: dict, b: dict) -> bool:
    tensors = all(
        a[part].keys() == b[part].keys() and all(torch.equal(t, b[part][n]) for n, t in a[part].items())
        for part in ("model", "moments")
    )
    return tensors and all(a[key] == b[key] for key in ("step", "targets_seen", "updates"))


@pytest.fixture
def updater(miniature_recipe, miniature_execution):
    return Updater(miniature_recipe(), miniature_execution(), "cpu")


class Rows:
    """Batches without a loader."""

    def __init__(self):
        self.cursor = 0

    def take(self, blocks: int) -> np.ndarray:
        self.cursor += blocks
        return rows(blocks, self.cursor)


def gradients(recipe, execution, batch: np.ndarray, monkeypatch) -> dict[str, torch.Tensor]:
    """Gradients that the optimizer is given for one update, in FP64."""
    updater = Updater(recipe, execution, "cpu")
    updater.model.double()
    found = {}
    monkeypatch.setattr(
        updater.optimizer,
        "step",
        lambda: found.update({n: w.grad.clone() for n, w in updater.model.named_parameters()}),
    )
    updater.step(batch)
    return found


@pytest.mark.parametrize("finite_checks", ["separate", "merged"])
def test_gradients_do_not_depend_on_the_microbatch(finite_checks, miniature_recipe, miniature_execution, monkeypatch):
    """With 11 blocks, microbatches of 3 and 4 end in a shorter one, whose targets must not weigh more."""
    recipe = miniature_recipe(targets_per_update=12 * CONTEXT, grad_clip=1e9)
    batch = rows(11)
    model = build(recipe, None, "cpu").double()
    ids = torch.from_numpy(batch.astype(np.int64))
    nll = model.nll_sum(ids[:, :-1], ids[:, 1:])
    (nll / (11 * CONTEXT)).backward()
    for microbatch in (1, 3, 4, 12):
        execution = miniature_execution(microbatch=microbatch, finite_checks=finite_checks)
        found = gradients(recipe, execution, batch, monkeypatch)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(found[name], weight.grad, rtol=1e-9, atol=1e-12)
        result = Updater(recipe, execution, "cpu").step(batch)
        assert (result.targets, result.loss_sum) == (11 * CONTEXT, pytest.approx(nll.item(), rel=1e-5))


def test_clipping_is_by_the_global_norm(miniature_recipe, miniature_execution, monkeypatch):
    whole = gradients(miniature_recipe(grad_clip=1e9), miniature_execution(), rows(4), monkeypatch)
    norm = math.sqrt(sum(g.square().sum().item() for g in whole.values()))
    recipe = miniature_recipe(grad_clip=norm / 4)
    clipped = gradients(recipe, miniature_execution(), rows(4), monkeypatch)
    for name, gradient in whole.items():
        torch.testing.assert_close(clipped[name], gradient / 4, rtol=1e-4, atol=0)
    result = Updater(recipe, miniature_execution(), "cpu").step(rows(4))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def test_the_first_update_is_adamw_with_decay_on_matrices_only(miniature_recipe, miniature_execution, monkeypatch):
    recipe = miniature_recipe(eps=1e-3, weight_decay=0.5)
    g = gradients(recipe, miniature_execution(), rows(4), monkeypatch)
    updater = Updater(recipe, miniature_execution(), "cpu")
    before = everything(updater)["model"]
    updater.step(rows(4))
    rate = learning_rate(recipe, 64)
    for name, weight in updater.model.named_parameters():
        decay = 0.5 if weight.dim() == 2 else 0.0
        kept = before[name] * (1 - rate * decay)
        # After bias correction the first moments are the gradient and its square.
        wanted = kept - rate * g[name].float() / (g[name].float().abs() + 1e-3)
        torch.testing.assert_close(weight.detach(), wanted, rtol=1e-4, atol=1e-6)


def test_every_execution_learns_the_same(miniature_recipe, miniature_execution):
    recipe = miniature_recipe()
    ends = []
    for microbatch, checks, rope in ((4, "separate", "cached"), (1, "merged", "uncached"), (2, "merged", "cached")):
        execution = miniature_execution(microbatch=microbatch, finite_checks=checks, rope=rope)
        updater = Updater(recipe, execution, "cpu")
        results = [updater.step(rows(4, seed)) for seed in range(5)]
        ends.append((results, updater.model.state_dict()))
    for results, weights in ends[1:]:
        for a, b in zip(results, ends[0][0], strict=True):
            assert a.targets == b.targets == 64
            assert a.loss_sum == pytest.approx(b.loss_sum, rel=1e-5)
            assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, ends[0][1][name], rtol=0, atol=1e-3)


def test_it_learns(updater):
    losses = [updater.step(rows(4)).loss_sum / 64 for _ in range(40)]
    assert losses[0] == pytest.approx(math.log(61), abs=0.1)
    assert losses[-1] < 0.5 * losses[0]


def test_the_rate_follows_the_targets_seen(updater):
    seen = 0
    for blocks in (4, 4, 3, 4):
        updater.step(rows(blocks))
        seen += blocks * CONTEXT
        assert updater.targets_seen == seen
        assert {group["lr"] for group in updater.optimizer.param_groups} == {learning_rate(updater.recipe, seen)}
    assert updater.updates == 4


@pytest.mark.parametrize("finite_checks", ["separate", "merged"])
@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_a_nonfinite_update_changes_nothing(finite_checks, place, miniature_recipe, miniature_execution, monkeypatch):
    updater = Updater(miniature_recipe(), miniature_execution(microbatch=2, finite_checks=finite_checks), "cpu")
    for seed in range(4):
        updater.step(rows(4, seed))
    before, rate = everything(updater), updater.optimizer.param_groups[0]["lr"]
    name = "blocks.0.ffn.up.weight"
    if place == "loss":
        whole = updater.model.nll_sum
        monkeypatch.setattr(updater.model, "nll_sum", lambda *batch: whole(*batch) * float("nan"))
    else:
        weight = dict(updater.model.named_parameters())[name]
        hook = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([1]), float("inf")))
    wanted = "loss" if place == "loss" else f"gradient of {name}"
    with pytest.raises(
        NonFinite, match=rf"update 5: {wanted} is not finite; .* as after update 4\. .*recipe\.lr"
    ) as stop:
        updater.step(rows(4, 5))
    assert (stop.value.update, stop.value.tensor) == (5, wanted)
    assert same(everything(updater), before)
    assert updater.optimizer.param_groups[0]["lr"] == rate
    if place == "loss":
        monkeypatch.undo()
    else:
        hook.remove()
    untouched = Updater(miniature_recipe(), miniature_execution(microbatch=2, finite_checks=finite_checks), "cpu")
    untouched.load_state_dict(before)
    updater.step(rows(4, 6))
    untouched.step(rows(4, 6))
    assert same(everything(updater), everything(untouched)), "gradients of the refused update were left behind"


def test_state_goes_over_to_another_execution(miniature_recipe, miniature_execution):
    recipe = miniature_recipe()
    first = Updater(recipe, miniature_execution(microbatch=4), "cpu")
    first.step(rows(4, 1))
    saved, kept = everything(first), everything(first)
    second = Updater(recipe, miniature_execution(microbatch=1, rope="uncached", finite_checks="merged"), "cpu")
    second.load_state_dict(saved)
    assert same(everything(second), saved)
    again = Updater(recipe, miniature_execution(microbatch=4), "cpu")
    again.load_state_dict(saved)
    first.step(rows(4, 2))
    again.step(rows(4, 2))
    assert same(everything(first), everything(again)), "resume must be bitwise equal"
    assert same(saved, kept), "loading must not tie the saved state to a model"
    assert saved["moments"].keys() == {f"{n}.{m}" for n in saved["model"] for m in ("exp_avg", "exp_avg_sq")}


def test_a_fresh_state_has_no_moments(updater, miniature_recipe, miniature_execution):
    saved = everything(updater)
    assert saved["moments"] == {}
    other = Updater(miniature_recipe(seed=8), miniature_execution(), "cpu")
    other.step(rows(4))
    other.load_state_dict(saved)
    assert same(everything(other), saved)


def test_a_wrong_state_is_named(updater):
    updater.step(rows(4))
    good = everything(updater)
    for part, name in (("model", "norm.weight"), ("moments", "norm.weight.exp_avg")):
        lacking = good | {part: {n: t for n, t in good[part].items() if n != name}}
        with pytest.raises(UserError, match=rf"{part}\.{name}: missing"):
            updater.load_state_dict(lacking)
        with pytest.raises(UserError, match=rf"{part}\.extra: unknown"):
            updater.load_state_dict(good | {part: good[part] | {"extra": torch.ones(1)}})
        with pytest.raises(UserError, match=rf"{part}\.{name}: found shape \(1,\), expected \(32,\)"):
            updater.load_state_dict(good | {part: good[part] | {name: torch.ones(1)}})
    assert same(everything(updater), good)


def test_what_cannot_run_is_refused(miniature_recipe, miniature_execution):
    with pytest.raises(UserError, match=r"execution\.microbatch: 3 does not divide"):
        Updater(miniature_recipe(), miniature_execution(microbatch=3), "cpu")
    with pytest.raises(UserError, match=r"recipe\.precision: found 'auto'"):
        Updater(miniature_recipe(precision="auto"), miniature_execution(), "cpu")
    with pytest.raises(UserError, match=r"execution\.sdpa_backend: 'cudnn'"):
        Updater(miniature_recipe(), miniature_execution(sdpa_backend="cudnn"), "cpu")


def test_bf16_updates_stay_near_fp32_with_weights_and_moments_in_fp32(miniature_recipe, miniature_execution):
    exact = Updater(miniature_recipe(), miniature_execution(), "cpu")
    rounded = Updater(miniature_recipe(precision="bf16"), miniature_execution(), "cpu")
    for seed in range(3):
        a, b = exact.step(rows(4, seed)), rounded.step(rows(4, seed))
        assert b.loss_sum / 64 == pytest.approx(a.loss_sum / 64, abs=0.02)
        assert a.loss_sum != b.loss_sum
    state = rounded.state_dict()
    assert {t.dtype for part in ("model", "moments") for t in state[part].values()} == {torch.float32}


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_the_rate_counts_targets_and_not_microbatches(microbatch, miniature_recipe, miniature_execution):
    updater = Updater(miniature_recipe(), miniature_execution(microbatch=microbatch), "cpu")
    ticks = itertools.count(0.0, 0.5)
    window = run_window(updater, Rows(), [4, 4, 3], clock=lambda: next(ticks))
    # Two readings at the edges, and two around each wait for rows.
    assert (window.targets, window.updates, window.seconds) == (11 * CONTEXT, 3, 3.5)
    assert window.data_wait_s == 1.5
    assert window.targets_per_s == 11 * CONTEXT / 3.5


def test_a_window_reports_the_mean_over_targets(miniature_recipe, miniature_execution):
    one = Updater(miniature_recipe(), miniature_execution(), "cpu")
    other = Updater(miniature_recipe(), miniature_execution(), "cpu")
    seen = []
    window = run_window(one, Rows(), [4, 1], on_update=seen.append)
    batches = Rows()
    results = [other.step(batches.take(4)), other.step(batches.take(1))]
    assert seen == results
    assert window.loss == pytest.approx(sum(r.loss_sum for r in results) / (5 * CONTEXT))
    assert window.grad_norm == results[-1].grad_norm


def test_time_between_windows_is_in_no_rate(updater):
    now = 0.0

    class Slow(Rows):
        def take(self, blocks):
            nonlocal now
            now += 1.0
            return super().take(blocks)

    batches = Slow()
    first = run_window(updater, batches, [4, 4], clock=lambda: now)
    now += 10.0  # a validation, say
    second = run_window(updater, batches, [4, 4], clock=lambda: now)
    assert (first.seconds, second.seconds) == (2.0, 2.0)


def test_a_plan_may_look_at_the_clock(updater):
    now = 0.0

    def until(limit):
        while now < limit:
            yield 4

    def tick(result):
        nonlocal now
        now += 1.0

    window = run_window(updater, Rows(), until(2.5), clock=lambda: now, on_update=tick)
    assert (window.updates, window.seconds) == (3, 3.0)


def test_the_collector_stays_out_of_a_window_and_nothing_piles_up(updater):
    states, objects = [], []

    def look(result):
        states.append(gc.isenabled())
        objects.append(len(gc.get_objects()))

    run_window(updater, Rows(), [4] * 6, on_update=look)
    assert states == [False] * 6
    assert gc.isenabled()
    assert objects[-1] - objects[2] < 50, "updates must leave no cycles behind"
    with pytest.raises(ZeroDivisionError):
        run_window(updater, Rows(), (4 // zero for zero in [1, 0]))
    assert gc.isenabled()


def test_an_empty_window_is_refused(updater):
    with pytest.raises(ValueError, match="at least one update"):
        run_window(updater, Rows(), [])


def test_deterministic_mode_is_switched_on(updater):
    try:
        update.deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        updater.step(rows(4))
    finally:
        torch.use_deterministic_algorithms(False)
