from itertools import product
from pathlib import Path

import pytest
import torch
import yaml

from speedproof.model import loss
from speedproof.model.llama import Llama, build
from speedproof.settings.recipe import ModelShape

PRESETS = Path(__file__).resolve().parents[2] / "config" / "presets"
COUNTS = {"nano": 2048 * 128 + 2 * (4 * 128**2 + 3 * 128 * 384) + 5 * 128}
COUNTS |= {"20m": 20_403_520, "50m": 48_507_392, "90m": 91_605_120}


@pytest.fixture
def tokens():
    return torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("preset", COUNTS)
def test_parameters_of_the_presets(preset, miniature_recipe):
    values = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text(encoding="utf-8"))
    shape = ModelShape.parse({key: values[key] for key in ModelShape.model_fields}, preset)
    with torch.device("meta"):
        model = Llama(shape, miniature_recipe())
    assert sum(weight.numel() for weight in model.parameters()) == COUNTS[preset] == shape.parameters


def test_keys_never_depend_on_the_execution(miniature_recipe, miniature_execution):
    layer = [
        *("attention_norm.weight", "attention.q.weight", "attention.k.weight", "attention.v.weight"),
        *("attention.o.weight", "ffn_norm.weight", "ffn.gate.weight", "ffn.up.weight", "ffn.down.weight"),
    ]
    recipe = miniature_recipe(model={"layers": 2})
    keys = {"embedding.weight", "norm.weight", *(f"blocks.{i}.{name}" for i in (0, 1) for name in layer)}
    reference = build(recipe, None, "cpu").state_dict()
    assert reference.keys() == keys
    for rope, backend in product(("cached", "uncached"), ("auto", "flash", "math")):
        model = build(recipe, miniature_execution(rope=rope, sdpa_backend=backend), "cpu")
        assert model.state_dict().keys() == keys
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, reference[name]), f"{name} differs with {rope}, {backend}"


def test_initialisation(miniature_recipe):
    recipe = miniature_recipe(model={"layers": 2, "width": 128, "ffn_width": 256})
    state = torch.random.get_rng_state()
    weights = build(recipe, None, "cpu").state_dict()
    assert torch.equal(torch.random.get_rng_state(), state), "it draws from its own generator alone"
    for name, weight in weights.items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            residual = ".o." in name or ".down." in name
            assert weight.std().item() == pytest.approx(0.01 if residual else 0.02, rel=0.05), name
    other = build(miniature_recipe(model={"layers": 2, "width": 128, "ffn_width": 256}, seed=8), None, "cpu")
    assert not torch.equal(other.embedding.weight, weights["embedding.weight"])


def test_the_fast_path_agrees_with_the_reference(miniature_recipe, miniature_execution, tokens):
    recipe = miniature_recipe(model={"layers": 2})
    reference = build(recipe, None, "cpu").double()
    wanted = reference(tokens)
    assert wanted.dtype == torch.float64
    for rope, backend, projections in product(("cached", "uncached"), ("auto", "flash", "math"), ("separate", "fused")):
        execution = miniature_execution(rope=rope, sdpa_backend=backend, projections=projections)
        model = build(recipe, execution, "cpu")
        torch.testing.assert_close(model(tokens).double(), wanted, rtol=0, atol=1e-5)


def test_a_position_does_not_see_what_comes_after_it(miniature_recipe, miniature_execution, tokens):
    model = build(miniature_recipe(), miniature_execution(), "cpu")
    later = tokens.clone()
    later[:, 9:] = (later[:, 9:] + 1) % 61
    before, after = model(tokens), model(later)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9], after[:, 9])


def test_head_and_embedding_are_one_weight(miniature_recipe, miniature_execution, tokens):
    model = build(miniature_recipe(), miniature_execution(), "cpu")
    with torch.no_grad():
        model.embedding.weight.zero_()
    assert torch.count_nonzero(model(tokens)) == 0


def test_loss_is_a_sum_over_the_targets_that_count(miniature_recipe, tokens):
    model = build(miniature_recipe(), None, "cpu").double()
    targets = tokens.roll(-1, dims=1)
    targets[0, 5:] = loss.IGNORED
    p = model(tokens).softmax(-1)
    pairs = [(b, t) for b in (0, 1) for t in range(16) if b or t < 5]
    by_hand = -sum(p[b, t, targets[b, t]].log() for b, t in pairs)
    found = model.nll_sum(tokens, targets)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, by_hand, rtol=1e-12, atol=0)
    assert model.nll_sum(tokens, torch.full_like(targets, loss.IGNORED)).item() == 0.0


def test_autocast_keeps_residual_and_loss_in_fp32(miniature_recipe, miniature_execution, tokens):
    model = build(miniature_recipe(), miniature_execution(), "cpu")
    kinds = {}
    model.blocks[0].register_forward_hook(lambda module, args, y: kinds.update(residual=y.dtype))
    model.blocks[0].ffn.gate.register_forward_hook(lambda module, args, y: kinds.update(product=y.dtype))
    model.norm.register_forward_hook(lambda module, args, y: kinds.update(norm=y.dtype))
    exact = model.nll_sum(tokens, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens).dtype == torch.bfloat16
        nll = model.nll_sum(tokens, tokens)
    assert kinds == {"residual": torch.float32, "product": torch.bfloat16, "norm": torch.float32}
    assert nll.dtype == torch.float32
    assert nll.item() / tokens.numel() == pytest.approx(exact.item() / tokens.numel(), abs=1e-2)


def test_the_reference_can_be_differentiated_twice_functionally(miniature_recipe, tokens):
    model = build(miniature_recipe(init_std=0.2), None, "cpu").double()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    inputs, targets = tokens[:, :6], tokens[:, 1:7]

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, inputs, targets):
            return self.model.nll_sum(inputs, targets) / targets.numel()

    whole = Loss()

    def gradient(weights):
        named = {f"model.{name}": weight for name, weight in weights.items()}
        return torch.func.grad(lambda w: torch.func.functional_call(whole, w, (inputs, targets)))(named)

    generator = torch.Generator().manual_seed(5)
    direction = {n: torch.randn(w.shape, generator=generator, dtype=w.dtype) for n, w in weights.items()}
    _, product_ = torch.func.jvp(gradient, (weights,), (direction,))
    step = 1e-5
    above = gradient({n: w + step * direction[n] for n, w in weights.items()})
    below = gradient({n: w - step * direction[n] for n, w in weights.items()})
    for name, value in product_.items():
        wanted = (above[name] - below[name]) / (2 * step)
        assert (value - wanted).norm() < 1e-5 * wanted.norm(), name
