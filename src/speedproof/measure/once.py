"""One measurement now: a fresh process, what it found and what the device did meanwhile, put together as a record."""

import sys
import time
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.identity import PACKAGE, source_digest
from speedproof.core.store import Store
from speedproof.measure import sensors, telemetry, worker
from speedproof.measure.compiler_cache import compiler_cache, is_warm
from speedproof.measure.environment import environment
from speedproof.measure.isolate import Exit, run_isolated
from speedproof.measure.utilisation import ImpossibleRate, mfu
from speedproof.settings.execution import Execution
from speedproof.settings.recipe import Recipe

SCHEMA = 1
LOG_FILE, TELEMETRY_FILE = "log.txt", "telemetry.csv"

UNEVEN = 0.05
"""Drift or spread of the windows above which a record is flagged."""

BUSY = 10.0
"""Percent of the host's CPU that others may use before a record is flagged."""


def check_data(recipe: Recipe, mode: str, cache_manifest: Path | None) -> None:
    """Raise UserError where `mode` and the token cache's manifest do not fit the recipe; asked before any wait."""
    if mode not in ("real", "synthetic"):
        raise UserError(f"data-mode: found {mode!r}; use real or synthetic")
    if mode == "synthetic":
        return
    if cache_manifest is None:
        raise UserError("cache: a measurement on real data needs the token cache's manifest; give --cache")
    found = files.read_json(cache_manifest).get("identity")
    if found != recipe.data:
        raise UserError(
            f"recipe.data: found {recipe.data}, but {cache_manifest} is the token cache {found}; "
            "use the recipe that was resolved with it"
        )


def measure_once(
    recipe: Recipe,
    execution: Execution,
    measuring: dict[str, Any],
    *,
    store: Store,
    cache_manifest: Path | None,
    mode: str,
    cold: bool,
    folder: Path,
) -> dict[str, Any]:
    """Measure now, in one fresh process, with its files in the empty `folder`. The caller holds the device.

    Raises: UserError where the worker found its input wrong.
    """
    request = {
        "recipe": recipe.plain(),
        "execution": execution.plain(),
        "protocol": measuring,
        "mode": mode,
        "cache": str(Path(cache_manifest).resolve()) if cache_manifest else None,
        "store": str(store.root.resolve()),
    }
    files.write_json(folder / "request.json", request)
    machine = environment(execution.device)
    before = sensors.memory_used_bytes(execution.device)
    sampler = telemetry.Sampler(sensors.open_source(execution.device), folder / TELEMETRY_FILE)
    with compiler_cache(cold) as caches, sampler:
        warm = is_warm(caches)
        ended = run_isolated(
            [sys.executable, "-m", worker.__name__, str(folder / "request.json"), str(folder / "result.json")],
            measuring["deadline_s"],
            folder / LOG_FILE,
            env=caches | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"},
            started=lambda pid: setattr(sampler, "worker", pid),
        )
    _wait_for_memory(execution.device, before)
    result = files.read_json(folder / "result.json") if (folder / "result.json").is_file() else None
    log = log_tail(folder / LOG_FILE)
    if result and result.get("user_error"):
        raise UserError(result["reason"])
    status, reason = status_of(ended, result, log, measuring["deadline_s"])
    record = empty_record(recipe, execution, measuring, mode, cold) | {
        "status": status,
        "reason": reason,
        "environment": machine,
        "compiler_cache": "warm" if warm else "cold",
        "worker_s": ended.seconds,
        "log_tail": log,
    }
    return _with_result(record, result or {}, sampler, recipe)


def status_of(ended: Exit, result: dict[str, Any] | None, log: str, deadline_s: float) -> tuple[str, str | None]:
    """Status and reason from what happened: the worker's own word first, then how it ended."""
    if result is not None:
        return result["status"], result["reason"]
    if ended.timed_out:
        return "timeout", f"no result within the deadline of {deadline_s:g} s, imports and compilation included"
    if ended.signal == 9 or ended.code == 137:
        return "host_oom", "the worker was killed by KILL from outside, as the system does when memory runs out"
    if "MemoryError" in log:
        return "host_oom", "the worker ended with a MemoryError"
    how = f"signal {ended.signal}" if ended.signal else f"exit code {ended.code}"
    return "error", f"the worker ended with {how} and left no result"


