"""Rotary position embedding, with its tables cached outside the compiled graph or its angles computed each time."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

Rope = Literal["cached", "uncached"]


def tables(
    length: int, head_size: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position · theta^(−2i / head_size), each (length, 1, head_size / 2), computed in `dtype`.

    Source: Su et al., RoFormer (2021), equation 15.
    """
    exponents = torch.arange(0, head_size, 2, device=device, dtype=dtype) / head_size
    angles = torch.arange(length, device=device, dtype=dtype)[:, None, None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, T, H, D) by its positions' angles; the halves of D are the pairs, as in Llama's checkpoints.

    It is computed in the tables' precision and returned in that of `x`.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class UncachedRope(nn.Module):
    """Computes the angles at every call, in every layer, for queries and for keys: the plain path."""

    def __init__(self, context_length: int, head_size: int, theta: float):
        super().__init__()
        self.head_size, self.theta = head_size, theta

    def forward(self, x: Tensor) -> Tensor:
        """Rotate x (B, T, H, D), with angles in FP32, or in FP64 where x is."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return rotate(x, *tables(x.shape[1], self.head_size, self.theta, x.device, dtype))


class CachedRope(nn.Module):
    """Reads the tables from buffers, so that a compiled graph holds no trigonometry: the fast path.

    The buffers are no part of a checkpoint. They are FP32 whatever the model is cast to (FP64 in an FP64 model), and
    are computed anew whenever the model is moved or cast, since a cast table would keep the coarser angles.
    """

    def __init__(self, context_length: int, head_size: int, theta: float):
        super().__init__()
        self.context_length, self.head_size, self.theta = context_length, head_size, theta
        # On the default device, so that a model made on the meta device gets its tables when it is materialised.
        empty = torch.empty(0)
        self._build(empty.device, torch.float32)

    def _build(self, device: torch.device, dtype: torch.dtype) -> None:
        cos, sin = tables(self.context_length, self.head_size, self.theta, device, dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Always, not only on a change: `to_empty` leaves the buffers of the same device without content.
        super()._apply(fn, recurse)
        self._build(self.cos.device, torch.promote_types(self.cos.dtype, torch.float32))
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Rotate x (B, T, H, D); T may be shorter than the context."""
        length = x.shape[1]
        return rotate(x, self.cos[:length], self.sin[:length])


ROPES: dict[Rope, type[nn.Module]] = {"cached": CachedRope, "uncached": UncachedRope}
