"""From finalists to settled executions: the numerically fastest that computes the reference, and the one to rely on.

The fastest of many candidates looks better than it is (best of 15 equal ones at 1 % noise: +1.7 %). So the last
incumbent was measured again on fresh blocks against the default; the verdict on those decides, and only retain
replaces the default. An inconclusive one leaves the default and says how many blocks would decide.
"""

from collections.abc import Iterable
from typing import Any

from speedproof.core.errors import UserError
from speedproof.core.identity import digest
from speedproof.evidence import statistics


def recommend(
    finalists: dict[str, Any],
    comparison: dict[str, Any],
    parity: dict[str, Any],
    records: Iterable[dict[str, Any]],
    *,
    retention: float,
    no_regression: float,
) -> dict[str, Any]:
    """The tuning table: a row a candidate, the decisions, the confirmation, `selected` and `recommended`.

    Raises UserError where no execution computes the reference, or the comparison is of other executions.
    """
    checks = _checks(parity)
    measured = {digest(r["execution"]): r for r in records if r["status"] != "skipped"}
    default_rate = _rate(measured.get(digest(finalists["default"])))
    confirmed = confirmation(finalists, comparison, retention=retention, no_regression=no_regression)
    return {
        "default": {
            "name": finalists["default_name"],
            "execution": finalists["default"],
            "targets_per_s": default_rate,
        },
        "selected": _selected(finalists, checks),
        "recommended": _recommended(finalists, confirmed, checks, default_rate),
        "confirmation": confirmed,
        "decisions": finalists["decisions"],
        "retention": retention,
        "rows": [_row(c, measured.get(digest(c["execution"])), default_rate) for c in finalists["candidates"]],
    }


def confirmation(
    finalists: dict[str, Any], comparison: dict[str, Any], *, retention: float, no_regression: float
) -> dict[str, Any]:
    """The verdict of fresh A B B A blocks, A the default and B the last incumbent.

    Where no candidate was retained both are the default, and the blocks are a control: its interval is the noise of
    this machine, and its verdict is None.
    """
    pair = (finalists["default"], finalists["recommended"])
    if (comparison["a"], comparison["b"]) != pair:
        raise UserError(
            "comparison: its executions are not the default and the recommended one of the finalists; compare again"
        )
    default_rate, rate = statistics.mean_rates(comparison)
    found = statistics.judge(comparison, retention) | {
        "name": finalists["recommended_name"],
        "control": pair[0] == pair[1],
        "default_targets_per_s": default_rate,
        "targets_per_s": rate,
        "rates_targets_per_s": comparison["blocks"],
        "repeated_blocks": comparison.get("repeated_blocks"),
    }
    if found["control"]:
        reason = f"control, the default against itself: {found['label']}"
        return found | {"verdict": None, "no_regression": None, "blocks_that_decide": None, "reason": reason}
    return found | {"no_regression": statistics.no_regression(comparison, no_regression)}


def _checks(parity: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Parity checks by their execution."""
    found = [*parity["checks"], *([parity["recommended"]] if parity.get("recommended") else [])]
    return {digest(check["execution"]): check for check in found}


def _selected(finalists: dict[str, Any], checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    failed = []
    for entry in finalists["selected"]:
        check = checks.get(digest(entry["execution"]))
        if check is None:
            break
        if check["holds"]:
            passed_over = f"; faster, but failed parity: {', '.join(failed)}" if failed else ""
            return entry | {"parity": check, "reason": f"numerically fastest whose parity holds{passed_over}"}
        failed.append(entry["name"])
    raise UserError(
        f"finalist_parity: no execution was found to compute the reference (failed: {', '.join(failed) or 'none'}); "
        "see the checks there for the worst tensor"
    )


def _recommended(
    finalists: dict[str, Any], confirmed: dict[str, Any], checks: dict[str, dict[str, Any]], default_rate: float | None
) -> dict[str, Any]:
    check = checks.get(digest(finalists["recommended"]))
    rates = {digest(entry["execution"]): entry["targets_per_s"] for entry in finalists["selected"]}
    challenger = {
        "name": finalists["recommended_name"],
        "execution": finalists["recommended"],
        "targets_per_s": rates.get(digest(finalists["recommended"])),
        "parity": check,
    }
    default = {
        "name": finalists["default_name"],
        "execution": finalists["default"],
        "targets_per_s": default_rate,
        "parity": checks.get(digest(finalists["default"])),
    }
    if confirmed["control"]:
        why = "no candidate was retained against it"
    elif check is None or not check["holds"]:
        why = f"{challenger['name']} fails parity ({check.get('reason') if check else 'it was not checked'})"
    elif default_rate is None:
        return challenger | {"reason": "the default did not run, so there was nothing to confirm against"}
    elif confirmed["verdict"] == "retain":
        return challenger | {"reason": f"confirmed against the default: {confirmed['reason']}"}
    else:
        why = f"{challenger['name']} was not confirmed: {confirmed['reason']}"
    own = default["parity"]
    if own is None or not own["holds"]:
        found = own.get("reason") if own else "it was not checked"
        raise UserError(f"finalist_parity: the default execution is left, and it fails parity ({found}); mend it")
    return default | {"reason": f"the default: {why}"}


def _rate(record: dict[str, Any] | None) -> float | None:
    return record["targets_per_s"] if record and record["status"] == "ok" else None


def _row(candidate: dict[str, Any], record: dict[str, Any] | None, default_rate: float | None) -> dict[str, Any]:
    """A candidate as a row of the table; null where its record has nothing."""
    if record is None:
        raise UserError(
            f"records: none of {candidate['name']!r}, which the finalists know; pass the records of all slots"
        )
    warmup, memory, rate = record.get("warmup") or {}, record.get("memory") or {}, _rate(record)
    return candidate | {
        "status": record["status"],
        "reason": record.get("reason"),
        "targets_per_s": rate,
        "ratio_to_default": rate / default_rate if rate and default_rate else None,
        "warmup_s": warmup.get("total_s"),
        "first_update_s": warmup.get("first_update_s"),
        "peak_bytes": memory.get("peak_bytes"),
        "mfu": record.get("mfu"),
        "flags": record.get("flags") or [],
    }
