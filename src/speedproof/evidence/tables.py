"""A summary as people read it: summary.md with the verdicts first, CSV tables, and the rows behind the figures."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from speedproof.evidence import programme_tables
from speedproof.evidence.grid import GIB, flat, grid, number
from speedproof.evidence.plots import PHASES


def verdict_table(summary: dict[str, Any]) -> str:
    """The verdicts as aligned text, under 100 columns: what the last step prints and summary.md begins with."""
    head = ("preset", "arm", "targets/s", "steady", "session", "loss diff.", "parity", "confirmed against the default")
    rows = [
        (
            row["preset"],
            row["arm"],
            number(row["targets_per_s"], ",.0f"),
            number(row["speedup_steady"], ".2f", "×"),
            number(row["speedup_session"], ".2f", "×"),
            "reference" if row["reference"] else number(row["loss_difference_nats"], "+.6f"),
            {True: "holds", False: "FAILS", None: "–"}[row["parity_holds"]],
            _confirmed(row),
        )
        for row in summary["verdicts"]
    ]
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    right = {2, 3, 4, 5}

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows)])


def _confirmed(row: dict[str, Any]) -> str:
    if row["verdict"] is None or row["verdict"] == "default":
        return row["verdict"] or "–"
    interval = f" [{row['low']:.2f}, {row['high']:.2f}]" if row["low"] is not None else ""
    return f"{row['verdict']} {number(row['ratio'], '.2f', '×')}{interval}"


def notes(summary: dict[str, Any]) -> list[str]:
    """What must be read with the verdicts: the recommended execution and why, losses, machines, failed proofs."""
    lines = []
    for preset, tuning in summary["tuning"].items():
        recommended = tuning["recommended"]
        lines.append(f"{preset}: recommended is {recommended['name']}; {recommended['reason']}.")
    for preset, matched in summary["matched"].items():
        lines += [f"{preset}: arms {a} and {b} are the same execution." for a, b in matched.get("identical", [])]
        lines += [f"{preset}, {name}: did not train; {reason}." for name, reason in matched.get("failed", {}).items()]
        for name in matched["order"]:
            arm = matched["arms"][name]
            if name != matched["reference"]:
                lines.append(f"{preset}, {name}: {arm['loss_statement']}.")
            if arm["hosts"] != matched["arms"][matched["reference"]]["hosts"]:
                nodes = ", ".join(sorted({*arm["hosts"], *matched["arms"][matched["reference"]]["hosts"]}))
                lines.append(f"{preset}, {name}: compared with the reference across nodes ({nodes}).")
            if arm.get("reason"):
                lines.append(f"{preset}, {name}: {arm['reason']}.")
    for preset, checks in summary["parity"].items():
        lines += [f"{preset}: parity of {k} weights fails: {c['reason']}." for k, c in checks.items() if not c["holds"]]
    environment = summary["environment"]
    if environment["differing"] or len(environment["hosts"]) > 1:
        what = f" that differ in {', '.join(environment['differing'])}" if environment["differing"] else ""
        lines.append(
            f"Results come from several machines{what} ({', '.join(environment['hosts'])}): compare with care."
        )
    return lines


def markdown(summary: dict[str, Any]) -> str:
    """summary.md: verdicts, notes, tuning, matched runs, parity, published beside measured."""
    device = summary["device"]["name"]
    parts = [
        f"# {summary['experiment']}",
        f"Measured on {device}, torch {summary['environment']['class'].get('torch')}. Speed-ups are ratios to the "
        "reference arm; intervals are of fresh A B B A blocks against the default execution.",
        f"```\n{verdict_table(summary)}\n```",
        "\n".join(f"- {line}" for line in notes(summary)),
    ]
    for preset, tuning in summary["tuning"].items():
        parts += [f"## Tuning of {preset}", _tuning(tuning), _decisions(tuning)]
    for preset, matched in summary["matched"].items():
        parts += [f"## Matched runs of {preset}", _matched(matched), "### Where the seconds went", _waterfall(matched)]
    for preset, peers in summary["peers"].items():
        parts += [f"## {preset} beside {peers['implementation']} {peers['version']}", _peers(peers)]
    parts += programme_tables.sections(summary)
    parts += ["## Parity", _parity(summary)]
    parts += ["## Published beside measured", f"Published by others: {summary['published_source']}"]
    parts += [_published(summary)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _tuning(tuning: dict[str, Any]) -> str:
    rows = [
        (
            row["stage"],
            row["name"],
            number(row["targets_per_s"], ",.0f"),
            number(row["ratio_to_default"], ".3f"),
            number(row["warmup_s"], ",.1f"),
            number(row["peak_bytes"] and row["peak_bytes"] / GIB, ".2f"),
            row["status"] if row["status"] == "ok" else f"{row['status']}: {row['reason']}",
            ", ".join(map(str, row["flags"])),
        )
        for row in tuning["rows"]
    ]
    head = ("stage", "candidate", "targets/s", "to default", "warm-up s", "peak GiB", "status", "flags")
    return grid(head, rows, numeric={2, 3, 4, 5})


def _decisions(tuning: dict[str, Any]) -> str:
    lines = []
    for decision in tuning["decisions"]:
        challenger = decision["challenger"]
        result = "replaces the incumbent" if decision["retained"] else "does not replace the incumbent"
        who = f"{challenger['name']} {result}" if challenger else "the incumbent stays"
        lines.append(f"- {decision['stage']}: {who}: {decision['reason']}.")
    lines.append(f"- confirmation of {tuning['confirmation']['name']}: {tuning['confirmation']['reason']}.")
    lines.append(f"- selected (numerically fastest with parity): {tuning['selected']['name']}.")
    return "\n".join(lines)


def _matched(matched: dict[str, Any]) -> str:
    rows = [
        (
            name,
            number(arm["median_targets_per_s"], ",.0f"),
            number(arm["aggregate_targets_per_s"], ",.0f"),
            number(arm["speedup_steady"], ".2f"),
            number(arm["speedup_session"], ".2f"),
            number(arm["session_s"], ",.1f"),
            number(arm["full_validation_loss"], ".6f"),
            number(arm["loss_difference_nats"], "+.6f"),
            number(arm["repeat_spread_nats"], ".6f"),
            number(arm["break_even_targets"], ",.0f"),
        )
        for name, arm in ((name, matched["arms"][name]) for name in matched["order"])
    ]
    head = ("arm", "steady targets/s", "aggregate targets/s", "steady ×", "session ×", "session s", "loss nats")
    head += ("difference nats", "repeat spread nats", "break-even targets")
    return f"{matched['targets']:,} targets each.\n\n" + grid(head, rows, numeric=set(range(1, len(head))))


def _waterfall(matched: dict[str, Any]) -> str:
    phases = list(PHASES)
    rows = []
    for name in matched["order"]:
        seconds = matched["arms"][name]["phases_s"]
        rows.append((name, *(number(seconds.get(p), ",.1f") for p in phases), number(sum(seconds.values()), ",.1f")))
    return grid(("arm", *phases, "process s"), rows, numeric=set(range(1, len(phases) + 2)))


def _peers(peers: dict[str, Any]) -> str:
    """The same recipe by another implementation; every row compares two executions in the same blocks."""
    rows = [
        (
            row["name"],
            number(row["targets_per_s"], ",.0f"),
            number(row["peer_targets_per_s"], ",.0f"),
            number(row["ratio"], ".3f", "×"),
            f"[{row['low']:.3f}, {row['high']:.3f}]" if row["low"] is not None else "–",
            row["verdict"] + (f": {row['reason']}" if row["reason"] else ""),
            "holds" if row["parity"]["holds"] else f"FAILS: {row['parity']['reason']}",
        )
        for row in peers["rows"]
    ]
    head = ("execution", "targets/s", f"{peers['implementation']} targets/s", "ratio", "95 % interval", "verdict")
    return grid((*head, "peer's parity"), rows, numeric={1, 2, 3, 4})


def _parity(summary: dict[str, Any]) -> str:
    rows = [
        (
            preset,
            kind,
            number(check["fast_loss_nats"], ".6f"),
            number(check["reference_loss_nats"], ".6f"),
            number(check["loss_difference_nats"], "+.1e"),
            number(check["gradient_error"] and 100 * check["gradient_error"], ".3g", " %"),
            f"{check['worst_tensor']['name']} "
            + number(
                check["worst_tensor"]["gradient_error"] and 100 * check["worst_tensor"]["gradient_error"], ".3g", " %"
            ),
            "holds" if check["holds"] else f"FAILS: {check['reason']}",
        )
        for preset, checks in summary["parity"].items()
        for kind, check in checks.items()
    ]
    head = (
        "preset",
        "weights",
        "fast loss",
        "reference loss",
        "difference",
        "gradient error",
        "worst tensor",
        "parity",
    )
    text = grid(head, rows, numeric={2, 3, 4, 5})
    if summary["derivatives"]:
        checks = summary["derivatives"]["checks"]
        text += "\n\n" + "; ".join(f"{c['name']} {'holds' if c['holds'] else 'FAILS'} ({c['reason']})" for c in checks)
        text += ", in FP64 on a miniature."
    return text


def _published(summary: dict[str, Any]) -> str:
    rows = [
        (
            row["quantity"],
            row["unit"],
            _plain(row["published"]),
            _plain(row["measured"]),
            row["measured_on"] or "–",
            number(row["ratio"], ".3f"),
            row["status"].replace("_", " ") + (f": {row['reason']}" if row["reason"] else ""),
        )
        for row in summary["published"]
    ]
    on = next((row["published_on"] for row in summary["published"] if row["status"] != "historical"), "GH200")
    head = ("quantity", "unit", f"published ({on})", "measured", "measured on", "ratio", "status")
    return grid(head, rows, numeric={2, 3, 5})


def frames(summary: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """The CSV tables by name."""
    tuning = [{"preset": p, **flat(row)} for p, value in summary["tuning"].items() for row in value["rows"]]
    runs = [{"preset": p, **flat(row)} for p, value in summary["matched"].items() for row in value["runs"]]
    phases = [
        {"preset": preset, "arm": name, "phase": phase, "seconds": seconds}
        for preset, matched in summary["matched"].items()
        for name in matched["order"]
        for phase, seconds in matched["arms"][name]["phases_s"].items()
    ]
    parity = [
        {"preset": p, **{k: v for k, v in flat(check).items() if not k.startswith("environment.")}}
        for p, checks in summary["parity"].items()
        for check in checks.values()
    ]
    peers = [{"preset": p, **flat(row)} for p, value in summary["peers"].items() for row in value["rows"]]
    tables = {
        "verdicts": summary["verdicts"],
        "tuning": tuning,
        "matched": runs,
        "waterfall": phases,
        "parity": parity,
        **({"peers": peers} if peers else {}),
        "published": summary["published"],
    } | programme_tables.rows(summary)
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


def ladder_rows(tuning: dict[str, Any]) -> list[dict[str, Any]]:
    """Bars of the throughput ladder, one an execution that ran; see plots.ladder."""
    roles = [(tuning[role]["execution"], role) for role in ("default", "recommended", "selected")]
    rows: dict[str, dict[str, Any]] = {}
    for row in tuning["rows"]:
        if row["targets_per_s"] is not None:
            role = next((role for execution, role in roles if execution == row["execution"]), "candidate")
            values = {"role": role, "targets_per_s": row["targets_per_s"], "ratio": row["ratio_to_default"]}
            rows[row["name"]] = {"name": row["name"], **values}
    return list(rows.values())


def _plain(value: float | None) -> str:
    """A figure in full from 1000 on, with separators; below that as exact as it was given."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.7g}"
