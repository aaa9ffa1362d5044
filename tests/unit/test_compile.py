"""The compiled path. One real compilation is shared; where only dispatch is asked, a cheaper backend stands in."""

from functools import partial

import numpy as np
import pytest
import torch

from speedproof.data.token_cache import TokenCache
from speedproof.training import compile as module
from speedproof.training.compile import CompileError, compile_errors, compiles, graph_breaks, recompile_reasons
from speedproof.training.evaluate import evaluate
from speedproof.training.update import Updater

CONTEXT = 16
EPOCH = [4, 4, 3]
"""Blocks of the updates of an epoch of 11 blocks; the last one's boundary cuts it short."""


def rows(blocks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, (blocks, CONTEXT + 1)).astype(np.uint16)


@pytest.fixture
def traced(monkeypatch):
    """Trace and guard as the compiler does, without generating code."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def epochs(miniature_recipe, miniature_execution):
    """Two epochs with microbatch 4, compiled and eager: updaters, results, and compilations after each update."""
    torch._dynamo.reset()
    recipe = miniature_recipe()
    runs = {}
    for kind in (True, False):
        updater = Updater(recipe, miniature_execution(compile=kind), "cpu")
        results, counts, rates = [], [], []
        for seed, blocks in enumerate(EPOCH * 2):
            results.append(updater.step(rows(blocks, seed)))
            counts.append((compiles(), graph_breaks()))
            rates.append(updater.optimizer.param_groups[0]["lr"])
        runs[kind] = (updater, results, counts, rates)
    return runs


def test_compiled_and_eager_learn_the_same(epochs):
    (compiled, found, _, _), (eager, wanted, _, _) = epochs[True], epochs[False]
    for a, b in zip(found, wanted, strict=True):
        assert a.targets == b.targets
        assert a.loss_sum == pytest.approx(b.loss_sum, rel=1e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)
    for name, weight in compiled.model.state_dict().items():
        torch.testing.assert_close(weight, eager.model.state_dict()[name], rtol=0, atol=1e-3)


def test_the_compiled_function_sees_the_full_shape_alone(epochs):
    assert epochs[True][0].compiled.shapes == {(4, CONTEXT): 4}


def test_nothing_compiles_after_the_first_update(epochs):
    _, _, counts, rates = epochs[True]
    assert len(set(rates)) == len(rates), "the learning rate must have changed"
    assert set(counts) == {counts[0]}
    assert counts[0][0] >= 1
    assert counts[0][1] == 0


def test_partial_batches_through_the_compiler_compile_again_and_say_why(traced, miniature_recipe, miniature_execution):
    updater = Updater(miniature_recipe(), miniature_execution(compile=True, partial="compiled"), "cpu")
    eager = Updater(miniature_recipe(), miniature_execution(), "cpu")
    before, reasons = compiles(), len(recompile_reasons())
    for seed, blocks in enumerate([4, 3, 4, 2, 3]):
        a, b = updater.step(rows(blocks, seed)), eager.step(rows(blocks, seed))
        assert a.loss_sum == pytest.approx(b.loss_sum, rel=1e-5)
    assert updater.compiled.shapes == {(4, CONTEXT): 2, (3, CONTEXT): 2, (2, CONTEXT): 1}
    assert compiles() - before == 3
    found = recompile_reasons()[reasons:]
    assert len(found) == 2
    assert "expected 4, actual 3" in found[0]
    assert "actual 2" in found[1]
    assert [s for s in module.seen_shapes() if s[0] in (4, 3) and s[1] == CONTEXT] == [[4, CONTEXT], [3, CONTEXT]]


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize(
    "settings",
    [{"rope": "cached"}, {"rope": "uncached"}, {"projections": "fused"}, {"loss": "chunked"}],
    ids=lambda settings: next(iter(settings.values())),
)
def test_every_path_is_one_graph(traced, backend, settings, miniature_recipe, miniature_execution):
    ways = {"microbatch": 2, "sdpa_backend": backend} | settings
    updater = Updater(miniature_recipe(), miniature_execution(compile=True, **ways), "cpu")
    eager = Updater(miniature_recipe(), miniature_execution(**ways), "cpu")
    before = compiles(), graph_breaks()
    for seed in range(2):
        assert updater.step(rows(4, seed)).loss_sum == pytest.approx(eager.step(rows(4, seed)).loss_sum, rel=1e-5)
    graphs = 2 if "loss" in settings else 1
    assert (compiles() - before[0], graph_breaks() - before[1]) == (graphs, 0)


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_compiled_validation_pads_its_last_batch(traced, loss, tmp_path, miniature_recipe, miniature_execution):
    tokens = TokenCache.synthetic(tmp_path, 61, 400, CONTEXT * 7 + 6, seed=0).validation
    recipe = miniature_recipe()
    execution = miniature_execution(evaluation_batch=3, evaluation_compile=True, loss=loss)
    model = Updater(recipe, execution, "cpu").model
    before = compiles()
    found = [evaluate(model, tokens, recipe, execution, "cpu") for _ in range(2)]
    wanted = evaluate(model, tokens, recipe, miniature_execution(), "cpu")
    assert compiles() - before == (2 if loss == "chunked" else 1), "one shape, and not again at the next validation"
    for evaluation in found:
        assert evaluation.targets == wanted.targets
        assert evaluation.loss == pytest.approx(wanted.loss, rel=1e-6)


def test_a_compiler_that_fails_is_said(miniature_recipe, miniature_execution, monkeypatch):
    def broken(graph, inputs):
        from torch._inductor.exc import InvalidCxxCompiler

        raise InvalidCxxCompiler()

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    updater = Updater(miniature_recipe(), miniature_execution(compile=True), "cpu")
    with pytest.raises(
        CompileError, match=r"execution\.compile: torch\.compile failed with .*install a C\+\+ compiler"
    ):
        updater.step(rows(4, 0))
    assert updater.updates == 0
    torch._dynamo.reset()


def test_errors_of_the_run_itself_pass():
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("something else"), KeyError("a")):
        with pytest.raises(type(error)), compile_errors():
            raise error
