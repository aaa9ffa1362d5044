"""Model FLOPs utilisation: what a rate is of the device's dense BF16 peak."""

from typing import Any

from speedproof.settings.recipe import Recipe

PEAK_BF16_FLOPS: dict[str, float] = {
    "NVIDIA A10": 125e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA GH200 120GB": 989e12,
    "NVIDIA GH200 144G HBM3e": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}
"""Dense BF16 with FP32 accumulation, without sparsity, by the exact name that the driver gives (NVIDIA's data sheets).

A name that is not here has no utilisation: a relative of a listed device may have another peak.
"""


class ImpossibleRate(ValueError):
    """A rate above the device's peak: the clock or the count of FLOPs is wrong."""


def mfu(recipe: Recipe, targets_per_s: float | None, gpu: str | None) -> dict[str, Any]:
    """`{"mfu": share of the peak or None, "mfu_reason": why it is None}` with causal attention counted.

    Raises: ImpossibleRate above 100 %.
    """
    peak = PEAK_BF16_FLOPS.get(gpu or "")
    if targets_per_s is None:
        reason = "no rate"
    elif gpu is None:
        reason = "no peak is known for a CPU"
    elif peak is None:
        reason = f"no peak is known for {gpu!r}"
    elif recipe.precision == "fp32":
        reason = "the recipe runs in FP32, the peak is BF16's"
    else:
        share = recipe.model.training_flops_per_target * targets_per_s / peak
        if share > 1:
            raise ImpossibleRate(f"{targets_per_s:,.0f} targets/s would be {share:.0%} of the peak of {gpu}")
        return {"mfu": share, "mfu_reason": None}
    return {"mfu": None, "mfu_reason": reason}
