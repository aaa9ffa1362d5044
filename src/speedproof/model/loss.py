"""The training loss: a sum over targets, so that unequal batches can be put together without weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""A target that does not count: the padding of a split's last block."""


def nll_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of −ln p(target), in nats, over the targets that count; a scalar in FP32 (FP64 for FP64 logits).

    logits (B, T, V), targets (B, T) int64 with `IGNORED` where a target does not count.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
