"""The figures of the GH200 report that this project re-implements, set beside what an experiment measured.

They were published by others (config/published.yaml names the source). A published figure is never given as a
measured one: each row holds both in columns of their own, and a row that was not measured says why.
"""

from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.errors import UserError

SCALES = {"GiB": 1 / 2**30, "M targets/s": 1e-6}
"""From the unit of a result to the unit of a published figure; 1 where they are the same."""

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

    `summary` needs `presets`, `tuning`, `matched`, `parity` (each keyed by preset), `programme`, `allocation`, `device`
    and `extra`. An extra may answer rows by their id: {"published_rows": {id: {"measured", "status", "reason"}}}.
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
    stand_in = (summary["programme"] or {}).get("stand_ins", {}).get(row.get("preset"))
    preset = stand_in or row.get("preset")
    found = answer or _find(row, preset, summary)
    measured, reason = found.get("measured"), found.get("reason")
    status = found.get("status") or (NOT_MEASURED if measured is None else MEASURED)
    ratio = None
    if measured is not None:
        if stand_in:
            reason = f"rehearsed on preset {stand_in}, which stands for {row['preset']}"
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
        "measured_on": (found.get("on") or summary["device"]["name"]) if measured is not None else None,
        "ratio": ratio,
        "status": status,
        "reason": reason,
    }


def device_name(machine: dict[str, Any]) -> str:
    """What a table calls a machine, from its class."""
    return machine["gpu"] if machine["device"] == "cuda" else f"{machine['cpu']}, {machine['cpus']} CPUs"


def _find(row: dict[str, Any], preset: str | None, summary: dict[str, Any]) -> dict[str, Any]:
    if row.get("historical"):
        return {"status": HISTORICAL, "reason": "historical figure of another machine; not measured again"}
    if row.get("why"):
        return {"reason": row["why"]}
    find, programme = row.get("find", {}), summary["programme"] or {"rows": {}, "pairs": {}}
    if row.get("needs") == "cuda" and summary["device"]["kind"] != "cuda":
        return {"reason": "needs CUDA"}
    if "allocation" in find:
        return _value(summary["allocation"], find["allocation"], row, summary["allocation"].get("reason"))
    if preset not in summary["presets"]:
        return {"reason": f"preset {preset} is not part of this experiment"}
    if names := [name for name in _listed(find.get("row")) if name in programme["rows"]]:
        return _best([_measured(programme["rows"][name], row, "rows") for name in names])
    if find.get("pair") in programme["pairs"]:
        return _measured(programme["pairs"][find["pair"]], row, "pairs")
    if find.get("tuning") == "retention":
        return _value(summary["tuning"].get(preset) or {}, "retention", row, "no retention rule here")
    if "tuning" in find:
        return _from_tuning(find["tuning"], row, summary["tuning"].get(preset))
    if "matched" in find:
        return _from_matched(find["matched"], row, summary["matched"].get(preset))
    if "parity" in find:
        check = (summary["parity"].get(preset) or {}).get(find["parity"])
        if check is None:
            return {"reason": f"no parity check of {find['parity']} weights in this experiment"}
        return _value(check, find["figure"], row, check.get("reason")) | _on(check)
    return {"reason": "not part of this experiment"}


def _listed(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else names or []


def _value(found: dict[str, Any], figure: str, row: dict[str, Any], reason: str | None) -> dict[str, Any]:
    """The figure at a dotted path of `found`, in the row's unit; else the reason for its absence."""
    value: Any = found
    for key in figure.split("."):
        try:
            value = value[int(key) if isinstance(value, list) else key]
        except (KeyError, IndexError, TypeError):
            value = None
    if value is None:
        return {"reason": reason or "not recorded"}
    find = row["find"]
    return {"measured": value * SCALES.get(row["unit"], 1) * find.get("scale", 1) + find.get("offset", 0)}


def _on(found: dict[str, Any]) -> dict[str, Any]:
    machine = (found.get("environment") or {}).get("class")
    return {"on": device_name(machine)} if machine else {}


def _measured(found: dict[str, Any], row: dict[str, Any], kind: str) -> dict[str, Any]:
    """The figure of one row or pair of the programme; a failed one keeps its status."""
    if found["status"] != "ok":
        reason = found["reason"] if kind == "rows" else found["status_reason"]
        return {"status": found["status"], "reason": reason or found["status"]}
    figure = row["find"]["figure"]
    reasons = {"kernels_per_update": "profile_reason", "kernel_ms_per_update": "profile_reason"}
    reasons |= {"kernel_families": "profile_reason", "break_even_targets": "break_even_reason", "ratio": "ratio_reason"}
    why = "reason" if kind == "pairs" else reasons.get(figure.split(".")[0])
    return _value(found, figure, row, found[why] if why else None) | _on(found)


def _best(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest of several answers; the first reason where none was measured."""
    return max((f for f in found if "measured" in f), key=lambda f: f["measured"], default=found[0])


LATER = {"projections": "separate", "loss": "plain", "optimizer": "fused", "capture": "none", "tokens": "host"}
"""Settings that the published code did not have, with what it did."""


def _from_tuning(where: dict[str, Any], row: dict[str, Any], tuning: dict[str, Any] | None) -> dict[str, Any]:
    if tuning is None:
        return {"reason": "no tuning of this preset in this experiment"}
    wanted = {"compile_mode": "default", "sdpa_backend": "auto"} | LATER | where
    if not wanted["compile"]:
        del wanted["compile_mode"]
    for candidate in tuning["rows"]:
        execution = candidate.get("execution") or {}
        if all(execution.get(key, LATER.get(key)) == value for key, value in wanted.items()):
            if candidate["status"] != "ok":
                return {"status": candidate["status"], "reason": candidate.get("reason") or candidate["status"]}
            return _value(candidate, row["find"]["figure"], row, "not recorded")
    return {"reason": "no candidate of the grid has these settings"}


def _from_matched(arms: str | list[str], row: dict[str, Any], matched: dict[str, Any] | None) -> dict[str, Any]:
    if matched is None:
        return {"reason": "no matched runs of this preset in this experiment"}
    for arm in _listed(arms):
        if arm in matched["arms"]:
            return _value(matched["arms"][arm], row["find"]["figure"], row, matched["arms"][arm].get("reason"))
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
