"""Validation loss: one sum over one count, whatever the batch."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from speedproof.core.errors import UserError
from speedproof.core.progress import Progress
from speedproof.data.loader import Tokens, to_device, validation_batches
from speedproof.model.llama import Llama
from speedproof.settings.execution import Execution
from speedproof.settings.recipe import Recipe
from speedproof.training.compile import CompiledLoss, compile_errors
from speedproof.training.precision import autocast

REFERENCE_BATCH = 1
"""Blocks of a validation pass of the reference, whose explicit attention holds T × T scores a head."""


@dataclass(frozen=True)
class Evaluation:
    """Loss in nats a target, the sum and count behind it, and the seconds it took."""

    loss: float
    nll_sum: float
    targets: int
    seconds: float


@torch.no_grad()
def evaluate(
    model: Llama,
    tokens: Tokens,
    recipe: Recipe,
    execution: Execution | None,
    device: torch.device | str,
    blocks: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Loss of `tokens` in their original order, or of some of their `blocks`.

    Sums stay on the device, in FP64, and are read once at the end. With execution.evaluation_compile the last, shorter
    batch is padded and masked, so that one shape is compiled. Without an execution the model is the reference and runs
    as it is, without autocast.
    Raises: UserError when the loss is not finite; CompileError.
    """
    device = torch.device(device)
    batch = execution.evaluation_batch if execution else REFERENCE_BATCH
    compiled = execution is not None and execution.evaluation_compile
    loss = CompiledLoss(model, "default") if compiled else model.nll_sum
    total, targets = torch.zeros((), dtype=torch.float64, device=device), 0
    begin = time.perf_counter()
    for rows, valid in validation_batches(tokens, recipe.model.context_length, batch, blocks):
        targets += int(valid.sum())
        if compiled and len(rows) < batch:
            missing = batch - len(rows)
            rows, valid = np.pad(rows, ((0, missing), (0, 0))), np.pad(valid, (0, missing))
        inputs, labels = to_device(rows, valid, device)
        with compile_errors(), autocast(recipe, device) if execution else torch.no_grad():
            total += loss(inputs, labels)
        if progress is not None:
            progress.update(targets)
    nll_sum = total.item()  # the host sync of a validation
    seconds = time.perf_counter() - begin
    if not math.isfinite(nll_sum):
        raise UserError("validation: the loss is not finite; lower recipe.lr or set recipe.precision to fp32")
    return Evaluation(nll_sum / targets, nll_sum, targets, seconds)
