"""The programme joined: each row's figures, each pair's verdicts, and what follows from one row set against another."""

from typing import Any

from speedproof.core.errors import UserError
from speedproof.core.identity import differences
from speedproof.evidence import statistics
from speedproof.evidence.matched import break_even_targets
from speedproof.settings.execution import Execution
from speedproof.settings.programme import Pair, Programme, Row


def join(
    programme: Programme,
    default: Execution,
    records: dict[str, dict[str, Any]],
    comparisons: dict[str, dict[str, Any]],
    *,
    retention: float,
    no_regression: float,
) -> dict[str, Any]:
    """`rows` and `pairs` by name, from the record of each row and the comparison of each pair.

    `default` is the execution that the programme's settings change. Raises UserError naming a row or pair without its
    result, or with the result of another execution.
    """
    executions = programme.executions(default)
    for name in programme.rows:
        _check(f"rows.{name}", records.get(name), {"execution": executions[f"rows/{name}"].plain()})
    for name in programme.pairs:
        arms = {arm: executions[f"pairs/{name}/{arm}"].plain() for arm in "ab"}
        _check(f"pairs.{name}", comparisons.get(name), arms)
    return {
        "stand_ins": programme.stand_ins,
        "order": {"rows": list(programme.rows), "pairs": list(programme.pairs)},
        "rows": {
            name: _row(row, records[name], None if row.against is None else records[row.against])
            for name, row in programme.rows.items()
        },
        "pairs": {
            name: _pair(pair, comparisons[name], retention, no_regression) for name, pair in programme.pairs.items()
        },
    }


def _check(where: str, found: dict[str, Any] | None, wanted: dict[str, Any]) -> None:
    if found is None:
        raise UserError(f"programme.{where}: has no result; run its rule first")
    other = differences(wanted, {key: found[key] for key in wanted})
    if other:
        raise UserError(f"programme.{where}: its result has another {', '.join(other)}; run its rule again")


def _row(row: Row, record: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    """Figures of one record; null where it has none, and then `reason` or a reason of its own says why."""
    warmup, memory, profile = (record.get(key) or {} for key in ("warmup", "memory", "profile"))
    updates = profile.get("updates")
    return {
        "parts": list(row.parts),
        "preset": row.preset,
        "mode": record["mode"],
        "cold": record["cold"],
        "execution": record["execution"],
        "status": record["status"],
        "reason": record["reason"],
        "targets_per_s": record["targets_per_s"],
        "windows_targets_per_s": [window["targets_per_s"] for window in record["windows"]],
        "first_update_s": warmup.get("first_update_s"),
        "warmup_s": warmup.get("total_s"),
        "warmup_updates": warmup.get("updates"),
        "compiler_cache": record["compiler_cache"],
        "peak_bytes": memory.get("peak_bytes"),
        "peak_kind": memory.get("kind"),
        "mfu": record["mfu"],
        "energy_j_per_million_targets": record["energy_j_per_million_targets"],
        "energy_reason": record["energy_reason"],
        "kernels_per_update": profile.get("kernels_per_update"),
        "kernel_ms_per_update": profile.get("ms_per_update"),
        "kernel_families": profile.get("families"),
        "profile_kind": profile.get("kind"),
        "profile_updates": updates,
        "profile_reason": profile.get("reason"),
        "flags": record["flags"],
        "against": row.against,
        "environment": record["environment"],
    } | _against(record, other)


def _against(record: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    """`ratio` of the rates of two single records, a point estimate, and the break-even in targets.

    The break-even charges this row with its whole warm-up and the other with none, as the published estimate does.
    """
    why = "set against no other row" if other is None else _apart(record, other)
    if other is None or why:
        return {"ratio": None, "ratio_reason": why, "break_even_targets": None, "break_even_reason": why}
    rate, reference = record["targets_per_s"], other["targets_per_s"]
    paid = break_even_targets(record["warmup"]["total_s"], rate, reference)
    return {
        "ratio": rate / reference,
        "ratio_reason": None,
        "break_even_targets": paid,
        "break_even_reason": "its rate is not the higher one, so its start never pays" if paid is None else None,
    }


def _apart(record: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Why two records have no ratio."""
    if not record["targets_per_s"] or not other["targets_per_s"]:
        return "one of the two rows has no rate"
    other_class = differences(record["environment"]["class"], other["environment"]["class"])
    return f"measured on another class of machine: {', '.join(other_class)}" if other_class else None


def _pair(pair: Pair, comparison: dict[str, Any], retention: float, no_regression: float) -> dict[str, Any]:
    """Rate of B over rate of A with both verdicts, and the four rates of the first block as (a1, b1, b2, a2)."""
    differing = differences(comparison["a"], comparison["b"])
    rates = statistics.mean_rates(comparison)
    return {
        "parts": list(pair.parts),
        "preset": pair.preset,
        "a": comparison["a"],
        "b": comparison["b"],
        "differing": {key: list(values) for key, values in differing.items()},
        "a_targets_per_s": rates[0],
        "b_targets_per_s": rates[1],
        "orders": comparison["orders"],
        "blocks_targets_per_s": comparison["blocks"],
        "status": comparison["status"],
        "status_reason": comparison["reason"],
        "no_regression": statistics.no_regression(comparison, no_regression),
        "environment": comparison["environment"],
    } | statistics.judge(comparison, retention)
