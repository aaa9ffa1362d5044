"""The programme, its attribution and its allocation as people read them."""

from typing import Any

from speedproof.evidence.grid import GIB, flat, grid, number
from speedproof.measure.trace import FAMILIES


def sections(summary: dict[str, Any]) -> list[str]:
    """The parts of summary.md that say what the programme measured; none without a programme."""
    single, pairs = (_ordered(summary["programme"], kind) for kind in ("rows", "pairs"))
    found = []
    if single:
        found += ["## Programme: single measurements", _rows(single)]
    if any(row["kernel_families"] for _, row in single):
        found += ["### Kernels and their time", _kernels(single)]
    if pairs:
        found += ["## Programme: pairs in A B B A blocks", _pairs(pairs)]
    if attribution := _attribution(summary["published"]):
        found += ["## Attribution", attribution]
    return [*found, "## Partial batches", _partial(summary["matched"]), "## Allocation", _allocation(summary)]


def rows(summary: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """CSV tables by name."""
    return {
        f"programme_{kind}": [
            {"name": name} | {k: v for k, v in flat(found).items() if not k.startswith("environment.")}
            for name, found in _ordered(summary["programme"], kind)
        ]
        for kind in ("rows", "pairs")
    }


def ladders(summary: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Bars of the update ladder by preset, in the order of the config; see plots.ladder."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, row in _ordered(summary["programme"], "rows"):
        if "ladder" in row["parts"] and row["targets_per_s"] is not None:
            bar = {"name": name, "targets_per_s": row["targets_per_s"], "ratio": row["ratio"]}
            found.setdefault(row["preset"], []).append(
                bar | {"role": "default" if row["against"] is None else "candidate"}
            )
    return found


def _ordered(programme: dict[str, Any] | None, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Rows or pairs in the order of the config."""
    return [(name, programme[kind][name]) for name in programme["order"][kind]] if programme else []


def _rows(found: list[tuple[str, dict[str, Any]]]) -> str:
    lines = [
        (
            name,
            row["preset"],
            ", ".join(row["parts"]),
            number(row["targets_per_s"], ",.0f"),
            number(row["ratio"], ".3f") + (f" × {row['against']}" if row["ratio"] else ""),
            number(row["first_update_s"], ",.2f"),
            number(row["warmup_s"], ",.2f"),
            row["compiler_cache"] or "–",
            number(row["break_even_targets"], ",.0f"),
            number(row["peak_bytes"] and row["peak_bytes"] / GIB, ".2f"),
            number(row["energy_j_per_million_targets"], ",.1f"),
            row["status"] if row["status"] == "ok" else f"{row['status']}: {row['reason']}",
            "; ".join(row["flags"]),
        )
        for name, row in found
    ]
    head = ("row", "preset", "parts", "targets/s", "rate against", "first update s", "warm-up s", "compiler cache")
    head += ("break-even targets", "peak GiB", "J per million targets", "status", "flags")
    said = (
        "Each row is one fresh process, so its ratio is a point estimate. A break-even charges the row with its whole "
    )
    said += "warm-up and the row that it is set against with none."
    reasons = sorted({row["energy_reason"] for _, row in found if row["energy_reason"]})
    said += "".join(f" Energy: {reason}." for reason in reasons)
    return f"{said}\n\n" + grid(head, lines, numeric={3, 4, 5, 6, 8, 9, 10})


def _kernels(found: list[tuple[str, dict[str, Any]]]) -> str:
    lines = []
    for name, row in found:
        if families := row["kernel_families"]:
            times = (number(families[family]["ms_per_update"], ",.2f") for family in FAMILIES)
            kernels = number(row["kernels_per_update"], ",.0f")
            lines.append((name, row["profile_kind"], kernels, number(row["kernel_ms_per_update"], ",.2f"), *times))
    reasons = sorted({row["profile_reason"] for _, row in found if row["profile_reason"]})
    head = ("row", "traced", "kernels an update", "ms an update", *(f"{family} ms" for family in FAMILIES))
    said = "".join(f"{reason[0].upper()}{reason[1:]}.\n\n" for reason in reasons)
    return said + grid(head, lines, numeric=set(range(2, len(head))))


def _pairs(found: list[tuple[str, dict[str, Any]]]) -> str:
    lines = [
        (
            name,
            pair["preset"],
            ", ".join(pair["parts"]),
            "; ".join(f"{key} {a} → {b}" for key, (a, b) in pair["differing"].items()) or "control: the same twice",
            number(pair["a_targets_per_s"], ",.0f"),
            number(pair["b_targets_per_s"], ",.0f"),
            pair["label"] or "–",
            pair["verdict"],
            pair["no_regression"],
            pair["status"] if pair["status"] == "ok" else f"{pair['status']}: {pair['status_reason']}",
        )
        for name, pair in found
    ]
    head = (
        "pair",
        "preset",
        "parts",
        "A → B",
        "A targets/s",
        "B targets/s",
        "B over A",
        "gain",
        "regression",
        "status",
    )
    return grid(head, lines, numeric={4, 5})


def _attribution(published: list[dict[str, Any]]) -> str:
    """The speed-ups by cause, each beside the published one."""
    lines = [
        f"- {row['quantity']}: {number(row['measured'], '.2f', '×')}, published {row['published']:g}× on "
        f"{row['published_on']}" + (f" ({row['reason']})" if row["reason"] else "")
        for row in published
        if row["id"].startswith("attribution.") and row["measured"] is not None
    ]
    return "\n".join(lines)


def _partial(matched: dict[str, Any]) -> str:
    """What the shorter last microbatches of each arm's epochs did: sizes, compiles, and the guards that failed."""
    lines = [
        (
            preset,
            name,
            arm["execution"]["partial"] if arm["execution"]["compile"] else "eager throughout",
            ", ".join(str(shape[0]) for shape in arm.get("partial_shapes") or []) or "none",
            number(arm.get("compiles"), "d"),
            number(arm["training_update_s"], ",.2f"),
            "; ".join(arm.get("recompile_reasons") or []) or "–",
        )
        for preset, found in matched.items()
        for name, arm in found["arms"].items()
    ]
    head = ("preset", "arm", "partial batches", "their blocks", "compiles", "training-update s", "guards that failed")
    return grid(head, lines, numeric={4, 5}) if lines else "No matched runs."


def _allocation(summary: dict[str, Any]) -> str:
    found = summary["allocation"]
    if found["seconds"] is None:
        return f"Not known: {found['reason']}."
    running = f"; still running, so counted up to now: {', '.join(found['running'])}" if found["running"] else ""
    return (
        f"{found['seconds']:,} s, {found['gpu_hours']:.2f} GPU-hours by sacct over {len(found['jobs'])} jobs that made "
        f"these results{running}."
    )
