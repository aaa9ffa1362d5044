"""The published figures are exact, complete, and never pass for measured ones."""

import copy
import re
from pathlib import Path

import pytest
import yaml

from speedproof.core.errors import UserError
from speedproof.evidence import published

ROOT = Path(__file__).resolve().parents[2]
SEED = ROOT.parent / "shared" / "seed"
RESULTS = (
    "update_ladder_20m",
    "rope_ablation_abba",
    "kernels_per_update_20m",
    "kernel_ms_over_3_updates",
    "matched_100m",
    "larger_models",
    "cold_start_20m",
    "synthetic_gpu_resident_20m",
    "tuning_decisions",
    "parity",
    "historical_rtx_20m",
    "allocation",
    "tests",
)


@pytest.fixture(scope="module")
def figures():
    return published.read_published(ROOT / "config" / "published.yaml")


@pytest.fixture
def summary(figures):
    """A GH200 experiment on the published recipe whose every figure is twice the published one."""
    recipe = {"model": {"context_length": 1024}, "targets_per_update": 32768, "precision": "bf16"}
    rows = [
        {
            "status": "ok",
            "targets_per_s": 490070,
            "peak_bytes": int(4.53 * 2**30),
            "execution": {"compile": False, "compile_mode": "max-autotune", "sdpa_backend": "auto", "microbatch": 8,
                          "rope": "uncached"},
        },
        {
            "status": "device_oom",
            "reason": "out of memory at microbatch 32",
            "targets_per_s": None,
            "execution": {"compile": True, "compile_mode": "default", "sdpa_backend": "auto", "microbatch": 32,
                          "rope": "cached"},
        },
    ]  # fmt: skip
    return {
        "device": {"name": "NVIDIA H200", "kind": "cuda"},
        "presets": {"20m": {"recipe": recipe, "total_targets": 100000768}},
        "tuning": {"20m": {"retention": 1.05, "rows": rows}},
        "matched": {"20m": {"arms": {"original": {"session_s": 375.135, "median_targets_per_s": 254483.0}}}},
        "parity": {"20m": {"trained": {"gradient_error": 0.0145, "gradient_tolerance": 0.05}}},
        "programme": None,
        "allocation": {"seconds": None, "gpu_hours": None, "reason": "no result was made in a SLURM job"},
        "extra": {},
    }


def by_id(rows):
    return {row["id"]: row for row in rows}


def leaves(value, path):
    """Every number of the report's tables under the id that the project gives it."""
    if isinstance(value, str) and re.fullmatch(r"[\d.]+e\d+", value):
        value = float(value)  # "5.0e6" is text to PyYAML, which wants a sign in the exponent
    if isinstance(value, bool | str):
        return {}
    if isinstance(value, int | float):
        return {path: value}
    found = {}
    for key, inner in value.items():
        if key == "order":
            continue
        if key == "mega_targets_per_s":
            found |= {f"{path}.{i}_{value['order'][i]}": rate for i, rate in enumerate(inner)}
        else:
            found |= leaves(inner, f"{path}.{key}")
    return found


@pytest.mark.skipif(not SEED.is_dir(), reason="the report's own tables are not beside this checkout")
def test_every_figure_of_the_tables_is_there_exactly(figures):
    tables = yaml.safe_load((SEED / "published-results.yaml").read_text())
    wanted = {}
    for section in RESULTS:
        if section == "update_ladder_20m":
            for step in tables[section]:
                name = re.sub(r"\W+", "_", step["name"].lower()) + f"_{step['microbatch']}"
                wanted |= {f"{section}.{name}.{key}": step[key] for key in ("targets_per_s", "peak_gib")}
        else:
            wanted |= leaves(tables[section], section)
    held = {name: row["value"] for name, row in figures["rows"].items() if not name.startswith("attribution.")}
    assert held == wanted
    assert figures["parameters"] == {name: preset["parameters"] for name, preset in tables["presets"].items()}
    assert figures["environment"]["device"] == tables["environment"]["gpu"]
    assert figures["comparable"]["full_validation_targets"] == tables["matched_100m"]["full_validation_targets"]


@pytest.mark.skipif(not SEED.is_dir(), reason="the report is not beside this checkout")
def test_attribution_stands_in_the_report(figures):
    report = (SEED / "gh200-training-performance.txt").read_text()
    for name in ("compilation_alone", "whole_ladder", "steady_training", "session"):
        assert f"{figures['rows'][f'attribution.{name}']['value']}×" in report


