"""Causal attention: PyTorch's fused kernels by backend, and the explicit form that they must agree with."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from speedproof.core.errors import UserError

Backend = Literal["auto", "flash", "cudnn", "math", "reference"]

FORCED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class UnsupportedBackend(UserError):
    """A forced SDPA backend that cannot run this shape and dtype on this device."""


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √D + causal mask) v in the inputs' precision; (B, H, T, D) each. Differentiable twice."""
    length, size = q.shape[-2:]
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1)) / size**0.5  # (B, H, T, T)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v


def automatic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by whichever kernel PyTorch chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def forced(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    """The same by one kernel. Raises RuntimeError where it cannot run; see `check_backend`."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(backend: Backend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The causal attention (q, k, v) -> (B, H, T, D) of a backend."""
    if backend == "reference":
        return explicit
    return automatic if backend == "auto" else partial(forced, backend=FORCED[backend])


def check_backend(
    backend: Backend, heads: int, context_length: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Run a forced backend once, forward and backward. Raises UnsupportedBackend naming it where it cannot run.

    Asked beforehand, since inside a compiled graph the same failure looks like a fault of the compiler.
    """
    if backend not in FORCED:
        return
    if device.type == "cpu" and backend == "cudnn":
        raise UnsupportedBackend("execution.sdpa_backend: 'cudnn' does not exist on cpu; use auto, flash or math")
    q = torch.zeros(1, heads, context_length, head_size, dtype=dtype, device=device, requires_grad=True)
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            y = forced(q, q, q, FORCED[backend])
            y.backward(torch.ones_like(y))  # laid out as in training: cuDNN takes no expanded gradient as it is
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            why = _reason(backend, [str(warning.message) for warning in reasons], str(error))
            raise UnsupportedBackend(
                f"execution.sdpa_backend: {backend!r} cannot run {heads} heads of {head_size} at context "
                f"{context_length} in {str(dtype).removeprefix('torch.')} on {device} ({why}); use auto"
            ) from None


def _reason(backend: str, warned: list[str], error: str) -> str:
    """Why `backend` was refused: PyTorch warns of every backend in turn, a heading and then its reason."""
    words = [text.split("(Triggered")[0].strip() for text in warned]
    if not words or "No available kernel" not in error:
        return error.strip()
    own = (why for head, why in pairwise(words) if head.lower().startswith(backend) and head.endswith("because:"))
    return next(own, words[-1])
