import math

import pytest

from speedproof.training.schedule import learning_rate


@pytest.fixture
def recipe(miniature_recipe):
    return miniature_recipe(budget_targets=16_000, warmup_fraction=0.25, lr=0.5, final_lr_fraction=0.1)


def test_it_rises_over_the_warm_up(recipe):
    assert recipe.total_targets == 16_000
    assert learning_rate(recipe, 64) == pytest.approx(0.5 * 64 / 4000)
    assert learning_rate(recipe, 2000) == pytest.approx(0.25)
    assert learning_rate(recipe, 4000) == pytest.approx(0.5)


def test_it_falls_by_a_cosine_to_the_final_fraction(recipe):
    assert learning_rate(recipe, 10_000) == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))
    assert learning_rate(recipe, 7000) == pytest.approx(0.5 * (0.1 + 0.45 * (1 + math.cos(math.pi / 4))))
    assert learning_rate(recipe, 16_000) == pytest.approx(0.05)
    rates = [learning_rate(recipe, targets) for targets in range(4000, 16_001, 500)]
    assert rates == sorted(rates, reverse=True)


def test_a_budget_that_is_no_whole_number_of_blocks_ends_at_the_final_rate(miniature_recipe):
    recipe = miniature_recipe(budget_targets=16_001, lr=0.5, final_lr_fraction=0.0)
    assert recipe.total_targets == 16_016
    assert learning_rate(recipe, recipe.total_targets) == pytest.approx(0.0, abs=1e-15)


def test_without_a_warm_up_it_starts_near_the_peak(miniature_recipe):
    recipe = miniature_recipe(warmup_fraction=0.0, lr=0.5)
    assert learning_rate(recipe, 0) == 0.5
    assert 0.49 < learning_rate(recipe, 64) < 0.5
