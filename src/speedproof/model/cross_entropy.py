"""Cross-entropy of rows of logits in one pass, as a Triton kernel: a row is read once and stays on the chip.

Importing this needs triton, which comes with torch's CUDA builds. Without a GPU the kernel runs in Triton's
interpreter alone, with TRITON_INTERPRET=1 set before anything imports triton. Its plain twins are in loss.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 65_536
"""Logits of a row that a program holds, 64 in FP32 a thread; a recipe's vocabulary has no more."""


@triton.jit
def _cross_entropy_row(logits, labels, nll, entries, BLOCK: tl.constexpr, SLOPE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < entries
    places = logits + row * entries + columns
    label = tl.load(labels + row)
    x = tl.load(places, mask=inside, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    # The label's logit is taken from the row held: in memory the gradient may have replaced it already.
    of_label = tl.sum(tl.where(columns == label, x, 0.0), axis=0)
    powers = tl.exp(x - top)
    total = tl.sum(powers, axis=0)
    tl.store(nll + row, top + tl.log(total) - of_label)
    if SLOPE:
        slope = powers * (1.0 / total) - tl.where(columns == label, 1.0, 0.0)
        tl.store(places, slope.to(logits.dtype.element_ty), mask=inside)


def cross_entropy(logits: Tensor, labels: Tensor, slope: bool) -> Tensor:
    """−ln p of each label (n, 1) in FP32, from logits (n, V) and labels (n,) of 0 … V − 1.

    With `slope` the logits are replaced by its gradient by them, in their dtype; without, they are left as they are.
    Raises: ValueError where V is above `LARGEST`.
    """
    rows, entries = logits.shape
    block = triton.next_power_of_2(entries)
    if block > LARGEST or not logits.is_contiguous():
        raise ValueError(f"logits: found {rows} × {entries}; rows of at most {LARGEST}, one after the other, are taken")
    nll = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    warps = min(32, max(4, block // 1024))  # 32 logits a thread, so that a row of 32,000 fits its registers
    _cross_entropy_row[(rows,)](logits, labels, nll, entries, BLOCK=block, SLOPE=slope, num_warps=warps)
    return nll
