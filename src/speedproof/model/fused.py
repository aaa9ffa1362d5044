"""Projections of one input stored as one matrix, and the canonical names by which its parts are known all the same."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedLinear(nn.Module):
    """Projections of one input in one product; their matrices lie one below the other in `weight`.

    As `blocks.0.attention.qkv` with rows q, k, v it is `blocks.0.attention.q.weight` and so on in a state dict.
    """

    def __init__(self, width: int, **rows: int):
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.empty(sum(rows.values()), width))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Each projection of x (…, width), (…, its rows)."""
        return F.linear(x, self.weight).split(tuple(self.rows.values()), dim=-1)


def canonical_state(model: nn.Module) -> None:
    """Have the state dict of `model` know its weights by canonical names, whatever is fused."""
    model.register_state_dict_post_hook(_part)
    model.register_load_state_dict_pre_hook(_join)


def by_name(model: nn.Module, of: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Tensor]:
    """By canonical name every weight of `model`, or what `of` gives for its parameter (its gradient, a moment).

    Parts of a fused weight are views of it, so that they can be written to.
    """
    fused, found = _fused(model), {}
    for name, weight in model.named_parameters():
        value = of(weight)
        if name in fused:
            found |= {part: value.narrow(0, start, rows) for part, start, rows in fused[name]}
        else:
            found[name] = value
    return found


def _fused(model: nn.Module) -> dict[str, list[tuple[str, int, int]]]:
    """By name of a fused parameter its parts: canonical name, first row, rows."""
    found = {}
    for place, module in model.named_modules():
        if isinstance(module, FusedLinear):
            above = place.rpartition(".")[0]
            ends = itertools.accumulate(module.rows.values())
            parts = zip(module.rows.items(), ends, strict=True)
            found[f"{place}.weight"] = [(f"{above}.{name}.weight", end - rows, rows) for (name, rows), end in parts]
    return found


def _part(model: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    """Put the canonical weights in the places of the fused ones."""
    fused = {prefix + name: parts for name, parts in _fused(model).items()}
    whole = list(state.items())
    state.clear()
    for key, value in whole:
        if key in fused:
            state.update({prefix + part: value.narrow(0, start, rows) for part, start, rows in fused[key]})
        else:
            state[key] = value


def _join(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Put fused weights in the places of the canonical ones; what does not fit stays, and loading then names it."""
    for name, parts in _fused(model).items():
        width = model.get_parameter(name).shape[1]
        keys = [prefix + part for part, _, _ in parts]
        shapes = [state[key].shape if key in state else None for key in keys]
        if shapes == [(rows, width) for _, _, rows in parts]:
            state[prefix + name] = torch.cat([state.pop(key) for key in keys])
