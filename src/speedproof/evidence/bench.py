"""The benchmark: this project's model beside transformers' on one machine, mode by mode, below its matmul ceiling."""

import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.store import Store
from speedproof.evidence import statistics
from speedproof.measure import forward, matmul
from speedproof.measure.comparison import KEPT, compare, run_blocks, settled
from speedproof.measure.compiler_cache import compiler_cache
from speedproof.measure.device_lock import device_lock
from speedproof.measure.isolate import run_isolated
from speedproof.measure.once import log_tail, status_of
from speedproof.settings.execution import Execution
from speedproof.settings.recipe import Recipe

NAMED = re.compile(r"(fp32|bf16)-(forward-)?(eager|compiled)(-tuned)?")
PRECISIONS, COMPILED = ("fp32", "bf16"), ("eager", "compiled")

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Mode:
    """What is compared: updates or forward passes, in a precision, eager or compiled.

    `tuned`: both sides run on a tuned allocator; else the peer runs as it is shipped and the native side as its
    execution says, which tunes its own.
    """

    precision: str
    forward: bool
    compiled: bool
    tuned: bool

    @classmethod
    def named(cls, name: str) -> "Mode":
        """`bf16-compiled`, `fp32-forward-eager`, `fp32-eager-tuned` and so on. Raises UserError listing them."""
        if not (found := NAMED.fullmatch(name)):
            known = ", ".join(mode.name for mode in MODES)
            raise UserError(f"modes: found {name!r}; known modes are {known}")
        return cls(found[1], found[2] is not None, found[3] == "compiled", found[4] is not None)

    @property
    def name(self) -> str:
        forward = "forward-" if self.forward else ""
        return f"{self.precision}-{forward}{COMPILED[self.compiled]}{'-tuned' if self.tuned else ''}"

    def sides(self, execution: Execution) -> tuple[Execution, Execution]:
        """A, the peer, and B, the native execution."""
        compiling = {"compile": self.compiled, "evaluation_compile": self.compiled, "compile_mode": "default"}
        b = execution.model_copy(update=compiling | ({"allocator": "tuned"} if self.tuned else {}))
        a = b.peer("transformers").model_copy(update={"allocator": "tuned" if self.tuned else "default"})
        return a, b


MODES = tuple(
    Mode(precision, forward, compiled, tuned)
    for precision in PRECISIONS
    for forward in (False, True)
    for compiled in (False, True)
    for tuned in (False, True)
    if not (forward and tuned)
)


@dataclass(frozen=True)
class Effort:
    """How long each process measures."""

    blocks: int
    protocol: dict[str, Any]
    forward_windows: int
    forward_batches: int


def effort(quick: bool, blocks: int) -> Effort:
    """Three windows of some seconds each, or one short window, which shows little more than that it runs."""
    updates = (1, 1, 2) if quick else (2, 3, 3)
    counts = dict(zip(("warmup_updates", "windows", "updates_per_window"), updates, strict=True))
    protocol = counts | {"min_window_seconds": 0.0, "profile_updates": 0, "deadline_s": 3600}
    return Effort(blocks, protocol, *((1, 2) if quick else (3, 6)))


def ceilings(recipe: Recipe, execution: Execution, precisions: set[str]) -> dict[str, Any]:
    """FLOP/s of matrix products by precision, see `matmul.main`; alone on the device, in a fresh process."""
    request = {
        "model": recipe.model.plain(),
        "rows": execution.microbatch * recipe.model.context_length,
        "cpu_threads": execution.cpu_threads,
        "device": execution.device,
        "precisions": sorted(precisions),
    }
    with device_lock(execution.device):
        ended, result, log = _process(matmul.__name__, request, 600)
    if result is None:
        raise UserError(f"bench: the matmul rate could not be measured ({status_of(ended, result, log, 600)[1]})")
    return result


