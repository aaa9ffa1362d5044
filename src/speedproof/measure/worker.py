"""The worker: one fresh process that measures one execution, `python -m speedproof.measure.worker REQUEST RESULT`.

Warm-up updates first, the very first timed apart since it compiles, then windows of full updates. The timing result is
on disk before anything is profiled. What goes wrong is a finding: it becomes a status with a reason.
"""

import contextlib
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.measure.isolate import die_with_parent

MEMORY_LIMIT = 0.9
"""Share of the device's memory above which an execution is too close to its end to be chosen."""


def main(request_path: Path, result_path: Path) -> None:
    """Measure what the request asks for; the result is written whole, once timed and once more when profiled."""
    die_with_parent()
    request = files.read_json(request_path)
    result: dict[str, Any] = {"status": "error", "reason": None, "windows": [], "warmup": None, "memory": None}
    try:
        updater, batches = _set_up(request, result)
        with batches:
            _time(updater, batches, request["protocol"], result)
            files.write_json(result_path, result)
            if result["status"] == "ok" and request["protocol"]["profile_updates"]:
                result["profile"] = _profile(updater, batches, request["protocol"], result_path.parent)
    except Exception as error:
        traceback.print_exc()
        result["status"], result["reason"] = status_of(error)
        result["user_error"] = result["status"] == "error" and isinstance(error, UserError)
    files.write_json(result_path, result)


def _set_up(request: dict[str, Any], result: dict[str, Any]) -> tuple[Any, Any]:
    """Updater and batches of the request."""
    import torch

    from speedproof.core.store import Store
    from speedproof.data.loader import SyntheticBatches, TrainingBatches
    from speedproof.data.resident import ResidentBatches
    from speedproof.data.token_cache import TokenCache
    from speedproof.settings.execution import Execution
    from speedproof.settings.recipe import Recipe
    from speedproof.training.precision import resolve_precision
    from speedproof.training.update import Updater

    execution = Execution.parse(request["execution"], "execution")
    recipe = Recipe.parse(request["recipe"], "recipe")
    recipe, result["precision_reason"] = resolve_precision(recipe, execution.device)
    result["precision"] = recipe.precision
    updater = Updater(recipe, execution, execution.device)
    if request["mode"] == "synthetic":
        batches: Any = DeviceBatch(SyntheticBatches(recipe, recipe.seed), updater.device)
    else:
        cache = TokenCache.open(Path(request["cache"]), Store(Path(request["store"])))
        if execution.tokens == "device":
            batches = ResidentBatches(cache.train, recipe, device=updater.device, repeat=True)
        else:
            batches = TrainingBatches(cache.train, recipe, repeat=True)
    if updater.device.type == "cuda":
        torch.cuda.synchronize()
    result["startup_s"] = process_age_s()
    return updater, batches


class DeviceBatch:
    """One synthetic batch kept on the device, so that neither loading nor transfer is measured."""

    cursor = 0  # there is no place in a single batch

    def __init__(self, batches: Any, device: Any):
        import torch

        self._batches, self._device, self._torch = batches, device, torch
        self._rows: dict[int, Any] = {}

    def take(self, blocks: int) -> Any:
        """Ids int64 (blocks, context + 1) on the device, the same ones each time."""
        if blocks not in self._rows:
            rows = self._batches.take(blocks).astype("int64")
            self._rows[blocks] = self._torch.from_numpy(rows).to(self._device)
        return self._rows[blocks]

    def __enter__(self) -> "DeviceBatch":
        return self

    def __exit__(self, *error: object) -> None:
        self._batches.close()


def _time(updater: Any, batches: Any, protocol: dict[str, Any], result: dict[str, Any]) -> None:
    """Warm up and time the windows into `result`, with the status that they deserve."""
    from speedproof.training.compile import compiles, graph_breaks, recompile_reasons
    from speedproof.training.window import run_window

    blocks = updater.recipe.blocks_per_update
    first = run_window(updater, batches, [blocks])
    rest = protocol["warmup_updates"] - 1
    later = run_window(updater, batches, [blocks] * rest).seconds if rest else 0.0
    result["warmup"] = {
        "first_update_s": first.seconds,
        "total_s": first.seconds + later,
        "updates": 1 + rest,
        "compiles": compiles(),
        "graph_breaks": graph_breaks(),
    }
    memory = Memory(updater.device, updater.execution.replays)
    for _ in range(protocol["windows"]):
        before = compiles(), graph_breaks(), len(recompile_reasons())
        begin = time.monotonic()
        window = run_window(
            updater, batches, plan(blocks, protocol["updates_per_window"], protocol["min_window_seconds"])
        )
        result["windows"].append(
            {
                "targets": window.targets,
                "updates": window.updates,
                "seconds": window.seconds,
                "targets_per_s": window.targets_per_s,
                "loss": window.loss,
                "grad_norm": window.grad_norm,
                "data_wait_s": window.data_wait_s,
                "compiles": compiles() - before[0],
                "graph_breaks": graph_breaks() - before[1],
                "guards": recompile_reasons()[before[2] :],
                "edges": [begin, time.monotonic()],
            }
        )
    result["memory"] = memory.read()
    result["wrapped"] = getattr(batches, "cursor", 0) > updater.recipe.blocks
    result["shapes"] = [list(shape) for shape in updater.compiled.shapes] if updater.compiled else []
    result["status"], result["reason"] = verdict(result)


