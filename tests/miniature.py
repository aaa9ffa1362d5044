"""Miniatures that many tests share: a recipe and an execution, complete and small, with any key changed."""

from pathlib import Path
from typing import Any

import yaml

from speedproof.settings.execution import Execution
from speedproof.settings.recipe import Recipe
from speedproof.training.stopping import Stop

ROOT = Path(__file__).resolve().parents[1]

MODEL = {"vocab_size": 61, "layers": 1, "width": 32, "heads": 2, "ffn_width": 48, "context_length": 16}

RECIPE = {
    "preset": "miniature",
    "data": None,
    "targets_per_update": 64,
    "budget_targets": 6400,
    "virtual_epochs": 2,
    "subset_blocks": 4,
    "subset_seed": 1,
    "seed": 7,
    "precision": "fp32",
    "lr": 0.01,
    "final_lr_fraction": 0.1,
    "warmup_fraction": 0.05,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_clip": 1.0,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "init_std": 0.02,
    "shuffle_buffer_mib": 1,
}

EXECUTION = yaml.safe_load((ROOT / "config/default.yaml").read_text(encoding="utf-8"))["execution"] | {
    "cpu_threads": 1,
    "evaluation_batch": 3,
}
"""The default execution, all of it plain, on one thread."""


def recipe(model: dict[str, int] | None = None, **changed: Any) -> Recipe:
    """A miniature's recipe; keyword arguments change its keys, those of `model` the model's."""
    return Recipe.parse(RECIPE | {"model": MODEL | (model or {})} | changed, "recipe")


def execution(**changed: Any) -> Execution:
    """An execution on one CPU thread; keyword arguments change its keys."""
    return Execution.parse(EXECUTION | changed, "execution")


class StopAfter(Stop):
    """Asks to stop from the n-th question on."""

    def __init__(self, questions: int):
        super().__init__()
        self.left = questions

    def reason(self, margin_s: float) -> str | None:
        self.left -= 1
        return "told to" if self.left < 0 else None
