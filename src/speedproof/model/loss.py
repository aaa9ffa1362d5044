"""The training loss: a sum over targets, so that unequal batches can be put together without weights.

`plain` makes all logits at once. `Chunked` makes them some targets at a time, and their gradient with them, so that
no more than a chunk of either is ever held. `OnePass` is `Chunked` with a kernel of its own between the products.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedproof.core.errors import UserError
from speedproof.settings.execution import Loss

IGNORED = -100
"""A target that does not count: the padding of a split's last block."""

CHUNK = {"cpu": 256, "cuda": 4096}
"""Targets of a chunk by device. Logits of 256 targets and 32,000 entries, 31 MiB in FP32, are the largest that the
system's allocator still keeps. On a GPU with 50 MB of L2, chunks of 512 targets would stay in it and save the five
passes over their logits, 67 ns a target at 4.8 TB/s; but each chunk reads and writes the head's FP32 gradient, 123 MB
with its product at width 320, which is 50 ns a target at 512 and 6 at 4,096, and launches ten kernels."""


def nll_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of −ln p(target), in nats, over the targets that count; a scalar in FP32 (FP64 for FP64 logits).

    logits (B, T, V), targets (B, T) int64 with `IGNORED` where a target does not count.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def plain(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """`nll_sum` of the logits hidden · headᵀ; hidden (B, T, d), head (V, d), targets (B, T)."""
    return nll_sum(F.linear(hidden, head), targets)


class Chunked:
    """`plain` in chunks: the forward pass computes both gradients, the backward pass scales them.

    The gradient of the head is summed in FP32 over the chunks. Chunks and sums lie in buffers that are used again, so
    a second forward pass before the backward pass makes the latter fail. Differentiable once.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, hidden: Tensor, head: Tensor, targets: Tensor, *, compiled: bool = False) -> Tensor:
        """As `plain`; `compiled`: what lies between the matrix products is one kernel of the compiler."""
        if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
            return _Gradient.apply(hidden, head, targets, self, compiled)
        return self.run(hidden, head, targets, compiled)[0]

    def run(
        self, hidden: Tensor, head: Tensor, targets: Tensor, compiled: bool, gradients: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Summed loss, and with `gradients` those of hidden, in its compute dtype, and of head, in FP32."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wide = torch.promote_types(dtype, torch.float32)
        between = self._between(gradients, compiled)
        flat, matrix = hidden.flatten(0, 1).to(dtype), head.to(dtype)
        labels = targets.flatten()
        counts = labels != IGNORED
        labels = labels.clamp(min=0)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = self._buffer("hidden", flat.shape, dtype, hidden.device) if gradients else None
        grad_head = self._buffer("head", head.shape, wide, hidden.device).zero_() if gradients else None
        number = -(-len(flat) // CHUNK[device])
        size = -(-len(flat) // number)
        with torch.autocast(device, enabled=False):
            for start in range(0, len(flat), size):
                piece = slice(start, start + size)
                rows, counted = flat[piece], counts[piece, None]
                logits = self._buffer("logits", (len(rows), len(head)), dtype, hidden.device)
                torch.mm(rows, matrix.t(), out=logits)
                nll, slope = between(logits, labels[piece])
                total += (nll * counted).sum()
                if gradients:
                    # What does not count is taken out on the narrow side of the products.
                    torch.mm(slope, matrix, out=grad_hidden[piece]).mul_(counted)
                    if dtype == wide:
                        grad_head.addmm_(slope.t(), rows * counted)
                    else:
                        grad_head += slope.t() @ (rows * counted)
        return total, grad_hidden, grad_head

    def _between(self, gradients: bool, compiled: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]:
        """What makes of a chunk's logits and labels each −ln p, and with `gradients` the slopes."""
        function = _slope if gradients else _nll
        if not compiled:
            return function
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, dynamic=False, fullgraph=True)
        return self._compiled[function]

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        # One for each shape, for good: a captured graph goes on writing to the one that it was captured with.
        key = name, tuple(shape), dtype, device
        if key not in self._buffers:
            self._buffers[key] = torch.empty(shape, dtype=dtype, device=device)
        return self._buffers[key]


class OnePass(Chunked):
    """`Chunked` whose logits are read once and become their own gradient in place; softmax in FP32.

    There is nothing to compile between its products. Raises: UserError where triton is missing.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            from speedproof.model.cross_entropy import cross_entropy
        except ImportError as error:
            raise UserError(
                f"execution.loss: 'triton' needs the package triton, which torch's CUDA builds bring ({error}); "
                "install it or use chunked"
            ) from None
        self._kernel = cross_entropy

    def _between(self, gradients: bool, compiled: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]:
        return lambda logits, labels: (self._kernel(logits, labels, gradients), logits if gradients else None)


LOSSES: dict[Loss, Callable[[], Callable[..., Tensor]]] = {
    "plain": lambda: plain,
    "chunked": Chunked,
    "triton": OnePass,
}


class _Gradient(torch.autograd.Function):
    """Gives autograd what `Chunked.run` has computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, chunked: Chunked, compiled: bool) -> Tensor:
        total, grad_hidden, grad_head = chunked.run(hidden, head, targets, compiled, gradients=True)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.shape, ctx.dtypes = hidden.shape, (hidden.dtype, head.dtype)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        of_hidden, of_head = ctx.dtypes
        return (grad_hidden.to(of_hidden) * scale).view(ctx.shape), (grad_head * scale).to(of_head), None, None, None


def _nll(logits: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    """−ln p of each label (n, 1), from logits (n, V)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.logsumexp(-1, keepdim=True) - wide.gather(1, labels[:, None]), None


def _slope(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """−ln p of each label (n, 1) and its gradient by the logits, (n, V) in their dtype."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    nll = -logp.gather(1, labels[:, None])
    return nll, logp.exp_().scatter_add_(1, labels[:, None], -torch.ones_like(nll)).to(logits.dtype)