def run_mode(
    mode: Mode, recipe: Recipe, execution: Execution, work: Effort, store: Store, progress: Progress | None = None
) -> dict[str, Any]:
    """The comparison of a mode, A the peer and B the native execution; keys as of `comparison.settled`."""
    wanted = recipe.model_copy(update={"precision": mode.precision})
    a, b = mode.sides(execution)
    if not mode.forward:
        options = {"store": store, "cache_manifest": None, "mode": "synthetic", "reuse": False, "progress": progress}
        return compare(a, b, wanted, work.protocol, work.blocks, **options)
    for side in (a, b):
        side.check(wanted)
    with device_lock(a.device):
        details = run_blocks(a, b, work.blocks, partial(_forward, recipe=wanted, work=work), progress)
    return settled(details, work.blocks)


def _forward(execution: Execution, recipe: Recipe, work: Effort) -> dict[str, Any]:
    """A process of forward passes as `run_blocks` wants it. Raises: UserError where its input is wrong."""
    request = {
        "recipe": recipe.plain(),
        "execution": execution.plain(),
        "windows": work.forward_windows,
        "batches": work.forward_batches,
    }
    deadline = work.protocol["deadline_s"]
    ended, result, log = _process(forward.__name__, request, deadline)
    if result and result.get("user_error"):
        raise UserError(result["reason"])
    status, reason = status_of(ended, result, log, deadline)
    found = {key: (result or {}).get(key) for key in KEPT}
    return found | {"status": status, "reason": reason, "flags": [], "log_tail": log}


def _process(module: str, request: dict[str, Any], deadline_s: float) -> tuple[Any, dict[str, Any] | None, str]:
    """How a fresh process of `module` ended, what it found, and its last words."""
    with tempfile.TemporaryDirectory(prefix="speedproof-bench-") as name, compiler_cache() as caches:
        folder = Path(name)
        files.write_json(folder / "request.json", request)
        paths = [str(folder / "request.json"), str(folder / "result.json")]
        ended = run_isolated([sys.executable, "-m", module, *paths], deadline_s, folder / "log.txt", env=caches)
        result = files.read_json(folder / "result.json") if (folder / "result.json").is_file() else None
        return ended, result, log_tail(folder / "log.txt")


def row(mode: Mode, recipe: Recipe, comparison: dict[str, Any], ceiling: dict[str, Any]) -> dict[str, Any]:
    """Both rates in targets/s, their ratio with interval, and the native rate as a share of the matmul ceiling."""
    peer_rate, rate = statistics.mean_rates(comparison)
    found = statistics.judge(comparison, 1.0)
    model = recipe.model
    flops = model.forward_flops_per_target if mode.forward else model.training_flops_per_target
    peak = ceiling[mode.precision]["forward" if mode.forward else "update"]
    return {
        "mode": mode.name,
        "targets_per_s": rate,
        "peer_targets_per_s": peer_rate,
        "share_of_matmul": rate * flops / peak if rate and peak else None,
        "ceiling_targets_per_s": peak / flops if peak else None,
        "reason": comparison["reason"],
        "rates_targets_per_s": comparison["blocks"],
    } | {key: found[key] for key in ("ratio", "low", "high", "blocks", "smallest_effect")}


def unsupported(mode: Mode, reason: str) -> dict[str, Any]:
    """The row of a mode that this machine cannot run in hardware."""
    keys = ("targets_per_s", "peer_targets_per_s", "share_of_matmul", "ceiling_targets_per_s", "ratio", "low", "high")
    return {"mode": mode.name, "reason": f"unsupported: {reason}", "blocks": 0} | dict.fromkeys(keys)


def describe(entry: dict[str, Any]) -> str:
    """A row as it is printed."""
    label = f"{entry['mode'].replace('-', ' '):22}"
    if entry["ratio"] is None:
        return f"{label} {entry['reason']}"
    interval = f"[{entry['low']:.2f}, {entry['high']:.2f}]" if entry["low"] is not None else "(one block)"
    share = f"  {100 * entry['share_of_matmul']:.0f} % of matmul" if entry["share_of_matmul"] else ""
    tail = f"  ({entry['reason']})" if entry["reason"] else ""
    return (
        f"{label} {entry['targets_per_s']:6,.0f} targets/s  {entry['ratio']:.2f}x {interval}{share}"
        f"  transformers {entry['peer_targets_per_s']:,.0f}{tail}"
    )
