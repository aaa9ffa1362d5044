"""Precision of a run: resolved once from the hardware, then part of the recipe, so that no two arms differ in it."""

import platform
from pathlib import Path

import torch

from speedproof.core.errors import UserError
from speedproof.settings.recipe import Recipe


def _cpu_flags() -> set[str]:
    """Feature words of the CPU, as Linux lists them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next(
        (set(line.split(":")[1].split()) for line in lines if line.lower().startswith(("flags", "features"))), set()
    )


def bf16_support(device: torch.device | str) -> tuple[bool, str]:
    """Whether `device` multiplies BF16 matrices in hardware, and by what, or why not.

    Raises: UserError when the device is CUDA and there is none.
    """
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("execution.device: found 'cuda', but PyTorch sees no CUDA device here; use cpu")
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        version = ".".join(map(str, capability))
        has = capability >= (8, 0)
        return has, f"{name} has compute capability {version}, {'8.0 or above' if has else 'below 8.0'}"
    found = sorted(_cpu_flags() & {"amx_bf16", "avx512_bf16", "bf16", "svebf16"})
    if found and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return True, f"the CPU has {', '.join(found)}"
    return False, f"this {platform.machine()} CPU has no BF16 matrix instructions that PyTorch uses"


def resolve_precision(recipe: Recipe, device: torch.device | str) -> tuple[Recipe, str]:
    """The recipe with `precision` auto replaced by what the hardware has, and the reason in words."""
    if recipe.precision != "auto":
        return recipe, f"{recipe.precision}: set in the recipe"
    has, reason = bf16_support(device)
    precision = "bf16" if has else "fp32"
    return Recipe.parse(recipe.plain() | {"precision": precision}, "recipe"), f"{precision}: {reason}"


def require_resolved(recipe: Recipe) -> None:
    """Raise UserError when the precision is still auto."""
    if recipe.precision == "auto":
        raise UserError("recipe.precision: found 'auto' where it must be decided; use bf16 or fp32")


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Context of a forward pass: BF16 autocast over FP32 weights, or nothing at all for FP32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16")


def compute_dtype(recipe: Recipe) -> torch.dtype:
    """Dtype of the matrix products."""
    return torch.bfloat16 if recipe.precision == "bf16" else torch.float32