def _with_result(
    record: dict[str, Any], result: dict[str, Any], sampler: telemetry.Sampler, recipe: Recipe
) -> dict[str, Any]:
    """The record with what the worker measured and what the device did in its windows."""
    windows = result.get("windows") or []
    edges = [tuple(window.pop("edges")) for window in windows]
    for window, (begin, end) in zip(windows, edges, strict=True):
        window["device"] = telemetry.summary(sampler.between(begin, end))
    for key in ("startup_s", "warmup", "memory", "precision", "precision_reason", "profile"):
        record[key] = result.get(key)
    if record["status"] == "ok" and record["profile"] is None and record["protocol"]["profile_updates"]:
        record["profile"] = {"reason": "the worker came to its end after timing and before the profile"}
    record["windows"] = windows
    foreign = max((w["device"]["foreign_processes"] or 0 for w in windows), default=0)
    if record["status"] == "ok" and foreign:
        record["status"], record["reason"] = "tainted", f"{foreign} foreign processes used the GPU during the windows"
    targets = sum(window["targets"] for window in windows)
    energy = sampler.energy(edges)
    joules = energy.pop("energy_j")
    record["energy_j_per_million_targets"] = None if joules is None or not targets else joules / targets * 1e6
    record |= energy
    record["flags"] += flags(windows, result)
    rate = worker.median_rate(windows) if record["status"] == "ok" else None
    model = recipe.model_copy(update={"precision": record["precision"] or recipe.precision})
    try:
        record |= mfu(model, rate, record["environment"]["class"].get("gpu"))
    except ImpossibleRate as error:
        record |= {"status": "error", "reason": str(error), "mfu": None, "mfu_reason": str(error)}
        rate = None
    record["targets_per_s"] = rate
    return record


def flags(windows: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    """What a reader of the rate should know; none of it drops the record."""
    found = []
    rates = [window["targets_per_s"] for window in windows]
    if len(rates) > 1:
        drift, spread = rates[-1] / rates[0] - 1, (max(rates) - min(rates)) / worker.median_rate(windows)
        if abs(drift) > UNEVEN:
            found.append(f"drift {drift:+.1%} from the first window to the last")
        elif spread > UNEVEN:
            found.append(f"spread {spread:.1%} between the windows")
    if result.get("wrapped"):
        found.append("the training data were read more than once")
    reasons = {r for w in windows for r in w["device"]["throttle_reasons"] if r in sensors.HARMFUL}
    if reasons:
        found.append(f"clocks were held down: {', '.join(sorted(reasons))}")
    if any((w["device"]["foreign_cpu_percent"] or 0) > BUSY for w in windows):
        found.append("other processes used the CPU during the windows")
    return found


def log_tail(path: Path, lines: int = 20, characters: int = 4000) -> str:
    """The last lines of a worker's log, without the folders of this machine."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for folder, name in ((str(PACKAGE.parent), "src"), (sys.prefix, "python"), (sys.base_prefix, "python")):
        text = text.replace(folder, name)
    kept = [line for line in text.splitlines() if not line.startswith("USDT:")]  # the profiler's own start and stop
    return "\n".join(kept[-lines:])[-characters:]


def empty_record(
    recipe: Recipe, execution: Execution, measuring: dict[str, Any], mode: str, cold: bool
) -> dict[str, Any]:
    """A record with every key, before anything is known."""
    return {
        "schema": SCHEMA,
        "identity": None,
        "status": None,
        "reason": None,
        "presumed": False,
        "recipe": recipe.plain(),
        "execution": execution.plain(),
        "protocol": measuring,
        "mode": mode,
        "cold": cold,
        "source": source_digest("measure"),
        "targets_per_s": None,
        "windows": [],
        "warmup": None,
        "startup_s": None,
        "worker_s": None,
        "memory": None,
        "precision": None,
        "precision_reason": None,
        "mfu": None,
        "mfu_reason": "no rate",
        "energy_j_per_million_targets": None,
        "energy_source": None,
        "energy_reason": "no rate",
        "compiler_cache": None,
        "flags": ["synthetic data on the device: neither loading nor transfer is measured"]
        if mode == "synthetic"
        else [],
        "environment": None,
        "waited_for_device_s": 0.0,
        "log_tail": "",
        "profile": None,
    }


def _wait_for_memory(device: str, before: int | None, timeout_s: float = 60.0) -> None:
    """Wait until the GPU's memory is free again: the driver clears up a moment after a process is gone."""
    end = time.monotonic() + timeout_s
    while before is not None and time.monotonic() < end:
        used = sensors.memory_used_bytes(device)
        if used is None or used <= before + 64 * 2**20:
            return
        time.sleep(0.25)
