"""The figures of the GH200 report that this project re-implements, set beside what an experiment measured.

They were published by others (config/published.yaml names the source). A published figure is never given as a
measured one: each row holds both in columns of their own, and a row that was not measured says why.
"""

from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.errors import UserError

GIB = 2**30

MEASURED, NOT_MEASURED, HISTORICAL = "measured", "not_measured", "historical"


def read_published(path: Path) -> dict[str, Any]:
    """The file of published figures. Raises UserError naming the file, or the row, that cannot be used."""
    value = files.read_yaml(path)
    if not isinstance(value, dict) or not {"source", "environment", "comparable", "rows"} <= set(value):
        raise UserError(f"{path}: is no file of published figures; expected source, environment, comparable and rows")
    for name, row in value["rows"].items():
        if not isinstance(row, dict) or not {"title", "unit", "value"} <= set(row):
            raise UserError(f"{path}: rows.{name} is {row!r}; a row needs title, unit and value")
    return value


def compare(published: dict[str, Any], summary: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a published figure: what this experiment measured of the same quantity, their ratio, or why none.

    `summary` needs `presets`, `tuning`, `matched`, `parity` (each keyed by preset), `device` and `extra`. An extra
    may answer rows by their id: {"published_rows": {id: {"measured", "status", "reason"}}}.
    A ratio is measured over published; it is None where the recipes or budgets differ, with the difference as reason.
    """
    answers: dict[str, dict[str, Any]] = {}
    for extra in summary["extra"].values():
        if isinstance(extra, dict):
            answers |= extra.get("published_rows", {})
    return [_row(name, row, published, summary, answers.get(name)) for name, row in published["rows"].items()]


def _row(
    name: str, row: dict[str, Any], published: dict[str, Any], summary: dict[str, Any], answer: dict[str, Any] | None
) -> dict[str, Any]:
    found = answer or _find(row, summary)
    measured, reason = found.get("measured"), found.get("reason")
    status = found.get("status") or (NOT_MEASURED if measured is None else MEASURED)
    ratio = None
    if measured is not None:
        reason = reason or _incomparable(row, published["comparable"], summary)
        ratio = measured / row["value"] if reason is None and row["value"] else None
    return {
        "id": name,
        "quantity": row["title"],
        "preset": row.get("preset"),
        "unit": row["unit"],
        "published": row["value"],
        "published_on": "another machine (historical)" if row.get("historical") else published["environment"]["device"],
        "measured": measured,
        "measured_on": summary["device"]["name"] if measured is not None else None,
        "ratio": ratio,
        "status": status,
        "reason": reason,
    }


def _find(row: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    if row.get("historical"):
        return {"status": HISTORICAL, "reason": "historical figure of another machine; not measured again"}
    preset, find = row.get("preset"), row.get("find")
    if row.get("needs") == "cuda" and summary["device"]["kind"] != "cuda":
        return {"reason": "needs CUDA"}
    if preset is not None and preset not in summary["presets"]:
        return {"reason": f"preset {preset} is not part of this experiment"}
    if not find:
        return {"reason": "not part of this experiment"}
    if find.get("tuning") == "retention":
        return _found((summary["tuning"].get(preset) or {}).get("retention"), "no retention rule here", offset=-1)
    if "tuning" in find:
        return _from_tuning(find["tuning"], row["unit"], summary["tuning"].get(preset))
    if "matched" in find:
        return _from_matched(find["matched"], find["figure"], summary["matched"].get(preset))
    check = (summary["parity"].get(preset) or {}).get(find["parity"])
    if check is None:
        return {"reason": f"no parity check of {find['parity']} weights in this experiment"}
    return _found(check.get(find["figure"]), check.get("reason"))


def _found(value: float | None, reason: str | None, offset: float = 0) -> dict[str, Any]:
    return {"reason": reason or "not recorded"} if value is None else {"measured": value + offset}


def _from_tuning(where: dict[str, Any], unit: str, tuning: dict[str, Any] | None) -> dict[str, Any]:
    if tuning is None:
        return {"reason": "no tuning of this preset in this experiment"}
    wanted = {"compile_mode": "default", "sdpa_backend": "auto"} | where
    if not wanted["compile"]:
        del wanted["compile_mode"]
    for candidate in tuning["rows"]:
        execution = candidate.get("execution") or {}
        if all(execution.get(key) == value for key, value in wanted.items()):
            if candidate["status"] != "ok":
                return {"status": candidate["status"], "reason": candidate.get("reason") or candidate["status"]}
            if unit == "GiB":
                peak = candidate.get("peak_bytes")
                return _found(None if peak is None else peak / GIB, "peak not recorded")
            return _found(candidate["targets_per_s"], None)
    return {"reason": "no candidate of the grid has these settings"}


def _from_matched(arms: str | list[str], figure: str, matched: dict[str, Any] | None) -> dict[str, Any]:
    if matched is None:
        return {"reason": "no matched runs of this preset in this experiment"}
    for arm in [arms] if isinstance(arms, str) else arms:
        if arm in matched["arms"]:
            return _found(matched["arms"][arm].get(figure), matched["arms"][arm].get("reason"))
    return {"reason": f"no matched arm {arms!r} in this experiment"}


def _incomparable(row: dict[str, Any], comparable: dict[str, Any], summary: dict[str, Any]) -> str | None:
    """What this experiment's recipe has otherwise than the published one, None where a ratio means something."""
    preset = summary["presets"].get(row.get("preset"))
    if preset is None or row["unit"] in ("fraction", "ratio"):
        return None
    recipe = preset["recipe"]
    mine = {
        "context_length": recipe["model"]["context_length"],
        "targets_per_update": recipe["targets_per_update"],
        "precision": recipe["precision"],
    }
    if "matched" in row.get("find", {}) and row["unit"] in ("s", "nats"):
        mine["total_targets"] = preset["total_targets"]
    differing = [f"{key} {mine[key]}, published {comparable[key]}" for key in mine if mine[key] != comparable[key]]
    return "; ".join(differing) or None
