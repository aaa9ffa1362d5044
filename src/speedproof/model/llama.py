"""A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, tied embedding, no biases, no dropout.

B is the microbatch, T the context, d the width, H the heads, D = d / H the head size, V the vocabulary.
"""

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedproof.model.attention import Backend, attention
from speedproof.model.fused import FusedLinear, by_name, canonical_state
from speedproof.model.loss import LOSSES
from speedproof.model.peers import TransformersLlama
from speedproof.model.rope import ROPES, Rope
from speedproof.settings.execution import Execution, Loss, Projections
from speedproof.settings.recipe import ModelShape, Recipe


class Numbers(Protocol):
    """The numbers of a recipe that the model needs beside its shape."""

    rope_theta: float
    norm_eps: float
    init_std: float


class RMSNorm(nn.Module):
    """x / rms(x) · weight, in FP32 under autocast. Written out, since autocast would wrap the fused one in casts."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal self-attention over H heads."""

    def __init__(self, shape: ModelShape, rope: nn.Module, backend: Backend, projections: Projections):
        super().__init__()
        d = shape.width
        self.fused = projections == "fused"
        if self.fused:
            self.qkv = FusedLinear(d, q=d, k=d, v=d)
        else:
            self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.o = nn.Linear(d, d, bias=False)
        self.heads, self.rope, self.attention = shape.heads, rope, attention(backend)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.qkv(x) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in projected)  # (B, T, H, D)
        q, k = self.rope(q), self.rope(k)
        y = self.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # (B, H, T, D)
        return self.o(y.transpose(1, 2).flatten(-2))  # (B, T, d)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, shape: ModelShape, projections: Projections):
        super().__init__()
        self.fused = projections == "fused"
        if self.fused:
            self.gate_up = FusedLinear(shape.width, gate=shape.ffn_width, up=shape.ffn_width)
        else:
            self.gate, self.up = (nn.Linear(shape.width, shape.ffn_width, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x) if self.fused else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer; the residual x stays in FP32 under autocast."""

    def __init__(self, shape: ModelShape, rope: nn.Module, backend: Backend, projections: Projections, eps: float):
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, eps)
        self.attention = Attention(shape, rope, backend, projections)
        self.ffn_norm = RMSNorm(shape.width, eps)
        self.ffn = FeedForward(shape, projections)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """The whole model. Its state-dict keys never depend on the execution."""

    def __init__(
        self,
        shape: ModelShape,
        numbers: Numbers,
        *,
        sdpa_backend: Backend = "auto",
        rope: Rope = "cached",
        projections: Projections = "separate",
        loss: Loss = "plain",
    ) -> None:
        super().__init__()
        self.shape, self.init_std = shape, numbers.init_std
        tables = ROPES[rope](shape.context_length, shape.head_size, numbers.rope_theta)  # shared by all layers
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(
            Block(shape, tables, sdpa_backend, projections, numbers.norm_eps) for _ in range(shape.layers)
        )
        self.norm = RMSNorm(shape.width, numbers.norm_eps)
        self.loss = LOSSES[loss]()
        canonical_state(self)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the weights from `seed`, in the order of their names: normal with `init_std`, and smaller by
        √(2 layers) where they write to the residual; norm scales are one."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in by_name(self).items():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                writes_residual = name.endswith((".attention.o.weight", ".ffn.down.weight"))
                std = self.init_std / math.sqrt(2 * self.shape.layers) if writes_residual else self.init_std
                weight.normal_(0.0, std, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (B, T, V) of token ids `inputs` (B, T) int64."""
        return F.linear(self.hidden(inputs), self.embedding.weight)

    def hidden(self, inputs: Tensor) -> Tensor:
        """What the head is given, (B, T, d)."""
        x = self.embedding(inputs)  # (B, T, d)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def nll_sum(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed loss in nats of `targets` (B, T) given `inputs` (B, T); see `loss.nll_sum`.

        This is what is trained and compiled; see `training.compile` for what the compiler gets of a chunked loss.
        """
        return self.loss(self.hidden(inputs), self.embedding.weight, targets)


def build(recipe: Recipe, execution: Execution | None, device: torch.device | str) -> Llama | TransformersLlama:
    """The recipe's model on `device`, its weights drawn from recipe.seed on the CPU: the same on every device.

    Without an execution it is the reference: explicit attention and uncached angles, FP32 or, after `.double()`, FP64.
    """
    if execution is not None and execution.implementation == "transformers":
        peer = TransformersLlama(recipe, sdpa_backend=execution.sdpa_backend)
        peer.load_state_dict(build(recipe, None, "cpu").state_dict())
        return peer.to(device)
    ways: dict[str, Any] = {"sdpa_backend": "reference", "rope": "uncached", "projections": "separate", "loss": "plain"}
    if execution is not None:
        ways = {way: getattr(execution, way) for way in ways}
    with torch.device("meta"):  # PyTorch's own initialisation would be thrown away
        model = Llama(recipe.model, recipe, **ways)
    model.to_empty(device="cpu").initialise(recipe.seed)
    return model.to(device)
