"""Figures hold the numbers they were given, in order and with their differences, and are written whole."""

import pytest

from speedproof.evidence import plots


def rows_with(chart, key):
    """Every data row of a chart that has `key`, wherever in its specification the data lie."""
    found = []

    def walk(value):
        if isinstance(value, dict):
            if key in value:
                found.append(value)
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(chart.to_dict())
    return found


def test_ladder_is_sorted_and_labelled():
    rows = [
        {"name": "b", "role": "recommended", "targets_per_s": 1_636_281.0, "ratio": 6.678},
        {"name": "a", "role": "default", "targets_per_s": 245_035.0, "ratio": 1.0},
        {"name": "c", "role": "candidate", "targets_per_s": 713_010.0, "ratio": None},
    ]
    chart = plots.ladder(rows, "title", "some device")
    assert [row["name"] for row in rows_with(chart, "k")] == ["a", "c", "b"]
    assert [row["label"] for row in rows_with(chart, "k")] == ["245k · 1.00×", "713k", "1.636M · 6.68×"]
    assert "some device" in chart.to_json()


def test_curves_differ_from_the_reference_where_both_have_a_point():
    points = [
        {"arm": arm, "targets": targets, "loss_nats": 5.0 + shift, "kind": kind}
        for arm, shift in (("fast", 0.002), ("original", 0.0))
        for kind in ("training", "validation")
        for targets in (1000, 2000)
    ]
    points.append({"arm": "fast", "targets": 3000, "loss_nats": 4.0, "kind": "training"})
    differences = rows_with(plots.learning_curves(points, "original", "title", "device"), "difference")
    assert {row["arm"]: row["difference"] for row in differences} == pytest.approx({"fast": 2.0, "original": 0.0})
    assert 3000 not in {row["targets"] for row in differences}


def test_waterfall_pieces_follow_each_other():
    phases = {"updates": 10.0, "startup": 4.0, "full validation": 8.0, "checkpoints": 0.0}
    chart = plots.waterfall([{"arm": "original", "phases": phases}], "title", "device")
    pieces = [(row["phase"], row["from"], row["to"]) for row in rows_with(chart, "middle")]
    assert pieces == [("startup", 0.0, 4.0), ("updates", 4.0, 14.0), ("full validation", 14.0, 22.0)]
    assert [row["label"] for row in rows_with(chart, "total")] == ["22.0 s"]


def test_saved_as_svg_and_png_whole_or_not_at_all(tmp_path, monkeypatch):
    chart = plots.ladder([{"name": "a", "role": "default", "targets_per_s": 1.0, "ratio": 1.0}], "title", "device")
    svg, png = plots.save(chart, tmp_path / "figures" / "ladder-20m.v2")
    assert (svg.name, png.name) == ("ladder-20m.v2.svg", "ladder-20m.v2.png")
    before = png.read_bytes()
    assert before.startswith(b"\x89PNG")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("speedproof.core.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        plots.save(chart, tmp_path / "figures" / "ladder-20m.v2")
    assert png.read_bytes() == before
    assert sorted(path.name for path in svg.parent.iterdir()) == [svg.name, png.name][::-1]
