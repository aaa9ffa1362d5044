"""The optimizer: fused AdamW with weight decay on matrices only."""

import torch
from torch import nn

from speedproof.settings.recipe import Recipe


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over two groups: matrices, the tied embedding included, with decay; norm scales without.

    The rate is set before every update by the schedule.
    """
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, fused=True)
