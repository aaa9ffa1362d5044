"""A profile of a few updates: Chrome trace, operator table, kernels an update, kernel time by family."""

import csv
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

from speedproof.core import files

FAMILIES = ("matmul", "attention", "cross-entropy", "RoPE", "norm", "optimizer", "copy", "other")

MAX_TRACE_BYTES = 32 * 2**20
"""A compressed trace above this is not kept; the tables are."""

TRACE_FILE = "trace.json.gz"
OPERATORS_FILE = "operators.csv"
LISTED = 30

PREPARATION = {"triton", "poi", "per", "red", "fused", "to", "copy", "clone", "view", "unsafe", "transpose", "permute"}


def family(name: str) -> str:
    """The family of a GPU kernel, of an `aten::` operator, or of a fused Triton kernel named by what it fuses.

    Softmax outside attention is the cross-entropy, `cat` is RoPE's joining of its halves (there is no other), powers
    and reciprocal roots are RMSNorm's, and gradient norm, clipping and finite checks belong to the optimizer.
    """
    low = name.lower()
    words = set(re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
    triton = low.startswith("triton_")
    if words & {"softmax", "logsumexp"} and words & {"log", "nll", "logsumexp"}:
        return "cross-entropy"
    if words & {"nll", "logsumexp"} or "cross_entropy" in low or re.search(r"cunn_softmax|log_?softmax", low):
        return "cross-entropy"
    if triton and "tem" in words:
        return "attention" if "attention" in words or "flex" in words else "matmul"
    if words & {"cos", "sin", "rotary", "rope", "cat"} or "catarray" in low:
        return "RoPE"
    if re.search(r"flash|fmha|scaled_dot_product|attention|sdpa|cudnn_generated", low):
        return "attention"
    if not triton and (
        re.search(r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitk|mkl_linear|mkldnn_linear|linear_pointwise", low)
        or words & {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "dot"}
    ):
        return "matmul"
    if re.search(r"adam|multi_tensor|foreach|lpnorm|norm_?two|vector_norm|isfinite|clip_grad|total_norm", low):
        return "optimizer"
    if words & {"rsqrt", "pow", "rms", "rmsnorm", "layernorm", "mean"} or "meanops" in low:
        return "norm"
    if triton:
        return "copy" if {word for word in words if not word.isdigit()} <= PREPARATION | {"t", ""} else "other"
    if re.search(r"memcpy|memset|copy|contiguous|clone", low):
        return "copy"
    return "other"


def profile(updater: Any, batches: Any, updates: int, folder: Path) -> dict[str, Any]:
    """Trace `updates` updates into `folder`; returns what the record keeps.

    On CUDA the families sum kernel time; on CPU they sum the operators' own time, and what a compiled graph fuses
    shows as `other` where the compiler gives its kernels no names.
    """
    import torch

    cuda = updater.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as traced:
        for _ in range(updates):
            updater.step(batches.take(updater.recipe.blocks_per_update))
    raw = folder / "trace.json"
    traced.export_chrome_trace(str(raw))
    averages = traced.key_averages()
    _write_operators(folder / OPERATORS_FILE, averages)
    if cuda:
        spans = kernel_spans(json.loads(raw.read_text(encoding="utf-8"))["traceEvents"])
    else:
        spans = {
            row.key: (row.count, row.self_cpu_time_total)
            for row in averages
            if row.self_cpu_time_total and not row.key.startswith(("ProfilerStep", "Optimizer."))
        }
    return {
        "updates": updates,
        "kind": "kernels" if cuda else "operators",
        "kernels_per_update": sum(c for n, (c, _) in spans.items() if not _transfer(n)) / updates if cuda else None,
        "reason": None if cuda else "there are no GPU kernels on CPU; families are by operator",
        **by_family(spans, updates),
        "trace": _compress(raw, folder / TRACE_FILE),
    }


def kernel_spans(events: list[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """Count and microseconds of each kernel, copy and fill on the GPU, from the events of a Chrome trace."""
    spans: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            count, time_us = spans.get(event["name"], (0, 0.0))
            spans[event["name"]] = (count + 1, time_us + event.get("dur", 0.0))
    return spans


def by_family(spans: dict[str, tuple[int, float]], updates: int) -> dict[str, Any]:
    """Milliseconds and calls an update by family, and the names that took longest."""
    families = {name: {"ms_per_update": 0.0, "calls_per_update": 0.0} for name in FAMILIES}
    for name, (count, time_us) in spans.items():
        row = families[family(name)]
        row["ms_per_update"] += time_us / 1000 / updates
        row["calls_per_update"] += count / updates
    longest = sorted(spans.items(), key=lambda item: -item[1][1])[:LISTED]
    return {
        "ms_per_update": sum(row["ms_per_update"] for row in families.values()),
        "families": families,
        "longest": [
            {
                "name": name[:200],
                "family": family(name),
                "ms_per_update": time_us / 1000 / updates,
                "calls_per_update": count / updates,
            }
            for name, (count, time_us) in longest
        ],
    }


def _transfer(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset"))


def _write_operators(path: Path, averages: Any) -> None:
    rows = sorted(averages, key=lambda row: -(row.self_device_time_total or row.self_cpu_time_total))
    with files.atomic(path, "w") as stream:
        table = csv.writer(stream)
        table.writerow(["operator", "family", "calls", "self_cpu_us", "self_device_us"])
        for row in rows:
            table.writerow([row.key, family(row.key), row.count, row.self_cpu_time_total, row.self_device_time_total])


def _compress(raw: Path, target: Path) -> dict[str, Any]:
    with open(raw, "rb") as plain, gzip.GzipFile(target, "wb", compresslevel=6, mtime=0) as packed:
        shutil.copyfileobj(plain, packed)
    raw.unlink()
    size = target.stat().st_size
    if size > MAX_TRACE_BYTES:
        target.unlink()
        return {"file": None, "reason": f"{size:,} bytes, above the cap of {MAX_TRACE_BYTES:,}"}
    return {"file": TRACE_FILE, "bytes": size, "reason": None}
