"""The arena against the plain optimizer: the same updates and states, in views that nothing moves out of place."""

import math

import numpy as np
import pytest
import torch

from speedproof.model.fused import by_name
from speedproof.training.optimizer import ALIGNMENT, OPTIMIZERS
from speedproof.training.update import NonFinite, Updater

MODEL = {"layers": 2, "width": 36, "ffn_width": 50}  # sizes that are no multiples of the alignment


def rows(blocks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, (blocks, 17)).astype(np.uint16)


@pytest.fixture(params=["separate", "fused"])
def pair(request, miniature_recipe, miniature_execution):
    """Updaters with the plain optimizer and with the arena; the gradients are clipped at every update."""
    recipe = miniature_recipe(model=MODEL, grad_clip=0.05)
    ways = {"projections": request.param, "microbatch": 2}
    return [Updater(recipe, miniature_execution(optimizer=way, **ways), "cpu") for way in OPTIMIZERS]


def near(found: Updater, wanted: Updater) -> None:
    a, b = found.state_dict(), wanted.state_dict()
    for part in ("model", "moments"):
        assert a[part].keys() == b[part].keys()
        for name, value in b[part].items():
            torch.testing.assert_close(a[part][name], value, rtol=1e-4, atol=1e-5, msg=f"{part} {name}")


def test_updates_are_those_of_the_plain_optimizer(pair):
    plain, arena = pair
    near(arena, plain)
    for seed, blocks in enumerate((4, 3, 4, 4)):
        a, b = plain.step(rows(blocks, seed)), arena.step(rows(blocks, seed))
        assert b.loss_sum == pytest.approx(a.loss_sum, rel=1e-5)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
        assert a.grad_norm > 0.05, "nothing was clipped"
        near(arena, plain)


def test_the_models_tensors_stay_views_of_the_arena(pair):
    arena = pair[1]
    places = {n: (w.data_ptr(), w.grad.data_ptr()) for n, w in arena.model.named_parameters()}
    for seed in range(2):
        arena.step(rows(4, seed))
    arena.load_state_dict(arena.state_dict())
    assert {n: (w.data_ptr(), w.grad.data_ptr()) for n, w in arena.model.named_parameters()} == places
    start = places["embedding.weight"][0]
    assert all((place - start) % (4 * ALIGNMENT) == 0 for place, _ in places.values())
    assert torch.count_nonzero(arena.weights.gradients) == 0
    arena.backward(rows(2, 5), 32)
    found = by_name(arena.model, lambda weight: weight.grad).values()
    whole = math.sqrt(sum(g.double().square().sum().item() for g in found))
    assert arena.weights.norm().item() == pytest.approx(whole, rel=1e-6)


def test_a_state_goes_both_ways_and_goes_on_bitwise(pair, miniature_execution):
    plain, arena = pair
    plain.step(rows(4, 0))
    arena.load_state_dict(plain.state_dict())
    again = Updater(arena.recipe, arena.execution, "cpu")
    again.load_state_dict(arena.state_dict())
    plain.step(rows(4, 1))
    arena.step(rows(4, 1))
    again.step(rows(4, 1))
    near(arena, plain)
    for part in ("model", "moments"):
        for name, value in arena.state_dict()[part].items():
            assert torch.equal(again.state_dict()[part][name], value)
    fresh = Updater(plain.recipe, plain.execution, "cpu").state_dict()
    arena.load_state_dict(fresh)
    assert arena.state_dict()["moments"] == {}


def test_a_nonfinite_update_changes_nothing(pair):
    arena = pair[1]
    arena.step(rows(4, 0))
    before = {part: {n: t.clone() for n, t in arena.state_dict()[part].items()} for part in ("model", "moments")}
    weight = arena.model.blocks[1].ffn.down.weight
    hook = weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NonFinite, match=r"update 2: gradient of blocks\.1\.ffn\.down\.weight"):
        arena.step(rows(4, 1))
    hook.remove()
    for part, tensors in before.items():
        assert all(torch.equal(arena.state_dict()[part][name], value) for name, value in tensors.items())
    assert torch.count_nonzero(arena.weights.gradients) == 0


def test_the_norm_of_many_gradients_is_exact(miniature_recipe, miniature_execution):
    recipe = miniature_recipe(model={"vocab_size": 60000, "width": 128})
    arena = Updater(recipe, miniature_execution(optimizer="arena"), "cpu").weights
    arena.gradients.normal_(generator=torch.Generator().manual_seed(0))
    assert arena.norm().item() == pytest.approx(torch.linalg.vector_norm(arena.gradients.double()).item(), rel=1e-6)
