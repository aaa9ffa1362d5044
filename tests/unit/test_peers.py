"""A peer is the same model by another implementation: same weights by name, same loss and gradients, same update."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from speedproof.core.errors import UserError
from speedproof.data.token_cache import TokenCache
from speedproof.evidence import peers as beside
from speedproof.evidence.parity import check_parity
from speedproof.model import llama, peers
from speedproof.model.fused import by_name
from speedproof.model.llama import build
from speedproof.model.names import ours, theirs
from speedproof.settings.execution import NATIVE_ONLY
from speedproof.settings.experiment import Parity
from speedproof.training.update import Updater

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recipe(miniature_recipe):
    return miniature_recipe(model={"layers": 2}, init_std=0.1)


@pytest.fixture(scope="module")
def peer_execution(miniature_execution):
    return miniature_execution(microbatch=2).peer("transformers")


@pytest.fixture(scope="module")
def installed():
    """Skips without the optional package."""
    pytest.importorskip("transformers", reason="the peer's package is not installed; pip install -r envs/peers.txt")


def batch(recipe, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, recipe.model.vocab_size, (2, 2, recipe.model.context_length), generator=generator)
    tokens[1, 0, 3:5] = -100
    return tokens[0], tokens[1]


def test_names_go_there_and_back(recipe):
    names = list(build(recipe, None, "cpu").state_dict())
    assert len({theirs(name) for name in names}) == len(names)
    assert [ours(theirs(name)) for name in names] == names


def test_the_pin_is_the_version_asked_for():
    pins = (ROOT / "envs/peers.txt").read_text(encoding="utf-8")
    assert re.search(r"(?m)^transformers==(.+)$", pins)[1] == peers.TRANSFORMERS


@pytest.mark.parametrize("found", [None, "4.0.0"])
def test_missing_or_other_package_is_one_sentence(found, recipe, peer_execution, monkeypatch):
    def version(name):
        if found is None:
            raise peers.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(peers.metadata, "version", version)
    with pytest.raises(UserError, match=r"execution.implementation: .*; pip install -r envs/peers.txt$"):
        build(recipe, peer_execution, "cpu")


def test_no_setting_of_the_native_model_passes_for_a_peer_s(recipe, miniature_execution, monkeypatch):
    """Whatever `build` hands to the native model is either handed to the peer as well, or kept from it."""
    seen = {}

    class Probe(Exception):
        pass

    def native(shape, numbers, **ways):
        seen.update(ways)
        raise Probe

    monkeypatch.setattr(llama, "Llama", native)
    with pytest.raises(Probe):
        build(recipe, miniature_execution(), "cpu")
    assert seen.keys() - NATIVE_ONLY.keys() == {"sdpa_backend"}


def test_native_settings_are_refused_on_a_peer(recipe, miniature_execution):
    with pytest.raises(UserError, match=r"execution.rope: 'cached' is the native model's alone; use 'uncached'"):
        miniature_execution(implementation="transformers", rope="cached").check(recipe)


def test_loss_and_gradients_are_the_reference_model_s(installed, recipe, peer_execution):
    reference, peer = build(recipe, None, "cpu"), build(recipe, peer_execution, "cpu")
    inputs, targets = batch(recipe)
    torch.testing.assert_close(peer(inputs), reference(inputs), rtol=0, atol=1e-5)
    losses = [model.nll_sum(inputs, targets) for model in (reference, peer)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    expected, found = (by_name(model, lambda weight: weight.grad) for model in (reference, peer))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_state_dict_is_canonical_and_whole(installed, recipe, peer_execution):
    reference, peer = build(recipe, None, "cpu"), build(recipe, peer_execution, "cpu")
    state = peer.state_dict()
    assert state.keys() == reference.state_dict().keys()
    assert {name for name, _ in peer.named_parameters()} == state.keys()
    state["norm.weight"] = state["norm.weight"] + 1
    peer.load_state_dict(state, strict=True)
    torch.testing.assert_close(peer.state_dict()["norm.weight"], state["norm.weight"])
    with pytest.raises(RuntimeError, match="down_proj"):
        peer.load_state_dict({k: v for k, v in state.items() if k != "blocks.1.ffn.down.weight"}, strict=True)
    with pytest.raises(RuntimeError, match="embedding"):
        peer.load_state_dict(state | {"embedding.bias": state["norm.weight"]}, strict=True)


@pytest.mark.parametrize("backend", ["auto", "flash", "math"])
def test_updates_are_the_native_ones_and_a_state_moves_over(installed, recipe, miniature_execution, backend):
    native = miniature_execution(microbatch=2, sdpa_backend=backend)
    updaters = [Updater(recipe, execution, "cpu") for execution in (native, native.peer("transformers"))]
    rows = np.random.default_rng(2).integers(0, 61, (6, 17), dtype=np.uint16)
    for start in (0, 2):
        results = [updater.step(rows[start : start + 4]) for updater in updaters]
        assert results[1].loss_sum == pytest.approx(results[0].loss_sum, rel=1e-5)
        assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-4)
    states = [updater.state_dict() for updater in updaters]
    for part in ("model", "moments"):
        assert states[0][part].keys() == states[1][part].keys()
    updaters[0].load_state_dict(states[1])
    for name, weight in states[1]["model"].items():
        assert torch.equal(updaters[0].state_dict()["model"][name], weight), name


def test_a_forced_backend_is_the_one_that_runs(installed, recipe, miniature_execution):
    execution = miniature_execution(microbatch=2, sdpa_backend="math").peer("transformers")
    model = build(recipe, execution, "cpu")
    with torch.profiler.profile() as trace:
        model.nll_sum(*batch(recipe))
    ran = {event.key for event in trace.key_averages()}
    assert "aten::_scaled_dot_product_attention_math" in ran
    assert not any("flash" in key for key in ran)


def test_parity_is_shown_as_of_any_execution(installed, tmp_path, miniature_recipe, peer_execution):
    cache = TokenCache.synthetic(tmp_path, 61, 4000, 1000, seed=1)
    recipe = miniature_recipe(model={"layers": 2}, init_std=0.1, data=cache.identity)
    settings = Parity(blocks=2, loss_tolerance_nats=1e-3, gradient_tolerance=0.05, arm="recommended")
    found = check_parity(recipe, peer_execution, None, cache, settings)
    assert found["holds"], found["reason"]
    assert found["gradient_error"] < 1e-5
    assert found["execution"]["implementation"] == "transformers"


def test_one_graph_holds_the_whole_loss(installed, recipe, peer_execution):
    """What the compiled execution compiles in full; the code generator itself is the compiler's own to test."""
    torch._dynamo.reset()
    model = build(recipe, peer_execution, "cpu")
    inputs, targets = batch(recipe)
    traced = torch.compile(model.nll_sum, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(traced(inputs, targets), model.nll_sum(inputs, targets))


def comparison(a, b, rates):
    return {"a": a.plain(), "b": b.plain(), "blocks": rates, "status": "ok", "reason": None, "environment": {}}


def test_each_execution_is_set_beside_its_peer(recipe, miniature_execution, monkeypatch, tmp_path):
    """A is the peer, so that above 1 the native execution is faster; equal executions are measured once."""
    asked = []

    def compare(a, b, *rest, **options):
        asked.append((a, b))
        return comparison(a, b, [[100.0, 150.0, 150.0, 100.0]] * 3)

    monkeypatch.setattr(beside, "compare", compare)
    monkeypatch.setattr(beside, "require_transformers", lambda: None)
    monkeypatch.setattr(beside, "_parity", lambda peer, *rest: {"holds": True, "reason": "", "execution": peer.plain()})
    plain, fast = miniature_execution(), miniature_execution(microbatch=2, projections="fused")
    run = {"store": None, "cache_manifest": tmp_path}
    found = beside.compare_peers({"default": plain, "recommended": fast}, recipe, {}, None, 3, **run)
    assert asked == [(plain.peer("transformers"), plain), (fast.peer("transformers"), fast)]
    assert [row["name"] for row in found["rows"]] == ["default", "recommended"]
    row = found["rows"][1]
    assert (row["targets_per_s"], row["peer_targets_per_s"]) == (pytest.approx(150), pytest.approx(100))
    assert (row["ratio"], row["verdict"]) == (pytest.approx(1.5), "faster")
    assert row["parity"]["execution"]["implementation"] == "transformers"
    assert "1.50x [1.50, 1.50], faster; parity of the peer holds" in beside.describe(row)
    asked.clear()
    found = beside.compare_peers({"default": plain, "recommended": plain}, recipe, {}, None, 3, **run)
    assert (len(asked), [row["name"] for row in found["rows"]]) == (1, ["default and recommended"])


def test_a_slower_or_unfinished_one_is_called_so(miniature_execution):
    a, b = miniature_execution().peer("transformers"), miniature_execution()
    rates = [[100.0, 90.0, 90.0, 100.0], [101.0, 90.0, 91.0, 100.0], [100.0, 90.0, 90.0, 101.0]]
    assert beside.row(comparison(a, b, rates))["verdict"] == "slower"
    unfinished = comparison(a, b, []) | {"status": "incomplete", "reason": "0 of 3 blocks are valid (timeout)"}
    found = beside.row(unfinished)
    assert (found["verdict"], found["ratio"], found["targets_per_s"]) == ("inconclusive", None, None)
    assert "not compared (0 of 3 blocks are valid (timeout))" in beside.describe(found | {"name": "default"})
