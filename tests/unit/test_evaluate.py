import math

import numpy as np
import pytest
import torch

from speedproof.core.errors import UserError
from speedproof.data.token_cache import TokenCache
from speedproof.model.llama import build
from speedproof.model.loss import LOSSES
from speedproof.training import evaluate as module
from speedproof.training.evaluate import evaluate

CONTEXT, COUNT = 16, 16 * 7 + 6  # seven whole blocks and one of five targets


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return TokenCache.synthetic(tmp_path_factory.mktemp("cache"), 61, 400, COUNT, seed=0).validation


@pytest.fixture
def model(miniature_recipe, miniature_execution):
    return build(miniature_recipe(init_std=0.3), miniature_execution(), "cpu")


def by_hand(model, tokens, blocks=range(8)) -> list[float]:
    """Summed loss of each block, one at a time, in FP64."""
    ids = torch.from_numpy(tokens.read(0, COUNT).astype(np.int64))
    sums = []
    for block in blocks:
        part = ids[block * CONTEXT : block * CONTEXT + CONTEXT + 1][None]
        sums.append(model.nll_sum(part[:, :-1], part[:, 1:]).item())
    return sums


@pytest.mark.parametrize("loss", ["plain", "chunked"])
@pytest.mark.parametrize("batch", [1, 3, 7, 20])
def test_it_is_one_sum_over_one_count(batch, loss, model, tokens, miniature_recipe, miniature_execution):
    model.loss = LOSSES[loss]()
    found = evaluate(model, tokens, miniature_recipe(), miniature_execution(evaluation_batch=batch), "cpu")
    wanted = sum(by_hand(model, tokens))
    assert found.targets == COUNT - 1
    assert found.nll_sum == pytest.approx(wanted, rel=1e-6)
    assert found.loss == pytest.approx(wanted / (COUNT - 1), rel=1e-6)
    means = [s / n for s, n in zip(by_hand(model, tokens), [CONTEXT] * 7 + [5], strict=True)]
    assert found.loss != pytest.approx(sum(means) / 8, rel=1e-4), "a mean of means would pass unseen"


def test_unequal_batches_are_put_together_by_their_targets(miniature_recipe, miniature_execution, monkeypatch):
    """Sums and counts of (2, 1) and (90, 9) make 9.2, not the 6.0 of their means."""
    batches = [(np.zeros((1, 17), np.uint16), np.array([1])), (np.zeros((1, 17), np.uint16), np.array([9]))]
    monkeypatch.setattr(module, "validation_batches", lambda *a: iter(batches))

    class Fixed:
        def nll_sum(self, inputs, targets):
            return torch.tensor({1: 2.0, 9: 90.0}[int((targets != -100).sum())])

    assert evaluate(Fixed(), None, miniature_recipe(), miniature_execution(), "cpu").loss == pytest.approx(9.2)


def test_a_subset_is_its_blocks(model, tokens, miniature_recipe, miniature_execution):
    found = evaluate(model, tokens, miniature_recipe(), miniature_execution(), "cpu", blocks=[1, 2, 5, 6])
    assert found.targets == 4 * CONTEXT
    assert found.nll_sum == pytest.approx(sum(by_hand(model, tokens, [1, 2, 5, 6])), rel=1e-6)


def test_the_reference_runs_as_it_is(tokens, miniature_recipe):
    recipe = miniature_recipe(precision="bf16")
    model = build(recipe, None, "cpu").double()
    found = evaluate(model, tokens, recipe, None, "cpu")
    assert found.nll_sum == pytest.approx(sum(by_hand(model, tokens)), rel=1e-12)


def test_bf16_is_near(model, tokens, miniature_recipe, miniature_execution):
    exact = evaluate(model, tokens, miniature_recipe(), miniature_execution(), "cpu")
    rounded = evaluate(model, tokens, miniature_recipe(precision="bf16"), miniature_execution(), "cpu")
    assert rounded.loss != exact.loss
    assert rounded.loss == pytest.approx(exact.loss, abs=0.02)


def test_it_leaves_weights_and_gradients_alone(model, tokens, miniature_recipe, miniature_execution):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    evaluate(model, tokens, miniature_recipe(), miniature_execution(), "cpu")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_progress_is_in_targets(model, tokens, miniature_recipe, miniature_execution):
    class Bar:
        seen: list[float] = []  # noqa: RUF012

        def update(self, done, note=""):
            self.seen.append(done)

    evaluate(model, tokens, miniature_recipe(), miniature_execution(evaluation_batch=3), "cpu", progress=Bar())
    assert Bar.seen == [48, 96, COUNT - 1]


def test_a_loss_that_is_not_finite_is_said(model, tokens, miniature_recipe, miniature_execution):
    with torch.no_grad():
        model.norm.weight.fill_(math.inf)
    with pytest.raises(UserError, match="validation: the loss is not finite"):
        evaluate(model, tokens, miniature_recipe(), miniature_execution(), "cpu")
