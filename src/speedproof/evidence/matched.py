"""Matched runs: one recipe under several executions, trained over the whole budget and set side by side.

Each arm is compared with the reference arm: rates and sessions as ratios, losses in nats beside the spread of
identical repeats, where the session's time went, and after how many targets a faster arm's longer start has paid.
"""

import json
import math
import re
import statistics as stdlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.identity import differences, digest
from speedproof.evidence.statistics import mean_interval

GROSS_NATS = 0.02
"""Losses further apart than this differ grossly. A convention: what a few per cent more or less budget would change."""

RUN = re.compile(r"(?P<arm>.+)-seed(?P<seed>\d+)-repeat(?P<repeat>\d+)")
"""Name of a run's folder."""


@dataclass(frozen=True)
class Run:
    """A finished run: result.json, its recipe, and the targets of its first window."""

    arm: str
    seed: int
    repeat: int
    result: dict[str, Any]
    recipe: dict[str, Any]
    first_window_targets: int

    @property
    def key(self) -> tuple[int, int]:
        return self.seed, self.repeat

    @property
    def compile_s(self) -> float:
        """What the first window took above the steady rate: compilation, and warming up."""
        return max(0.0, self.result["first_window_s"] - self.first_window_targets / self.result["median_targets_per_s"])

    @property
    def phases_s(self) -> dict[str, float]:
        """The whole process in parts that sum to `process_s`; `other` is what nobody timed."""
        result = self.result
        parts = {
            "startup": result["startup_s"],
            "compile": self.compile_s,
            "updates": result["training_update_s"] - self.compile_s,
            "subset scan": result["subset_scan_s"],
            "epoch validation": result["epoch_validation_s"],
            "checkpoints": result["checkpoint_s"],
            "full validation": result["full_validation_s"],
        }
        return parts | {"other": max(0.0, result["process_s"] - math.fsum(parts.values()))}

    def session_s(self, targets: int) -> float:
        """Session predicted for another budget with as many virtual epochs: updates and checkpoints grow with it."""
        result, share = self.result, targets / self.result["targets"]
        growing = targets / result["median_targets_per_s"] + share * result["checkpoint_s"]
        unsteady = result["training_update_s"] - result["targets"] / result["median_targets_per_s"]
        validation = result["subset_scan_s"] + result["epoch_validation_s"] + result["full_validation_s"]
        return growing + max(0.0, unsteady) + validation


def read_run(path: Path) -> Run:
    """Read `<arm>-seed<seed>-repeat<repeat>/result.json` with the recipe and metrics beside it."""
    name = RUN.fullmatch(path.parent.name)
    if name is None:
        raise UserError(f"{path}: its folder is not named <arm>-seed<seed>-repeat<repeat>; keep the folders as trained")
    result, recipe = files.read_json(path), files.read_yaml(path.with_name("recipe.yaml"))
    if digest(recipe) != result["recipe_digest"]:
        raise UserError(f"{path}: recipe.yaml beside it is not the recipe of this result; train the run again")
    if recipe["seed"] != int(name["seed"]):
        raise UserError(f"{path}: its recipe has seed {recipe['seed']}, its folder says {name['seed']}; train it again")
    if result["status"] != "ok":
        return Run(name["arm"], recipe["seed"], int(name["repeat"]), result, recipe, 0)
    metrics = path.with_name("metrics.jsonl")
    try:
        with open(metrics, encoding="utf-8") as stream:
            first = json.loads(stream.readline())["targets"]
    except (FileNotFoundError, ValueError, KeyError):
        raise UserError(f"{metrics}: does not begin with a window's targets; train the run again") from None
    return Run(name["arm"], recipe["seed"], int(name["repeat"]), result, recipe, first)


