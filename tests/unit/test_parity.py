"""Parity: planted errors are found, the fast path in all its forms agrees, and a check is made once."""

import contextlib
import math

import miniature
import pytest
import torch
import yaml
from safetensors.torch import save_file

from speedproof.core.errors import UserError
from speedproof.data.token_cache import TokenCache
from speedproof.evidence import parity
from speedproof.model.llama import build
from speedproof.settings.experiment import Parity
from speedproof.settings.recipe import Recipe
from speedproof.training.compile import CompileError

SETTINGS = Parity(blocks=3, loss_tolerance_nats=1e-3, gradient_tolerance=0.05, arm="recommended")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return TokenCache.synthetic(tmp_path_factory.mktemp("cache"), 64, 4000, 1000, seed=1)


@pytest.fixture
def store(cache, monkeypatch):
    """The cache's store, with no wait for whoever measures on this machine at the moment."""
    monkeypatch.setattr(parity, "device_lock", lambda device: contextlib.nullcontext(0.0))
    return cache._store


@pytest.fixture(scope="module")
def recipe(cache):
    return miniature.recipe(
        model={"vocab_size": 64, "layers": 2},
        data=cache.identity,
        budget_targets=640,
        virtual_epochs=1,
        subset_blocks=2,
        seed=42,
        lr=1e-3,
        warmup_fraction=0.1,
        init_std=0.1,
    )


def execution(**changes):
    return miniature.execution(**({"microbatch": 2, "finite_checks": "merged", "evaluation_batch": 2} | changes))


@pytest.fixture(scope="module")
def gradients(recipe):
    """Gradients of unequal sizes, as a model has them."""
    generator = torch.Generator().manual_seed(3)
    model = build(recipe, None, "cpu")
    sizes = enumerate(model.named_parameters())
    return {n: torch.randn(w.shape, generator=generator) * 10 ** -(i % 4) for i, (n, w) in sizes}


def judged(gradients, fast, difference=0.0):
    return parity.judge(4.0 + difference, 4.0, fast, gradients, SETTINGS)


