"""The rows of the GPU check in the order of their worth, and the figures that they read: one line each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """What a row reads from what its process found; `value` gives None where that does not hold it."""

    step: str
    unit: str
    value: Callable[[dict[str, Any]], float | None]
    needs_cuda: bool = False
    compared: bool = True
    """Whether a ratio to the published figure means something."""


def _kernels(record: dict[str, Any]) -> float | None:
    return (record["profile"] or {}).get("kernels_per_update") or None


def _kernel_ms(family: str | None) -> Callable[[dict[str, Any]], float | None]:
    """Milliseconds over three updates, as published; of all families for None."""

    def value(record: dict[str, Any]) -> float | None:
        if _kernels(record) is None:
            return None
        profile = record["profile"]
        return 3 * (profile["families"][family] if family else profile)["ms_per_update"]

    return value


def _peak_gib(record: dict[str, Any]) -> float | None:
    peak = (record["memory"] or {}).get("peak_bytes")
    return peak / 2**30 if peak else None


FIGURES = {
    "rate": Figure("measure", "targets/s", lambda found: found["targets_per_s"]),
    "peak": Figure("measure", "GiB", _peak_gib, needs_cuda=True),
    "kernels": Figure("measure", "kernels", _kernels, needs_cuda=True),
    "kernel time": Figure("measure", "ms", _kernel_ms(None), needs_cuda=True),
    "cross-entropy time": Figure("measure", "ms", _kernel_ms("cross-entropy"), needs_cuda=True),
    "RoPE time": Figure("measure", "ms", _kernel_ms("RoPE"), needs_cuda=True),
    "validation": Figure("validation", "targets/s", lambda found: found.get("targets_per_s")),
    "parity": Figure("parity", "error", lambda found: found.get("gradient_error"), compared=False),
    "tests": Figure("tests", "passed", lambda found: found.get("passed"), compared=False),
}
PROFILED = ("kernels", "kernel time", "cross-entropy time", "RoPE time")


@dataclass(frozen=True)
class Row:
    """A line of the table. Rows of one model and execution read from one process, run for the first of them."""

    title: str
    figure: str
    preset: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Execution settings changed from the published final one."""
    published: str | None = None
    """A row of config/published.yaml."""
    seconds: float = 45
    """What its process is expected to take on an H200; with less time left it is not begun."""


EAGER_8 = {"compile": False, "rope": "uncached", "microbatch": 8}
COMPILED_8, COMPILED_16 = ({"rope": "uncached", "microbatch": blocks} for blocks in (8, 16))
UNCACHED_32: dict[str, Any] = {"rope": "uncached"}
FINAL: dict[str, Any] = {}
CAPTURED = {
    "projections": "fused",
    "loss": "chunked",
    "optimizer": "arena",
    "finite_checks": "latched",
    "capture": "graph",
}
FAST_VALIDATION = {"evaluation_batch": 128, "evaluation_compile": True}
LADDER, KERNELS, KERNEL_MS = "update_ladder_20m.", "kernels_per_update_20m.", "kernel_ms_over_3_updates."
UNCACHED = LADDER + "compiled_with_uncached_rope_32."
CACHED = LADDER + "final_compiled_with_cached_rope_32."
VALIDATION_S = "matched_100m.final_optimized.full_validation_s"

ROWS = (
    Row("original eager 8", "rate", "20m", EAGER_8, LADDER + "original_eager_8.targets_per_s", 35),
    Row("final compiled 32", "rate", "20m", FINAL, CACHED + "targets_per_s"),
    Row("original compiled 8", "rate", "20m", COMPILED_8, LADDER + "original_compiled_8.targets_per_s"),
    Row("original compiled 16", "rate", "20m", COMPILED_16, LADDER + "original_compiled_16.targets_per_s"),
    Row("compiled 32, uncached RoPE", "rate", "20m", UNCACHED_32, UNCACHED + "targets_per_s"),
    Row("parity, fresh weights", "parity", "20m", FINAL),
    Row("full validation, eager, batch 8", "validation", "20m", FINAL, VALIDATION_S, 30),
    Row("full validation, compiled, batch 128", "validation", "20m", FAST_VALIDATION, VALIDATION_S, 40),
    Row("kernels an update, eager 8", "kernels", "20m", EAGER_8, KERNELS + "eager_mb8"),
    Row("kernels an update, compiled 8", "kernels", "20m", COMPILED_8, KERNELS + "compiled_mb8"),
    Row("kernels an update, compiled 16", "kernels", "20m", COMPILED_16, KERNELS + "compiled_mb16"),
    Row("cross-entropy, eager 8", "cross-entropy time", "20m", EAGER_8, KERNEL_MS + "cross_entropy_eager_mb8"),
    Row("cross-entropy, compiled 8", "cross-entropy time", "20m", COMPILED_8, KERNEL_MS + "cross_entropy_compiled_mb8"),
    Row("RoPE, compiled 32, uncached", "RoPE time", "20m", UNCACHED_32, KERNEL_MS + "rope_trig_compiled_mb32"),
    Row("all kernels, compiled 32, uncached", "kernel time", "20m", UNCACHED_32, KERNEL_MS + "all_uncached_rope_mb32"),
    Row("all kernels, compiled 32, cached", "kernel time", "20m", FINAL, KERNEL_MS + "all_cached_rope_mb32"),
    Row("peak, original eager 8", "peak", "20m", EAGER_8, LADDER + "original_eager_8.peak_gib"),
    Row("peak, original compiled 8", "peak", "20m", COMPILED_8, LADDER + "original_compiled_8.peak_gib"),
    Row("peak, original compiled 16", "peak", "20m", COMPILED_16, LADDER + "original_compiled_16.peak_gib"),
    Row("peak, compiled 32, uncached RoPE", "peak", "20m", UNCACHED_32, UNCACHED + "peak_gib"),
    Row("peak, final compiled 32", "peak", "20m", FINAL, CACHED + "peak_gib"),
    Row("final compiled 32", "rate", "50m", FINAL, "larger_models.50m.final_compiled", 55),
    Row("peak, final compiled 32", "peak", "50m", FINAL, "larger_models.50m.compiled_peak_gib", 55),
    Row("final compiled 32", "rate", "90m", FINAL, "larger_models.90m.final_compiled", 65),
    Row("peak, final compiled 32", "peak", "90m", FINAL, "larger_models.90m.compiled_peak_gib", 65),
    Row("CUDA tests, without max-autotune", "tests", "all", FINAL, "tests.gh200.passed", 60),
    Row("parity, fresh weights", "parity", "50m", FINAL, "parity.50m_fresh.relative_gradient_error", 40),
    Row("parity, fresh weights", "parity", "90m", FINAL, "parity.90m_fresh.relative_gradient_error", 45),
    # What the published final execution did not have, against its rate.
    Row("all of it, captured", "rate", "20m", CAPTURED, CACHED + "targets_per_s", 60),
    Row("final with fused projections", "rate", "20m", {"projections": "fused"}, CACHED + "targets_per_s"),
    Row("final with chunked loss", "rate", "20m", {"loss": "chunked"}, CACHED + "targets_per_s"),
    Row("final with one-pass loss", "rate", "20m", {"loss": "triton"}, CACHED + "targets_per_s"),
    Row("all, captured, one-pass loss", "rate", "20m", CAPTURED | {"loss": "triton"}, CACHED + "targets_per_s", 60),
    Row("final with an arena", "rate", "20m", {"optimizer": "arena"}, CACHED + "targets_per_s"),
)
