"""The learning rate as a function of the targets seen, so that it does not depend on how updates are cut."""

import math

from speedproof.settings.recipe import Recipe


def learning_rate(recipe: Recipe, targets_seen: int) -> float:
    """Rate of the update after which `targets_seen` targets have been seen, its own included.

    It rises linearly over the first recipe.warmup_fraction of the budget, from one update's share and not from zero,
    and then falls by a cosine to lr · final_lr_fraction, which the last update has.
    """
    warmup = recipe.warmup_fraction * recipe.total_targets
    if targets_seen < warmup:
        return recipe.lr * targets_seen / warmup
    done = min(1.0, (targets_seen - warmup) / max(recipe.total_targets - warmup, 1))
    low = recipe.final_lr_fraction
    return recipe.lr * (low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * done)))
