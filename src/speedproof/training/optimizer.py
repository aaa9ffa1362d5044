"""Fused AdamW with weight decay on matrices only, over the weights as they lie or over one arena of them all."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from speedproof.settings.execution import Optimizer
from speedproof.settings.recipe import Recipe

MOMENTS = ("exp_avg", "exp_avg_sq")

ALIGNMENT = 64
"""Elements at whose multiples a weight begins in the arena: 256 bytes, which every vectorised kernel accepts."""

ROW = 4096
"""Elements whose squares are summed in one go: on a CPU, one sum over 20 million in FP32 is wrong by 0.1 %."""


def adamw(matrices: Sequence[Tensor], scales: Sequence[Tensor], recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over two groups: matrices, the tied embedding included, with decay; norm scales without.

    The rate is set before every update by the schedule.
    """
    groups = [
        {"params": list(matrices), "weight_decay": recipe.weight_decay},
        {"params": list(scales), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, fused=True)


class Fused:
    """Weights, gradients and moments each as a tensor of its own: the plain path.

    `keep`: gradients are zeroed and not dropped, for a backward pass that must find them where they were.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, keep: bool = False):
        self.weights, self.limit, self._keep = list(model.parameters()), recipe.grad_clip, keep
        matrices, scales = _two_kinds(self.weights)
        self.adamw = adamw(matrices, scales, recipe)
        if keep:
            for weight in self.weights:
                weight.grad = torch.zeros_like(weight)

    def norm(self) -> Tensor:
        """Global norm of the gradients, a scalar on the device."""
        return torch.nn.utils.get_total_norm([weight.grad for weight in self.weights])

    def step(self, norm: Tensor) -> None:
        """Clip the gradients, whose global norm is given, and update weights and moments."""
        torch.nn.utils.clip_grads_with_norm_(self.weights, self.limit, norm)
        self.adamw.step()

    def clear(self) -> None:
        """Forget the gradients."""
        self.adamw.zero_grad(set_to_none=not self._keep)

    def moment(self, weight: Tensor, name: str) -> Tensor:
        """The moment `name` of a weight."""
        return self.adamw.state[weight][name]


class Arena:
    """Weights, gradients and moments in one flat buffer each, matrices first, and the model's tensors views of them.

    The backward pass adds into the arena. Then norm, clipping and AdamW are a kernel or two each, whatever the number
    of weights: AdamW divides by the clipping factor as it reads.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, keep: bool = True):
        matrices, scales = _two_kinds(model.parameters())
        weights = [*matrices, *scales]
        sizes = [-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in weights]
        ends = list(accumulate(sizes))
        cut, device = ends[len(matrices) - 1], weights[0].device
        values, self.gradients = (torch.zeros(-(-ends[-1] // ROW) * ROW, device=device) for _ in range(2))
        self.limit, self._places = recipe.grad_clip, {}
        halves = [nn.Parameter(part) for part in (values[:cut], values[cut:])]
        for half, gradient in zip(halves, (self.gradients[:cut], self.gradients[cut:]), strict=True):
            half.grad = gradient
        self.adamw = adamw(halves[:1], halves[1:], recipe)
        for weight, size, end in zip(weights, sizes, ends, strict=True):
            start = end - size
            half = int(start >= cut)
            self._places[weight] = halves[half], start - half * cut
            value = self._view(values, start, weight)
            value.copy_(weight.detach())
            weight.data, weight.grad = value, self._view(self.gradients, start, weight)

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(torch.linalg.vector_norm(self.gradients.view(-1, ROW), dim=1))

    def step(self, norm: Tensor) -> None:
        self.adamw.grad_scale = ((norm + 1e-6) / self.limit).clamp(min=1.0)
        self.adamw.step()

    def clear(self) -> None:
        self.gradients.zero_()

    def moment(self, weight: Tensor, name: str) -> Tensor:
        half, start = self._places[weight]
        return self._view(self.adamw.state[half][name], start, weight)

    @staticmethod
    def _view(flat: Tensor, start: int, weight: Tensor) -> Tensor:
        return flat[start : start + weight.numel()].view(weight.shape)


OPTIMIZERS: dict[Optimizer, Callable[..., Fused | Arena]] = {"fused": Fused, "arena": Arena}


def allocate(optimizer: torch.optim.AdamW, step: int) -> None:
    """Give the optimizer its moments, to be filled in, as after `step` updates; none at all before the first."""
    optimizer.state.clear()
    for group in optimizer.param_groups if step else ():
        for weight in group["params"]:
            moments = {moment: torch.zeros_like(weight, requires_grad=False) for moment in MOMENTS}
            optimizer.state[weight] = {"step": torch.tensor(float(step), device=weight.device)} | moments


def _two_kinds(weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices, and scales of norms."""
    found = list(weights)
    return [w for w in found if w.dim() >= 2], [w for w in found if w.dim() < 2]
