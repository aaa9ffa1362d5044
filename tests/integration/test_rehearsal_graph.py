"""The programme as a graph: dry-runs list every job, without a network and without a scheduler."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def dry_run(target, *configfiles, changes=()):
    """Output of a dry-run of a target in an experiment that has no results yet, with `changes` to the config."""
    configs = ["--configfile", *(f"config/{name}.yaml" for name in configfiles)] if configfiles else []
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "-n",
        *configs,
        "--config",
        "experiment=never-run",
        *changes,
        "--",
        target,
    ]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return answer.returncode, answer.stdout + answer.stderr


def counts(text):
    """Jobs by rule, from the table of a dry-run."""
    table = text.split("Job stats:")[1]
    return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, flags=re.MULTILINE)}


@pytest.mark.parametrize("configs", [("gh200",), ("gh200", "h200"), ("rehearsal",)])
def test_all_lists_every_row_and_pair(configs):
    code, text = dry_run("all", *configs)
    assert code == 0, text[-2000:]
    found = counts(text)
    assert (found["measure_row"], found["compare_pair"], found["join_programme"]) == (18, 11, 1)
    presets = 1 if configs == ("rehearsal",) else 3
    assert found["resolve_recipe"] == found["confirm_finalist"] == presets
    assert found["check_parity"] == presets + 1
    # original, final and compiled_partial beside the recommended one that the default experiment trains.
    assert found["train_arm"] == 4
    assert found["tokenize_file"] == (3 if presets == 1 else 10)
    assert found["compare_stage"] == (1 if presets == 1 else 21)


def test_a_named_target_measures_its_part_alone():
    code, text = dry_run("ladder", "gh200")
    assert code == 0, text[-2000:]
    assert counts(text)["measure_row"] == 5
    assert not {"compare_pair", "train_arm", "measure_candidate", "summarise"} & set(counts(text))
    wanted = {"original_eager_8", "original_compiled_8", "original_compiled_16", "uncached_rope_32", "final_32"}
    assert set(re.findall(r"Measure row (\w+) of the programme", text)) == wanted


def test_a_target_without_rows_names_the_config_to_use():
    code, text = dry_run("ladder")
    assert code != 0
    assert "this config has no row or pair of ladder; use --configfile config/gh200.yaml" in text


def test_numbers_on_the_command_line_reach_groups_and_lists():
    code, text = dry_run("tuning", changes=["tuning={microbatches: [8], compile: [false]}"])
    assert code == 0, text[-2000:]
    assert len(re.findall(r"Measure candidate \d of stage grid", text)) == 2  # with the default's own microbatch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("matched={arms: {original: {set: {microbach: 2}}}}", "matched.arms.original.set.microbach: unknown key"),
        ("matched={arms: {recommended: {set: {microbatch: 7}}}}", "matched.arms.recommended: execution.microbatch: 7"),
        ("matched={arms: {recommended: {set: {seed: 7}}}}", "set.seed: belongs to the recipe"),
    ],
)
def test_an_arm_that_cannot_run_is_refused_before_anything_is_tuned(change, message):
    code, text = dry_run("all", changes=[change])
    assert code != 0
    assert message in text
