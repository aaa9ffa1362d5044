"""The summary of a whole experiment, made from what the tuner and the matched comparison really write."""

import copy
import importlib.util
import json
import shutil
from pathlib import Path

import jsonschema
import pandas as pd
import pytest
import yaml

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.identity import digest
from speedproof.evidence import plots, summary, tables
from speedproof.evidence.arms import resolve_arms
from speedproof.evidence.matched import compare, read_run
from speedproof.evidence.published import read_published
from speedproof.evidence.recommend import recommend
from speedproof.evidence.stages import stage_names
from speedproof.evidence.tuner import Tuner, finalists
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import Experiment, recipe_for
from speedproof.settings.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Experiment.parse(yaml.safe_load((ROOT / "config" / "default.yaml").read_text()))
FIGURES = read_published(ROOT / "config" / "published.yaml")
RECIPE = Recipe.parse(recipe_for("nano", CONFIG, ROOT / "config" / "presets", "tokens").plain() | {"precision": "fp32"})
MACHINE = {
    "class": {"device": "cpu", "cpu": "Example CPU", "cpus": 2, "torch": "2.13.0"},
    "facts": {"hostname": "node1", "compiler_cache_warm": True},
}


def record(name, execution):
    failed = execution["sdpa_backend"] == "math"
    rate = 1000.0 * (1.5 if execution["compile"] else 1.0) * (1.1 if execution["microbatch"] == 16 else 1.0)
    return {
        "name": name,
        "status": "timeout" if failed else "ok",
        "reason": "took | longer than 540 s" if failed else None,
        "recipe": RECIPE.plain(),
        "protocol": CONFIG.protocol.measuring(),
        "environment": MACHINE,
        "execution": execution,
        "targets_per_s": None if failed else rate,
        "windows": [] if failed else [{"targets_per_s": rate}] * 3,
        "warmup": {"first_update_s": 1.5, "total_s": 2.0},
        "memory": {"peak_bytes": 2**30},
        "flags": ["drift"] if execution["microbatch"] == 16 else [],
    }


def check(execution, kind="fresh", **changes):
    found = {
        "holds": True, "reason": "losses and gradients agree within the tolerances", "kind": kind, "preset": "nano",
        "fast_loss_nats": 4.1, "reference_loss_nats": 4.1001, "loss_difference_nats": -1e-4,
        "loss_tolerance_nats": 1e-3, "gradient_error": 0.0045, "gradient_tolerance": 0.05,
        "worst_tensor": {"name": "norm.weight", "gradient_error": 0.01}, "blocks": 16, "targets": 4096,
        "execution": execution, "environment": MACHINE,
    }  # fmt: skip
    return found | changes


def tuning():
    records = []

    def tuner():
        return Tuner(CONFIG.execution, CONFIG.tuning, RECIPE, records, retention=1.05)

    for stage in stage_names(CONFIG.tuning, CONFIG.execution):
        for slot in tuner().run(until=stage).plan(stage).plain()["slots"]:
            records.append({"status": "skipped"} if "skipped" in slot else record(slot["name"], slot["execution"]))
    found = finalists(tuner())
    compared = {
        "status": "ok", "reason": None, "a": found["default"], "b": found["recommended"],
        "blocks": [[1000.0, 1640.0, 1660.0, 1000.0], [1000.0, 1650.0, 1650.0, 1001.0], [999.0, 1650.0, 1655.0, 1000.0]],
    }  # fmt: skip
    checks = {
        "checks": [check(found["selected"][0]["execution"]), check(found["default"])],
        "recommended": check(found["recommended"]),
    }
    return recommend(found, compared, checks, records, retention=1.05, no_regression=0.98), checks