def test_six_per_cent_in_all_gradients_fail_and_one_passes(gradients):
    found = judged(gradients, {n: g * 1.06 for n, g in gradients.items()})
    assert not found["holds"]
    assert found["gradient_error"] == pytest.approx(0.06, rel=1e-4)
    assert "aggregate gradient error 6.00 %" in found["reason"]
    found = judged(gradients, {n: g * 1.01 for n, g in gradients.items()})
    assert found["holds"]
    assert found["gradient_error"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("name", ["blocks.1.ffn.up.weight", "norm.weight"])
def test_an_error_in_one_tensor_is_named(gradients, name):
    fast = dict(gradients) | {name: gradients[name] * 1.06}
    found = judged(gradients, fast)
    assert found["worst_tensor"]["name"] == name
    assert found["worst_tensor"]["gradient_error"] == pytest.approx(0.06, rel=1e-3)
    assert found["gradient_error"] < 0.06


def test_aggregate_is_over_all_parameters(gradients):
    """‖fast − reference‖ / ‖reference‖ of all tensors end to end, not a mean of the tensors' errors."""
    generator = torch.Generator().manual_seed(4)
    fast = {n: g + 0.02 * torch.randn(g.shape, generator=generator) for n, g in gradients.items()}
    error, _ = parity.gradient_errors(fast, gradients)
    flat = torch.cat([g.flatten() for g in gradients.values()]).double()
    moved = torch.cat([fast[n].flatten() for n in gradients]).double()
    assert error == pytest.approx(((moved - flat).norm() / flat.norm()).item(), rel=1e-9)


def test_loss_tolerance(gradients):
    assert judged(gradients, gradients, 0.9e-3)["holds"]
    for difference in (1.1e-3, -1.1e-3):
        found = judged(gradients, gradients, difference)
        assert not found["holds"]
        assert found["reason"].startswith("loss differs by")


def test_nan_never_holds(gradients):
    name = "blocks.0.attention.k.weight"
    found = judged(gradients, dict(gradients) | {name: gradients[name] * math.nan})
    assert not found["holds"]
    assert found["worst_tensor"] == {"name": name, "gradient_error": None}
    assert found["gradient_error"] is None
    found = judged(gradients, gradients, math.nan)
    assert not found["holds"]
    assert found["fast_loss_nats"] is None


def test_a_tensor_without_reference_gradient_counts_by_the_whole():
    reference = {"a": torch.tensor([3.0]), "b": torch.zeros(2)}
    error, each = parity.gradient_errors({"a": torch.tensor([3.0]), "b": torch.tensor([0.3, 0.0])}, reference)
    assert (error, each["b"]) == (pytest.approx(0.1), pytest.approx(0.1))


@pytest.mark.parametrize("backend", ["auto", "flash", "math"])
@pytest.mark.parametrize("rope", ["cached", "uncached"])
def test_eager_fp32_agrees(recipe, cache, backend, rope):
    found = parity.check_parity(recipe, execution(sdpa_backend=backend, rope=rope), None, cache, SETTINGS)
    assert found["holds"]
    assert found["gradient_error"] < 1e-5
    assert abs(found["loss_difference_nats"]) < 1e-5
    # Three blocks asked for become two whole microbatches of two.
    assert (found["blocks"], found["targets"], found["kind"]) == (4, 64, "fresh")


FAST = {"projections": "fused", "loss": "chunked", "optimizer": "arena"}


@pytest.mark.parametrize("settings", [{key: value} for key, value in FAST.items()] + [FAST], ids=len)
def test_each_way_to_be_faster_agrees(recipe, cache, settings):
    found = parity.check_parity(recipe, execution(**settings), None, cache, SETTINGS)
    assert found["holds"]
    assert found["gradient_error"] < 1e-5
    assert abs(found["loss_difference_nats"]) < 1e-5


@pytest.mark.parametrize("settings", [{}, FAST], ids=["plain", "fast"])
def test_bf16_drifts_but_holds(recipe, cache, settings):
    bf16 = Recipe.parse(recipe.plain() | {"precision": "bf16"})
    found = parity.check_parity(bf16, execution(**settings), None, cache, SETTINGS)
    assert found["holds"], found["reason"]
    assert 1e-4 < found["gradient_error"] < 0.05


def test_compiled_full_microbatch_agrees(recipe, cache):
    small = Recipe.parse(recipe.plain() | {"model": recipe.model.plain() | {"layers": 1}})  # half as long to compile
    found = parity.check_parity(small, execution(compile=True), None, cache, SETTINGS)
    assert found["holds"], found["reason"]
    assert found["compiled_shapes"] == [[2, 16]]
    assert found["gradient_error"] < 1e-4


def test_a_wrong_fast_path_fails(recipe, cache, monkeypatch):
    """A fault in the fast path itself, and not in its gradients afterwards, is seen too."""
    from speedproof.model import rope

    plain = rope.CachedRope.forward
    monkeypatch.setattr(rope.CachedRope, "forward", lambda self, x: plain(self, x.flip(1)).flip(1))
    found = parity.check_parity(recipe, execution(), None, cache, SETTINGS)
    assert not found["holds"]
    assert "worst tensor blocks." in found["reason"]


class TestWeights:
    def saved(self, recipe, path, **changes):
        weights = dict(build(Recipe.parse(recipe.plain() | {"seed": 7}), None, "cpu").state_dict()) | changes
        save_file({n: w for n, w in weights.items() if w is not None}, path)
        return path

    def test_trained_weights_are_the_ones_checked(self, recipe, cache, tmp_path):
        path = self.saved(recipe, tmp_path / "weights.safetensors")
        trained = parity.check_parity(recipe, execution(), path, cache, SETTINGS)
        assert trained["holds"]
        assert trained["kind"] == "trained"
        fresh = parity.check_parity(recipe, execution(), None, cache, SETTINGS)
        assert trained["reference_loss_nats"] != fresh["reference_loss_nats"]

    def test_loading_is_strict(self, recipe, cache, tmp_path):
        for changes, message in (
            ({"norm.weight": None}, r"norm\.weight is missing"),
            ({"extra.weight": torch.ones(2)}, r"extra\.weight is unknown"),
            ({"norm.weight": torch.ones(31)}, r"norm\.weight is \(31,\)"),
        ):
            path = self.saved(recipe, tmp_path / "weights.safetensors", **changes)
            with pytest.raises(UserError, match=message):
                parity.check_parity(recipe, execution(), path, cache, SETTINGS)

    def test_a_broken_file_is_named(self, recipe, cache, tmp_path):
        path = self.saved(recipe, tmp_path / "weights.safetensors")
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(UserError, match=r"weights\.safetensors"):
            parity.check_parity(recipe, execution(), path, cache, SETTINGS)


def test_too_little_data_is_named(recipe, cache):
    settings = Parity.parse(SETTINGS.plain() | {"blocks": 1000})
    with pytest.raises(UserError, match=r"parity\.blocks: 1000"):
        parity.check_parity(recipe, execution(), None, cache, settings)


def test_a_check_is_made_once(recipe, cache, store, monkeypatch):
    made = []
    real = parity.check_parity
    monkeypatch.setattr(parity, "check_parity", lambda *given: made.append(given) or real(*given))
    first = parity.stored_parity(recipe, execution(), None, cache, SETTINGS, store)
    again = parity.stored_parity(recipe, execution(), None, cache, SETTINGS, store)
    assert (first, len(made)) == (again, 1)
    # Which arm the config names changes no figure; a tolerance does.
    parity.stored_parity(recipe, execution(), None, cache, SETTINGS.model_copy(update={"arm": "other"}), store)
    assert len(made) == 1
    parity.stored_parity(recipe, execution(), None, cache, SETTINGS.model_copy(update={"blocks": 1}), store)
    parity.stored_parity(recipe, execution(rope="uncached"), None, cache, SETTINGS, store)
    assert len(made) == 3


def test_finalists_go_down_until_one_holds(recipe, cache, store, monkeypatch):
    broken, failing, good = execution(microbatch=1), execution(microbatch=4), execution(microbatch=2)

    def planted(recipe, execution, weights, cache, settings, store):
        if execution == broken:
            raise CompileError("execution.compile: no compiler")
        holds = execution != failing
        return {"holds": holds, "reason": "planted", "execution": execution.plain()}

    monkeypatch.setattr(parity, "stored_parity", planted)
    ranked = [("a", broken), ("b", failing), ("c", good), ("d", execution(rope="uncached"))]
    finalists = {
        "selected": [{"name": n, "execution": e.plain(), "targets_per_s": 1.0} for n, e in ranked],
        "recommended": failing.plain(),
        "recommended_name": "b",
        "default": execution(cpu_threads=2).plain(),
        "default_name": "default",
    }
    found = parity.check_finalists(finalists, recipe, cache, SETTINGS, store)
    assert [(c["name"], c["holds"]) for c in found["checks"]] == [
        ("a", False), ("b", False), ("c", True), ("default", True)
    ]  # fmt: skip
    assert found["checks"][0]["reason"] == "CompileError: execution.compile: no compiler"
    assert (found["recommended"]["name"], found["recommended"]["holds"]) == ("b", False)


def test_scripts(recipe, cache, store, tmp_path, monkeypatch, capsys):
    import importlib.util

    def main(name):
        folder = parity.files.__file__.rsplit("/speedproof/", 1)[0]
        spec = importlib.util.spec_from_file_location(name, f"{folder}/scripts/{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.main

    paths = {name: tmp_path / f"{name}.yaml" for name in ("recipe", "execution", "parity")}
    for name, value in (("recipe", recipe), ("execution", execution()), ("parity", SETTINGS)):
        paths[name].write_text(yaml.safe_dump(value.plain()))
    manifest = store.root.parent / "token_cache.json"
    common = {"recipe": paths["recipe"], "parity": paths["parity"], "cache": manifest, "store": store.root}
    main("check_parity")(execution=paths["execution"], output=tmp_path / "fresh.json", **common)
    assert parity.files.read_json(tmp_path / "fresh.json")["holds"]
    finalists = {
        "selected": [{"name": "only", "execution": execution().plain(), "targets_per_s": 1.0}],
        "recommended": execution().plain(),
        "recommended_name": "only",
        "default": execution().plain(),
        "default_name": "only",
    }
    parity.files.write_json(tmp_path / "finalists.json", finalists)
    main("check_finalists")(finalists=tmp_path / "finalists.json", output=tmp_path / "checks.json", **common)
    checks = parity.files.read_json(tmp_path / "checks.json")
    assert [check["name"] for check in checks["checks"]] == ["only"]
    assert checks["recommended"]["holds"]
    assert "parity holds; loss" in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backend", ["auto", "flash", "cudnn", "math"])
def test_compiled_bf16_on_cuda(recipe, cache, backend):
    bf16 = Recipe.parse(recipe.plain() | {"precision": "bf16"})
    chosen = execution(device="cuda", compile=True, sdpa_backend=backend)
    found = parity.check_parity(bf16, chosen, None, cache, SETTINGS)
    assert found["holds"], found["reason"]