def plan(
    blocks: int, updates: int, min_seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Iterator[int]:
    """Blocks of each update of a window: at least `updates` of them, and whole ones until `min_seconds` have passed."""
    begin, done = clock(), 0
    while done < updates or clock() - begin < min_seconds:
        yield blocks
        done += 1


def verdict(result: dict[str, Any]) -> tuple[str, str | None]:
    """Status and reason of a timing that came to its end."""
    for number, window in enumerate(result["windows"], 1):
        if window["compiles"] or window["graph_breaks"]:
            guards = "; ".join(window["guards"]) or "no guard was named"
            return "recompile_in_window", (
                f"{window['compiles']} compiles and {window['graph_breaks']} graph breaks in window {number} "
                f"({guards}); the compiled function saw the shapes {result['shapes']}"
            )
    memory = result["memory"]
    peak = max(filter(None, (memory["peak_bytes"], memory["setup_bytes"])), default=0)
    if peak > MEMORY_LIMIT * memory["device_bytes"]:
        share = peak / memory["device_bytes"]
        return "memory_limit", f"peak memory is {share:.0%} of the device's, above the limit of {MEMORY_LIMIT:.0%}"
    return "ok", None


def median_rate(windows: list[dict[str, Any]]) -> float:
    """The record's rate: the median window's, in targets/s."""
    return statistics.median(window["targets_per_s"] for window in windows)


class Memory:
    """Peak memory since it was made, apart from the peak before (set-up and warm-up).

    On CUDA the allocator's count, on CPU the resident set; None where the kernel does not let it be reset.
    What a CUDA graph holds is counted only while it is made, and a replay allocates nothing: where windows are
    `replays`, the peak is that of both.
    """

    def __init__(self, device: Any, replays: bool = False):
        self._cuda, self._replays = device.type == "cuda", replays
        self._setup, self._reset = self._peak(), True
        if self._cuda:
            import torch

            self._reserved = torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self._reset = False

    def read(self) -> dict[str, Any]:
        """Bytes: `peak_bytes` of the windows, `setup_bytes` before them, what the device has, and what was counted."""
        from speedproof.measure.environment import host_memory_bytes

        if self._cuda:
            import torch

            total, kind = torch.cuda.get_device_properties(0).total_memory, "CUDA allocator"
            reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        else:
            total, kind, reserved = host_memory_bytes(), "resident set", None
        peak = self._peak() if self._reset else None
        if self._replays:
            peak = max(peak, self._setup)
        return {
            "peak_bytes": peak,
            "setup_bytes": self._setup,
            "reserved_bytes": reserved,
            "device_bytes": total,
            "kind": kind,
        }

    def _peak(self) -> int | None:
        if self._cuda:
            import torch

            return torch.cuda.max_memory_allocated()
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return None


def status_of(error: BaseException) -> tuple[str, str]:
    """Status and reason of an error, by what lies at its bottom: a compiler wraps what went wrong below it."""
    import torch

    from speedproof.model.attention import UnsupportedBackend
    from speedproof.training.compile import CompileError
    from speedproof.training.update import NonFinite

    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = getattr(link, "inner_exception", None) or link.__cause__ or link.__context__
    for link in chain:
        text = str(link)
        if isinstance(link, torch.OutOfMemoryError) or any(
            words in text for words in ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
        ):
            return "device_oom", _sentence(link)
        if isinstance(link, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
            return "host_oom", _sentence(link) or "the host gave no more memory"
    for link in chain:
        if isinstance(link, NonFinite):
            return "nonfinite", _sentence(link)
        if isinstance(link, UnsupportedBackend) or "No available kernel" in str(link):
            return "unsupported_kernel", _sentence(link)
    if isinstance(error, CompileError):
        return "compile_error", _sentence(error)
    return "error", _sentence(error) if isinstance(error, UserError) else f"{type(error).__name__}: {_sentence(error)}"


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[0][:500] if lines else ""


def _profile(updater: Any, batches: Any, protocol: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The profile, or why there is none: a profiler that fails does not undo a timing."""
    from speedproof.measure.trace import profile

    try:
        return profile(updater, batches, protocol["profile_updates"], folder)
    except Exception as error:
        traceback.print_exc()
        return {"reason": f"the profiler failed with {type(error).__name__}: {_sentence(error)}"}


def process_age_s() -> float:
    """Seconds since this process was created, imports included."""
    started = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
