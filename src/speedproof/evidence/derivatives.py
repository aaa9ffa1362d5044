"""Derivatives of the reference path in FP64, against finite differences, on a model small enough to do it whole.

Parity compares the fast path with the reference; this proves that the reference itself differentiates rightly, once
and twice, also through `torch.func.functional_call`.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from speedproof.model import loss
from speedproof.model.llama import Llama
from speedproof.settings.recipe import ModelShape

SHAPE = ModelShape(vocab_size=32, layers=2, width=16, heads=2, ffn_width=24, context_length=8)
NUMBERS = SimpleNamespace(rope_theta=10000.0, norm_eps=1e-5, init_std=0.3)
"""Weights far larger than a real model's, so that every term of the curvature is felt."""

BATCH = 2
SEED = 42
TOLERANCE = 1e-6
"""Relative; central differences in FP64 with a step of 1e-5 are good to about 1e-9."""
STEP = 1e-5


class Miniature:
    """The mean loss of a two-layer reference model in FP64 as a function of its parameters alone."""

    def __init__(self, shape: ModelShape = SHAPE) -> None:
        self.model = Llama(shape, NUMBERS, sdpa_backend="reference", rope="uncached")
        self.model.initialise(SEED)
        self.model.double()
        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(shape.vocab_size, (BATCH, shape.context_length + 1), generator=generator)
        self.inputs, self.targets = ids[:, :-1], ids[:, 1:].clone()
        self.targets[-1, -2:] = loss.IGNORED  # padding belongs to the function that is checked
        self.names = [name for name, _ in self.model.named_parameters()]
        self.parameters = [weight.detach().clone().requires_grad_() for weight in self.model.parameters()]

    def __call__(self, *parameters: Tensor) -> Tensor:
        """Mean loss in nats, a scalar in FP64."""
        logits = functional_call(self.model, dict(zip(self.names, parameters, strict=True)), (self.inputs,))
        return loss.nll_sum(logits, self.targets) / (self.targets != loss.IGNORED).sum()

    def gradient(self, flat: Tensor) -> Tensor:
        """Gradient at the parameters laid end to end, both (n,)."""
        parameters = [part.requires_grad_() for part in self._split(flat)]
        return torch.cat([g.flatten() for g in torch.autograd.grad(self(*parameters), parameters)])

    def hessian_product(self, flat: Tensor, direction: Tensor) -> Tensor:
        """Second derivative along `direction` by differentiating twice, (n,)."""
        parameters = [part.requires_grad_() for part in self._split(flat)]
        gradients = torch.autograd.grad(self(*parameters), parameters, create_graph=True)
        along = sum((g * d).sum() for g, d in zip(gradients, self._split(direction), strict=True))
        return torch.cat([h.flatten() for h in torch.autograd.grad(along, parameters)])

    def flat(self) -> Tensor:
        """The parameters laid end to end, (n,)."""
        return torch.cat([weight.detach().flatten() for weight in self.parameters])

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([weight.numel() for weight in self.parameters])
        return [part.reshape(w.shape).clone() for part, w in zip(parts, self.parameters, strict=True)]


def check_derivatives(miniature: Miniature | None = None, directions: int = 3) -> dict[str, Any]:
    """First and second derivatives and Hessian-vector products: `holds`, and each check with its error.

    The first two are PyTorch's checks in fast mode (a random projection of the whole Jacobian); Hessian-vector
    products are compared along `directions` random directions, ‖product − difference‖ / ‖difference‖.
    """
    miniature = miniature or Miniature()
    checks = [
        _torch_check("gradcheck", gradcheck, miniature),
        _torch_check("gradgradcheck", gradgradcheck, miniature),
        _hessian_check(miniature, directions),
    ]
    return {
        "holds": all(check["holds"] for check in checks),
        "checks": checks,
        "precision": "fp64",
        "parameters": miniature.flat().numel(),
        "model": miniature.model.shape.plain(),
        "torch": torch.__version__,
    }


def _torch_check(name: str, check: Any, miniature: Miniature) -> dict[str, Any]:
    torch.manual_seed(SEED)
    try:
        check(miniature, miniature.parameters, eps=STEP, atol=TOLERANCE, rtol=TOLERANCE, fast_mode=True)
        reason = "agrees with finite differences"
    except GradcheckError as error:
        reason = " ".join(str(error).split())[:300]
        return {"name": name, "holds": False, "reason": reason, "tolerance": TOLERANCE, "relative_error": None}
    return {"name": name, "holds": True, "reason": reason, "tolerance": TOLERANCE, "relative_error": None}


def _hessian_check(miniature: Miniature, directions: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(SEED)
    flat = miniature.flat()
    worst = 0.0
    for _ in range(directions):
        direction = torch.randn(flat.shape, generator=generator, dtype=flat.dtype)
        direction /= direction.norm()
        step = STEP * flat.norm()
        ahead, behind = miniature.gradient(flat + step * direction), miniature.gradient(flat - step * direction)
        difference = (ahead - behind) / (2 * step)
        product = miniature.hessian_product(flat, direction)
        worst = max(worst, ((product - difference).norm() / difference.norm()).item())
    holds = worst <= TOLERANCE
    reason = f"largest relative error {worst:.1e} along {directions} random directions"
    return {
        "name": "hessian_vector_product",
        "holds": holds,
        "reason": reason,
        "tolerance": TOLERANCE,
        "relative_error": worst,
    }