def compare(runs: Sequence[Run], arms: dict[str, Any], reference: str) -> dict[str, Any]:
    """Every arm beside the reference arm; see `_arm` for the figures. `arms` is what `resolve_arms` gave.

    An arm that could not be compiled here stands under `failed` with the reason, and nowhere else.

    Raises UserError naming the keys where runs had another recipe or execution than was proved.
    """
    if reference not in arms["arms"]:
        raise UserError(f"matched.reference: {reference!r} is no arm; choose one of {', '.join(arms['order'])}")
    for run in runs:
        _check(run, arms)
    failed = {run.arm: run.result["reason"] for run in runs if run.result["status"] != "ok"}
    if reference in failed:
        raise UserError(f"matched.arms.{reference}: the reference did not train: {failed[reference]}")
    runs = [run for run in runs if run.arm not in failed]
    order = [name for name in arms["order"] if name not in failed]
    by_arm = {name: sorted((r for r in runs if r.arm == name), key=lambda r: r.key) for name in order}
    for name, found in by_arm.items():
        if not found:
            raise UserError(f"matched.arms.{name}: no run of this arm was given; train it or take the arm out")
    identical = [pair for pair in arms["identical"] if not failed.keys() & set(pair)]
    same = {name: [x for pair in identical if name in pair for x in pair if x != name] for name in by_arm}
    budget = runs[0].result["targets"]
    return {
        "reference": reference,
        "recipe_digest": arms["recipe_digest"],
        "order": order,
        "failed": failed,
        "targets": budget,
        "differing": arms["differing"],
        "identical": identical,
        "seeds": sorted({run.seed for run in runs}),
        "arms": {
            name: {"execution": arms["arms"][name]["execution"], "same_as": same[name]} | _arm(found, by_arm[reference])
            for name, found in by_arm.items()
        },
        "runs": [_row(run) for found in by_arm.values() for run in found],
        "predicted_sessions": [_prediction(by_arm, targets) for targets in (budget // 10, budget, 10 * budget)],
    }


def _check(run: Run, arms: dict[str, Any]) -> None:
    where = f"{run.arm}-seed{run.seed}-repeat{run.repeat}"
    if run.arm not in arms["arms"]:
        raise UserError(f"{where}: is no run of the arms {', '.join(arms['order'])}; leave it out")
    wanted = {"recipe": arms["recipe"] | {"seed": run.seed}, "execution": arms["arms"][run.arm]["execution"]}
    found = differences(wanted, {"recipe": run.recipe, "execution": run.result["execution"]})
    if found:
        what = "; ".join(f"{key} {theirs!r} where {mine!r} was proved" for key, (mine, theirs) in found.items())
        raise UserError(f"{where}: was trained with {what}; runs are compared only on one recipe, so train it again")
    if run.result["status"] not in ("ok", "compile_error"):
        raise UserError(f"{where}: its status is {run.result['status']!r}; only finished runs are compared")


def _row(run: Run) -> dict[str, Any]:
    """One run: who it was, its figures and where its time went."""
    kept = {key: value for key, value in run.result.items() if key not in ("execution", "environment")}
    return kept | {"arm": run.arm, "seed": run.seed, "repeat": run.repeat, "phases_s": run.phases_s}


def _arm(runs: list[Run], reference: list[Run]) -> dict[str, Any]:
    """Figures of an arm. Speed-ups are ratios to the reference, over 1 where this arm is faster.

    Rates are totals over summed seconds, except the steady one, which is the median of windows (of runs: their median).
    Over several runs a speed-up is the geometric mean over pairs of the same seed and repeat, with the extremes.
    """
    results = [run.result for run in runs]
    steady = stdlib.median(r["median_targets_per_s"] for r in results)
    targets = sum(r["targets"] for r in results)
    resumed = any(r["resumed"] for r in results)
    found: dict[str, Any] = {
        "runs": len(runs),
        "targets_per_s": steady,
        "median_targets_per_s": steady,
        "aggregate_targets_per_s": targets / math.fsum(r["training_update_s"] for r in results),
        "elapsed_targets_per_s": targets / math.fsum(r["training_phase_s"] for r in results),
        "full_validation_loss": math.fsum(r["full_validation_loss"] for r in results) / len(runs),
        "full_validation_targets": results[0]["full_validation_targets"],
        "peak_memory_bytes": max(r["peak_memory_bytes"] for r in results),
        "compiles": max(r["compiles"] for r in results),
        "recompile_reasons": sorted({x for r in results for x in r.get("recompile_reasons") or []}),
        "partial_shapes": results[0]["partial_shapes"],
        "resumed": resumed,
    }
    for key in ("training_update_s", "first_window_s", "training_phase_s", "full_validation_s"):
        found[key] = stdlib.median(r[key] for r in results)
    found["hosts"] = _hosts(runs)
    for key in ("session_s", "process_s"):
        found[key] = None if resumed else stdlib.median(r[key] for r in results)
    first = next((run for run in runs if not run.result["resumed"]), runs[0])
    found["phases_s"] = first.phases_s
    found["compiler_cache_warm"] = (first.result["environment"].get("facts") or {}).get("compiler_cache_warm")
    return found | _speedups(runs, reference) | _losses(runs, reference) | _break_even(runs, reference)


def _pairs(runs: list[Run], reference: list[Run]) -> list[tuple[Run, Run]]:
    others = {run.key: run for run in reference}
    return [(run, others[run.key]) for run in runs if run.key in others]


def _speedups(runs: list[Run], reference: list[Run]) -> dict[str, Any]:
    pairs = _pairs(runs, reference)
    names = ("steady", "update", "session", "process")
    found: dict[str, Any] = {f"speedup_{name}": None for name in names} | {"pairs": len(pairs), "reason": None}
    if not pairs:
        return found | {"reason": "no run of the reference has the same seed and repeat"}
    other = sorted({key for a, b in pairs for key in differences(_machine(a), _machine(b))})
    if other:
        return found | {"reason": f"trained on another class of machine than the reference: {', '.join(other)}"}
    ratios = {
        "steady": [a.result["median_targets_per_s"] / b.result["median_targets_per_s"] for a, b in pairs],
        "update": [b.result["training_update_s"] / a.result["training_update_s"] for a, b in pairs],
        "session": [b.result["session_s"] / a.result["session_s"] for a, b in pairs],
        "process": [b.result["process_s"] / a.result["process_s"] for a, b in pairs],
    }
    whole = not any(run.result["resumed"] for pair in pairs for run in pair)
    for name, values in ratios.items():
        if name in ("session", "process") and not whole:
            found["reason"] = "a run was resumed, so its session and process times are not compared"
            continue
        found[f"speedup_{name}"] = math.exp(math.fsum(map(math.log, values)) / len(values))
        found[f"speedup_{name}_range"] = [min(values), max(values)]
    return found


def _machine(run: Run) -> dict[str, Any]:
    return run.result["environment"]["class"]


def _hosts(runs: list[Run]) -> list[str]:
    return sorted({(run.result["environment"].get("facts") or {}).get("hostname") or "unknown" for run in runs})


def _spread(runs: list[Run]) -> float | None:
    """Largest distance in nats between runs that differ in nothing; None without repeats."""
    by_seed: dict[int, list[float]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run.result["full_validation_loss"])
    return max((max(losses) - min(losses) for losses in by_seed.values() if len(losses) > 1), default=None)


def _mean_loss(runs: list[Run], seed: int) -> float:
    return stdlib.fmean(run.result["full_validation_loss"] for run in runs if run.seed == seed)


def _losses(runs: list[Run], reference: list[Run]) -> dict[str, Any]:
    """Loss of the arm less that of the reference in nats, and as a sentence what so many seeds and repeats support."""
    seeds = sorted({run.seed for run in runs} & {run.seed for run in reference})
    found: dict[str, Any] = dict.fromkeys(("loss_difference_nats", "loss_difference_low", "loss_difference_high"))
    spreads = [s for s in (_spread(runs), _spread(reference)) if s is not None]
    found["repeat_spread_nats"] = max(spreads, default=None)
    if not seeds or runs == reference:
        return found | {"loss_statement": "the reference" if runs == reference else "no seed in common"}
    interval = mean_interval([_mean_loss(runs, seed) - _mean_loss(reference, seed) for seed in seeds])
    found["loss_difference_nats"] = interval.mean
    if len(seeds) >= 3:
        found |= {"loss_difference_low": interval.low, "loss_difference_high": interval.high}
    return found | {"loss_statement": _loss_statement(found, len(seeds))}


def _loss_statement(found: dict[str, Any], seeds: int) -> str:
    difference, spread = found["loss_difference_nats"], found["repeat_spread_nats"]
    low, high = found["loss_difference_low"], found["loss_difference_high"]
    gross = abs(difference) > GROSS_NATS
    parts = ["gross difference" if gross else "no gross difference", f"{difference:+.6f} nats"]
    if low is not None and high is not None:
        parts.append(f"95 % interval [{low:+.6f}, {high:+.6f}] over {seeds} seeds")
    else:
        parts.append(f"{'one seed' if seeds == 1 else f'{seeds} seeds'} cannot show equality")
    if spread is not None:
        beside = "within" if abs(difference) <= spread else "beyond"
        parts.append(f"{beside} the {spread:.6f} nats between identical repeats")
    return "; ".join(parts)


def break_even_targets(extra_s: float, rate: float, reference_rate: float) -> float | None:
    """Targets after which `extra_s` of longer start have paid at `rate` against `reference_rate` (targets/s).

    0 where the start is not longer; None where the rate is not higher, so that it never pays.
    """
    if rate <= reference_rate:
        return None
    return max(0.0, extra_s) / (1 / reference_rate - 1 / rate)


def _break_even(runs: list[Run], reference: list[Run]) -> dict[str, Any]:
    def start(found: list[Run]) -> float:
        return stdlib.median(run.result["startup_s"] + run.compile_s for run in found)

    def rate(found: list[Run]) -> float:
        return stdlib.median(run.result["median_targets_per_s"] for run in found)

    extra = start(runs) - start(reference)
    return {"extra_start_s": extra, "break_even_targets": break_even_targets(extra, rate(runs), rate(reference))}


def _prediction(by_arm: dict[str, list[Run]], targets: int) -> dict[str, Any]:
    """Sessions predicted for a budget, and the arm with the shortest; resumed runs predict nothing."""
    whole = {name: [run for run in runs if not run.result["resumed"]] for name, runs in by_arm.items()}
    sessions = {name: stdlib.median(run.session_s(targets) for run in runs) for name, runs in whole.items() if runs}
    shortest = min(sessions, key=lambda name: sessions[name]) if sessions else None
    return {"budget_targets": targets, "session_s": sessions, "shortest": shortest}