def write_run(folder, arm, execution, loss, rate):
    folder = folder / f"{arm}-seed42-repeat0"
    folder.mkdir(parents=True)
    compile_s = 5.0 if execution["compile"] else 0.0
    updates_s = 200_000 / rate + compile_s
    result = {
        "status": "ok", "recipe_digest": digest(RECIPE.plain()), "execution": execution, "data": "tokens",
        "targets": RECIPE.total_targets, "updates": 49, "median_targets_per_s": rate, "training_update_s": updates_s,
        "first_window_s": 12288 / rate + compile_s, "startup_s": 4.0, "epoch_validation_s": 2.0, "checkpoint_s": 0.1,
        "subset_scan_s": 0.1, "training_phase_s": updates_s + 2.2, "full_validation_s": 8.0,
        "session_s": updates_s + 10.2, "process_s": updates_s + 14.5, "full_validation_loss": loss,
        "full_validation_targets": 100_000, "peak_memory_bytes": 2**29, "compiles": 1, "recompile_reasons": [],
        "partial_shapes": [[1, 256]], "resumed": False, "environment": MACHINE,
    }  # fmt: skip
    files.write_json(folder / "result.json", result)
    files.write_yaml(folder / "recipe.yaml", RECIPE.plain())
    lines = [{"targets": 12288 * k, "loss": 7.5 - 0.2 * k + loss / 100} for k in range(1, 9)]
    lines.insert(4, {"epoch": 1, "targets": 49152, "validation_loss": 6.9, "seconds": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "result.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Results of an experiment with one preset, as the rules leave them."""
    results = tmp_path_factory.mktemp("results") / "default"
    nano = results / "nano"
    files.write_yaml(nano / "recipe.yaml", RECIPE.plain())
    table, checks = tuning()
    files.write_json(nano / "tuning" / "tuning.json", table)
    files.write_json(nano / "tuning" / "finalist_parity.json", checks)
    fast = table["recommended"]["execution"]
    bases = {"default": CONFIG.execution, "recommended": Execution.parse(fast)}
    arms = resolve_arms(RECIPE, CONFIG.matched.arms, bases)
    rates = {"original": (4.2, 1000.0), "recommended": (4.2001, 1650.0), "compiled_partial": (4.1999, 1640.0)}
    runs = [
        read_run(write_run(nano / "matched" / "runs", name, arms["arms"][name]["execution"], *rates[name]))
        for name in arms["order"]
    ]
    files.write_json(nano / "matched" / "matched.json", compare(runs, arms, "original"))
    files.write_json(nano / "parity" / "fresh.json", check(fast))
    files.write_json(nano / "parity" / "trained.json", check(fast, "trained"))
    derived = {"name": "gradcheck", "holds": True, "reason": "agrees", "tolerance": 1e-6, "relative_error": None}
    files.write_json(results / "parity" / "derivatives.json", {"holds": True, "checks": [derived]})
    cache = {"identity": "tokens", "vocab_size": 2048, "train": {"tokens": 300_000}, "validation": {"tokens": 100_001}}
    files.write_json(results / "data" / "bpe-2048" / "token_cache.json", cache)
    return results


@pytest.fixture(scope="module")
def found(made):
    return summary.summarise("default", made, None, FIGURES)


def test_verdicts(found):
    rows = {row["arm"]: row for row in found["verdicts"]}
    assert list(rows) == ["original", "recommended", "compiled_partial"]
    recommended = rows["recommended"]
    assert recommended["verdict"] == "retained"
    assert recommended["low"] < recommended["ratio"] < recommended["high"]
    assert recommended["speedup_steady"] == pytest.approx(1.65)
    assert recommended["loss_difference_nats"] == pytest.approx(1e-4)
    assert recommended["parity_holds"] is True
    assert (rows["original"]["verdict"], rows["original"]["reference"]) == ("default", True)
    assert rows["original"]["parity_holds"] is True
    # Nobody checked or confirmed this one, and nothing is borrowed from the others.
    assert (rows["compiled_partial"]["verdict"], rows["compiled_partial"]["parity_holds"]) == (None, None)


def test_the_printed_table_fits_and_says_what_counts(found):
    text = tables.verdict_table(found)
    assert max(map(len, text.splitlines())) <= 110
    line = next(line for line in text.splitlines() if " recommended " in line)
    assert "1.65×" in line
    assert "holds" in line
    assert "retained 1.65× [1.6" in line
    assert "+0.000100" in line


def test_a_failed_parity_is_shouted(made, found):
    changed = copy.deepcopy(found)
    for row in changed["verdicts"]:
        row["parity_holds"] = False
    changed["parity"]["nano"]["fresh"] |= {"holds": False, "reason": "aggregate gradient error 6.00 %"}
    assert "FAILS" in tables.verdict_table(changed)
    assert "nano: parity of fresh weights fails: aggregate gradient error 6.00 %." in tables.notes(changed)
    assert "FAILS: aggregate" in tables.markdown(changed)


def test_names_that_others_rely_on(found):
    assert found["tuning"]["nano"]["recommended"]["targets_per_s"] > 0
    assert found["matched"]["nano"]["arms"]["recommended"]["targets_per_s"] == 1650.0
    assert found["parity"]["nano"]["trained"]["gradient_error"] == 0.0045
    assert found["presets"]["nano"]["parameters"] == RECIPE.model.parameters
    assert found["provenance"]["token_caches"]["bpe-2048"]["train_tokens"] == 300_000
    assert found["device"] == {"kind": "cpu", "name": "Example CPU, 2 CPUs"}


def test_every_published_row_is_there_and_none_is_measured_by_a_toy(found):
    assert [row["id"] for row in found["published"]] == list(FIGURES["rows"])
    assert not [row["id"] for row in found["published"] if row["measured"] is not None]
    assert all(row["reason"] for row in found["published"])


def test_schema_refuses_what_is_wrong(found):
    summary.validate(found)
    for path, value in (
        (("tuning", "nano", "rows", 0, "targets_per_s"), "1000"),
        (("matched", "nano", "arms", "original", "session_s"), "long"),
        (("verdicts", 0, "verdict"), "great"),
        (("published", 0, "reason"), None),
        (("unknown",), 1),
    ):
        changed = copy.deepcopy(found)
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(UserError, match=r"does not fit summary\.schema\.json"):
            summary.validate(changed)
    changed = copy.deepcopy(found)
    del changed["matched"]["nano"]["arms"]["original"]["targets_per_s"]
    with pytest.raises(UserError, match="targets_per_s"):
        summary.validate(changed)
    jsonschema.Draft202012Validator.check_schema(json.loads(summary.SCHEMA.read_text()))


def test_markdown_tables_are_whole(found):
    text = tables.markdown(found)
    assert text.index("confirmed against the default") < text.index("## Tuning of nano")
    assert "took \\| longer than 540 s" in text  # a bar in a reason does not end its cell
    for block in text.split("\n\n"):
        if block.startswith("|"):
            bars = {line.replace("\\|", "").count("|") for line in block.splitlines()}
            assert len(bars) == 1, block
    assert "needs CUDA" in text
    assert "preset 20m is not part of this experiment" in text


def test_an_experiment_without_matched_runs(made, tmp_path):
    import shutil

    results = tmp_path / "default"
    shutil.copytree(made, results)
    shutil.rmtree(results / "nano" / "matched")
    (results / "parity" / "derivatives.json").unlink()
    found = summary.summarise("default", results, None, FIGURES)
    assert [row["arm"] for row in found["verdicts"]] == ["default", "recommended"]
    assert found["verdicts"][1]["verdict"] == "retained"
    assert found["derivatives"] is None
    assert tables.markdown(found)


def test_results_of_several_machines_are_marked(made, tmp_path):
    import shutil

    results = tmp_path / "default"
    shutil.copytree(made, results)
    other = {"class": MACHINE["class"] | {"cpu": "Another CPU"}, "facts": {"hostname": "node2"}}
    path = results / "nano" / "parity" / "trained.json"
    files.write_json(path, files.read_json(path) | {"environment": other})
    found = summary.summarise("default", results, None, FIGURES)
    assert (found["environment"]["differing"], found["environment"]["hosts"]) == (["cpu"], ["node1", "node2"])
    assert any("several machines that differ in cpu (node1, node2)" in line for line in tables.notes(found))


def test_wrong_parts_are_named(made, tmp_path):
    import shutil

    with pytest.raises(UserError, match=r"recipe\.yaml"):
        summary.summarise("default", tmp_path, None, FIGURES)
    results = tmp_path / "default"
    shutil.copytree(made, results)
    (results / "nano" / "matched" / "matched.json").write_text("{")
    with pytest.raises(UserError, match=r"matched\.json: is not valid JSON"):
        summary.summarise("default", results, None, FIGURES)
    shutil.copytree(made / "nano", results / "micro")
    with pytest.raises(UserError, match="preset nano, its folder says micro"):
        summary.summarise("default", results, ["micro"], FIGURES)


def test_script_writes_all_and_the_same_again(made, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("summarise", ROOT / "src" / "scripts" / "summarise.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    extra = tmp_path / "extra.json"
    extra.write_text('{"published_rows": {"allocation.seconds": {"measured": 7984.0}}}')

    def write(folder):
        module.main(
            experiment="default",
            results=made,
            output=folder / "summary.json",
            markdown=folder / "summary.md",
            tables=folder / "tables",
            figures=folder / "figures",
            preset=None,
            extra=[f"allocation={extra}"],
        )

    write(tmp_path / "a")
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].startswith("preset  arm")
    value = files.read_json(tmp_path / "a" / "summary.json")
    assert next(row for row in value["published"] if row["id"] == "allocation.seconds")["ratio"] == 2.0
    for name in ("ladder", "learning-curves", "waterfall"):
        figure = tmp_path / "a" / "figures" / f"{name}-nano"
        assert figure.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in figure.with_suffix(".svg").read_text()
    table = pd.read_csv(tmp_path / "a" / "tables" / "tuning.csv")
    assert set(table["status"]) == {"ok", "timeout"}
    assert table["targets_per_s"].max() == pytest.approx(1650.0)
    assert len(pd.read_csv(tmp_path / "a" / "tables" / "published.csv")) == len(FIGURES["rows"])
    write(tmp_path / "b")
    for name in ("summary.json", "summary.md", "figures/ladder-nano.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    module_error = {"extra": ["nothing"]}
    with pytest.raises(UserError, match="--extra"):
        module.main("default", made, extra, extra, tmp_path, tmp_path, **module_error)


def test_figures_get_what_the_summary_holds(made, found):
    rows = tables.ladder_rows(found["tuning"]["nano"])
    assert {row["role"] for row in rows} >= {"default", "recommended"}
    assert "timeout" not in {row["role"] for row in rows}
    points = summary.learning_curves(made, "nano", found["matched"]["nano"])
    assert [sum(p["kind"] == kind for p in points) for kind in ("training", "validation")] == [24, 3]
    assert set(plots.PHASES) == set(found["matched"]["nano"]["arms"]["original"]["phases_s"])


def test_peers_have_a_table_once_they_were_measured(made, found, tmp_path):
    assert "beside transformers" not in tables.markdown(found)
    assert "peers" not in tables.frames(found)
    results = tmp_path / "default"
    shutil.copytree(made, results)
    native = CONFIG.execution
    row = {
        "name": "default", "targets_per_s": 1500.0, "peer_targets_per_s": 1000.0, "ratio": 1.5, "low": 1.4,
        "high": 1.6, "blocks": 3, "smallest_effect": 0.02, "verdict": "faster", "reason": None,
        "execution": native.plain(), "peer_execution": native.peer("transformers").plain(),
        "parity": {"holds": True, "reason": "agrees"}, "environment": MACHINE,
    }  # fmt: skip
    peers = {"implementation": "transformers", "version": "5.24.0", "preset": "nano", "rows": [row]}
    files.write_json(results / "nano" / "peers" / "peers.json", peers)
    beside = summary.summarise("default", results, None, FIGURES)
    text = tables.markdown(beside)
    assert "## nano beside transformers 5.24.0" in text
    assert "| default | 1,500 | 1,000 | 1.500× | [1.400, 1.600] | faster | holds |" in text
    assert tables.frames(beside)["peers"].loc[0, "ratio"] == 1.5


def test_arms_trained_on_other_nodes_than_the_reference_are_marked(found):
    assert not any("across nodes" in line for line in tables.notes(found))
    moved = copy.deepcopy(found)
    moved["matched"]["nano"]["arms"]["recommended"]["hosts"] = ["node2"]
    marked = [line for line in tables.notes(moved) if "across nodes" in line]
    assert marked == ["nano, recommended: compared with the reference across nodes (node1, node2)."]
