"""The three figures: throughput ladder, learning curves of the matched arms, session waterfall.

Each function takes plain rows and returns an Altair chart; `save` writes it as SVG and PNG without a browser or
network. The colours are those of Okabe and Ito, which people with colour-blindness can tell apart.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from speedproof.core import files

ARM_COLOURS = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
PHASES = {
    "startup": "#bbbbbb",
    "compile": "#e69f00",
    "updates": "#0072b2",
    "subset scan": "#f0e442",
    "epoch validation": "#56b4e9",
    "checkpoints": "#cc79a7",
    "full validation": "#009e73",
    "other": "#dddddd",
}
"""Parts of a session in the order in which they happen, with their colours."""

ROLES = {"default": "#4d4d4d", "recommended": "#0072b2", "selected": "#d55e00", "candidate": "#b3cde3"}
"""What a bar of the ladder is; `selected` is the fastest one where it is not recommended."""

WIDTH = 620


def ladder(rows: Sequence[dict[str, Any]], title: str, device: str) -> alt.Chart:
    """Rates of the successful candidates, slowest first, with their ratio to the default execution.

    A row is {"name", "role" (a key of ROLES), "targets_per_s", "ratio" or None}.
    """
    values = [
        row
        | {
            "k": row["targets_per_s"] / 1e3,
            "label": _rate(row["targets_per_s"]) + (f" · {row['ratio']:.2f}×" if row.get("ratio") else ""),
        }
        for row in sorted(rows, key=lambda row: row["targets_per_s"])
    ]
    roles = [role for role in ROLES if any(row["role"] == role for row in values)]
    top = max((row["k"] for row in values), default=1.0)
    base = alt.Chart(alt.InlineData(values=values)).encode(
        y=alt.Y(
            "name:N", sort=None, title=None, axis=alt.Axis(ticks=False, domain=False, labelLimit=330, labelPadding=6)
        )
    )
    bars = base.mark_bar(height={"band": 0.72}).encode(
        x=alt.X("k:Q", title="thousand targets/s (median window)", scale=alt.Scale(domain=[0, top * 1.24], nice=False)),
        color=alt.Color(
            "role:N",
            scale=alt.Scale(domain=roles, range=[ROLES[role] for role in roles]),
            legend=alt.Legend(title=None, orient="top"),
        ),
    )
    text = base.mark_text(align="left", dx=5).encode(x="k:Q", text="label:N")
    return _finish((bars + text).properties(width=WIDTH - 180, height={"step": 22}), title, f"measured on {device}")


def learning_curves(points: Sequence[dict[str, Any]], reference: str, title: str, device: str) -> alt.Chart:
    """Loss of each arm over the targets seen, and below it the difference of each arm to the reference arm.

    A point is {"arm", "targets", "loss_nats", "kind": "training" | "validation"}; the arms share a recipe, so their
    points lie at the same targets; a difference is drawn where they do.
    """
    arms = [reference, *sorted({p["arm"] for p in points} - {reference})]
    most = max((p["targets"] for p in points), default=0)
    scale, word = (1e6, "million") if most >= 1e6 else (1e3, "thousand")
    values = [p | {"seen": p["targets"] / scale} for p in points]
    at_reference = {(p["kind"], p["targets"]): p["loss_nats"] for p in points if p["arm"] == reference}
    differences = [
        p | {"difference": 1e3 * (p["loss_nats"] - at_reference[p["kind"], p["targets"]])}
        for p in values
        if (p["kind"], p["targets"]) in at_reference
    ]
    colour = alt.Color(
        "arm:N",
        scale=alt.Scale(domain=arms, range=list(ARM_COLOURS[: len(arms)])),
        legend=alt.Legend(title=None, orient="top", labelLimit=300),
    )
    x = alt.X("seen:Q", title=None)
    dash = alt.StrokeDash("arm:N", scale=alt.Scale(domain=arms, range=_dashes(len(arms))), legend=None)

    def layer(rows: list[dict[str, Any]], y: alt.Y, x: alt.X) -> alt.LayerChart:
        # Arms that agree lie on each other: dashes let the lower line show through.
        base = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=y, color=colour)
        lines = base.transform_filter("datum.kind == 'training'").mark_line(strokeWidth=1.8).encode(strokeDash=dash)
        marks = base.transform_filter("datum.kind == 'validation'").mark_point(size=70, filled=False, strokeWidth=2)
        return lines + marks.encode(shape=alt.Shape("arm:N", scale=alt.Scale(domain=arms), legend=None))

    top = layer(values, alt.Y("loss_nats:Q", title="loss (nats a target)", scale=alt.Scale(zero=False)), x)
    bottom = layer(
        differences,
        alt.Y("difference:Q", title=["difference to", f"{reference} (millinats)"]),
        alt.X("seen:Q", title=f"{word} targets seen"),
    )
    chart = alt.vconcat(top.properties(width=WIDTH, height=260), bottom.properties(width=WIDTH, height=120))
    return _finish(chart, title, f"lines: training windows; marks: validation subset; measured on {device}")


def waterfall(sessions: Sequence[dict[str, Any]], title: str, device: str) -> alt.Chart:
    """Where the seconds of each arm's process went, in the order in which they passed.

    A session is {"arm", "phases": {a key of PHASES: seconds}}; phases that took nothing are left out.
    """
    pieces, totals = [], []
    for session in sessions:
        at = 0.0
        for phase in PHASES:
            seconds = session["phases"].get(phase) or 0.0
            pieces.append({"arm": session["arm"], "phase": phase, "from": at, "to": at + seconds, "seconds": seconds})
            at += seconds
        totals.append({"arm": session["arm"], "total": at, "label": f"{at:,.1f} s"})
    whole = max((row["total"] for row in totals), default=1.0) or 1.0
    for piece in pieces:
        wide = piece["seconds"] > 0.055 * whole
        piece |= {"middle": (piece["from"] + piece["to"]) / 2, "label": f"{piece['seconds']:,.1f}" if wide else ""}
    y = alt.Y("arm:N", sort=None, title=None, axis=alt.Axis(ticks=False, domain=False, labelLimit=250, labelPadding=6))
    shown = [phase for phase in PHASES if any(piece["phase"] == phase and piece["seconds"] > 0 for piece in pieces)]
    scale = alt.Scale(domain=[0, whole * 1.12], nice=False)
    base = alt.Chart(alt.InlineData(values=[piece for piece in pieces if piece["seconds"] > 0]))
    bars = base.mark_bar(height={"band": 0.66}, stroke="white", strokeWidth=0.7).encode(
        y=y,
        x=alt.X("from:Q", title="seconds from the start of the process", scale=scale),
        x2="to:Q",
        color=alt.Color(
            "phase:N",
            scale=alt.Scale(domain=shown, range=[PHASES[phase] for phase in shown]),
            legend=alt.Legend(title=None, orient="top"),
        ),
    )
    inside = base.mark_text(fontSize=11).encode(
        y=y,
        x="middle:Q",
        text="label:N",
        color=alt.condition(
            "datum.phase == 'updates' || datum.phase == 'full validation'", alt.value("white"), alt.value("black")
        ),
    )
    ends = (
        alt.Chart(alt.InlineData(values=totals))
        .mark_text(align="left", dx=6, fontWeight="bold")
        .encode(y=y, x="total:Q", text="label:N")
    )
    return _finish((bars + inside + ends).properties(width=WIDTH, height={"step": 44}), title, f"measured on {device}")


def save(chart: alt.Chart, stem: Path) -> list[Path]:
    """Write `<stem>.svg` and `<stem>.png`; returns the two paths."""
    import vl_convert

    specification = chart.to_dict()
    made = []
    for suffix, content in (
        (".svg", vl_convert.vegalite_to_svg(specification).encode()),
        (".png", vl_convert.vegalite_to_png(specification, scale=2)),
    ):
        path = stem.with_name(stem.name + suffix)
        with files.atomic(path) as stream:
            stream.write(content)
        made.append(path)
    return made


def _rate(targets_per_s: float) -> str:
    if targets_per_s >= 1e6:
        return f"{targets_per_s / 1e6:.3f}M"
    return f"{targets_per_s / 1e3:.3g}k"


def _dashes(count: int) -> list[list[int]]:
    return [[1, 0], [6, 4], [2, 3], [8, 3, 2, 3], [4, 2], [1, 2]][:count]


def _finish(chart: alt.Chart, title: str, subtitle: str) -> alt.Chart:
    return (
        chart.properties(title=alt.TitleParams(text=title, subtitle=subtitle, anchor="start", offset=12), padding=14)
        .configure_view(stroke=None)
        .configure_axis(gridColor="#e8e8e8", labelFontSize=12, titleFontSize=12, titleFontWeight="normal")
        .configure_title(fontSize=15, subtitleFontSize=12, subtitleColor="#555555")
        .configure_legend(labelFontSize=12, symbolSize=120)
        .configure_text(fontSize=12)
    )