@pytest.mark.parametrize(
    "later", [{"loss": "chunked"}, {"loss": "triton"}, {"projections": "fused"}, {"capture": "graph"}]
)
def test_what_the_published_code_did_not_have_is_not_set_beside_it(later, figures, summary):
    candidates = summary["tuning"]["20m"]["rows"]
    fast = candidates[0] | {"targets_per_s": 10**6, "execution": candidates[0]["execution"] | later}
    candidates.insert(0, fast)
    rows = by_id(published.compare(figures, summary))
    assert rows["update_ladder_20m.original_eager_8.targets_per_s"]["measured"] == 490070


def test_measured_beside_published(figures, summary):
    rows = by_id(published.compare(figures, summary))
    assert len(rows) == len(figures["rows"])
    eager = rows["update_ladder_20m.original_eager_8.targets_per_s"]
    assert (eager["measured"], eager["published"], eager["status"]) == (490070, 245035, "measured")
    assert eager["ratio"] == pytest.approx(2.0)
    assert (eager["measured_on"], eager["published_on"]) == ("NVIDIA H200", "NVIDIA GH200 120GB")
    assert rows["update_ladder_20m.original_eager_8.peak_gib"]["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert rows["matched_100m.original_eager.session_s"]["ratio"] == pytest.approx(0.5)
    assert rows["parity.20m_trained.relative_gradient_error"]["ratio"] == pytest.approx(1.0)
    assert rows["tuning_decisions.retention_threshold"]["measured"] == pytest.approx(0.05)


def test_a_row_without_a_measurement_says_why(figures, summary):
    rows = by_id(published.compare(figures, summary))
    for row in rows.values():
        assert row["measured"] is not None or row["reason"]
        assert row["measured"] is not None or (row["ratio"] is None and row["measured_on"] is None)
    failed = rows["update_ladder_20m.final_compiled_with_cached_rope_32.targets_per_s"]
    assert (failed["status"], failed["reason"]) == ("device_oom", "out of memory at microbatch 32")
    assert rows["larger_models.50m.final_compiled"]["reason"] == "preset 50m is not part of this experiment"
    assert rows["historical_rtx_20m.synthetic_targets_per_s"]["status"] == "historical"
    summary["device"] = {"name": "some CPU", "kind": "cpu"}
    rows = by_id(published.compare(figures, summary))
    assert rows["kernels_per_update_20m.eager_mb8"]["reason"] == "needs CUDA"
    assert rows["update_ladder_20m.original_eager_8.peak_gib"]["measured"] is None


def test_another_recipe_gets_no_ratio(figures, summary):
    changed = copy.deepcopy(summary)
    changed["presets"]["20m"]["recipe"]["targets_per_update"] = 4096
    row = by_id(published.compare(figures, changed))["update_ladder_20m.original_eager_8.targets_per_s"]
    assert (row["measured"], row["ratio"]) == (490070, None)
    assert row["reason"] == "targets_per_update 4096, published 32768"
    changed = copy.deepcopy(summary)
    changed["presets"]["20m"]["total_targets"] = 1024
    rows = by_id(published.compare(figures, changed))
    assert rows["matched_100m.original_eager.session_s"]["ratio"] is None
    assert rows["matched_100m.original_eager.median_targets_per_s"]["ratio"] == pytest.approx(1.0)


def test_an_extra_answers_rows_by_id(figures, summary):
    summary["extra"] = {
        "cold_start": {
            "published_rows": {
                "cold_start_20m.first_update_s": {"measured": 34.08},
                "cold_start_20m.targets_per_s": {"measured": None, "status": "timeout", "reason": "took over 540 s"},
            }
        }
    }
    rows = by_id(published.compare(figures, summary))
    assert rows["cold_start_20m.first_update_s"]["ratio"] == pytest.approx(2.0)
    assert rows["cold_start_20m.targets_per_s"]["status"] == "timeout"


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "published.yaml"
    path.write_text("rows: {}")
    with pytest.raises(UserError, match=r"published\.yaml"):
        published.read_published(path)
    path.write_text("{source: s, environment: {}, comparable: {}, rows: {some.figure: {title: t}}}")
    with pytest.raises(UserError, match=r"some\.figure"):
        published.read_published(path)
