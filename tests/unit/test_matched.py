"""Arms that differ in execution only, and runs compared: against the published session, and against what cannot be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.identity import digest
from speedproof.evidence.arms import resolve_arms
from speedproof.evidence.matched import Run, break_even_targets, compare, read_run
from speedproof.settings.experiment import Arm, Experiment, read_execution, recipe_for
from speedproof.settings.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Experiment.parse(yaml.safe_load((ROOT / "config/default.yaml").read_text()))
RECIPE = recipe_for("nano", CONFIG, ROOT / "config/presets", "tokens")
DEFAULT = CONFIG.execution
FAST = DEFAULT.model_copy(update={"compile": True, "microbatch": 16})
ARMS = CONFIG.matched.arms
BASES = {"default": DEFAULT, "recommended": FAST, "selected": FAST}
TARGETS = 100_000_768


def proved(arms=ARMS, bases=BASES, recipe=RECIPE):
    return resolve_arms(recipe, arms, bases)


def arm(**keywords):
    return Arm.parse(keywords)


def run(name, loss, rate, session, *, seed=42, repeat=0, update=None, full=None, **changes):
    """A run whose first window took 5 s above the steady rate when its arm is compiled."""
    execution = proved()["arms"][name]["execution"]
    recipe = RECIPE.plain() | {"seed": seed}
    first = 1_000_000
    compile_s = 5.0 if execution["compile"] else 0.0
    update = update or TARGETS / rate + compile_s
    full = full or session - update - 3.5  # nothing but updates, validations, checkpoints and the scan
    result = {
        "status": "ok",
        "recipe_digest": digest(recipe),
        "execution": execution,
        "data": "tokens",
        "targets": TARGETS,
        "median_targets_per_s": rate,
        "training_update_s": update,
        "first_window_s": first / rate + compile_s,
        "startup_s": 4.0,
        "epoch_validation_s": 2.0,
        "checkpoint_s": 1.0,
        "subset_scan_s": 0.5,
        "training_phase_s": session - full,
        "full_validation_s": full,
        "session_s": session,
        "process_s": session + 6.0,
        "full_validation_loss": loss,
        "full_validation_targets": 197_411_295,
        "peak_memory_bytes": 1000,
        "compiles": 1,
        "partial_shapes": [],
        "resumed": False,
        "environment": {"class": {"gpu": "H200"}, "facts": {"compiler_cache_warm": True}},
    }
    return Run(name, seed, repeat, result | changes, recipe, first)


def three(**changes):
    """The published matched runs."""
    return [
        run("original", 3.978252, 254483, 750.27, full=326.44),
        run("recommended", 3.977021, 1599463, 369.98, update=65.22, full=278.83, **changes),
        run("compiled_partial", 3.978585, 1600000, 408.0, update=103.0, full=278.54),
    ]


def compared(runs=None, arms=None, reference="original"):
    return compare(runs or three(), arms or proved(), reference)


def test_arms_share_the_recipe_and_say_where_they_differ():
    found = proved()
    assert {a["recipe_digest"] for a in found["arms"].values()} == {digest(RECIPE.plain())}
    assert set(found["differing"]) == {"microbatch", "compile", "partial"}
    assert found["differing"]["partial"] == {
        "original": "eager",
        "recommended": "eager",
        "compiled_partial": "compiled",
    }
    assert found["identical"] == []


def test_identical_arms_are_said_so():
    found = proved(bases=BASES | {"recommended": DEFAULT})
    assert found["identical"] == [["original", "recommended"]]
    # eager arms do not differ by a compile mode that has no effect
    found = proved({"a": arm(base="default"), "b": arm(base="default", set={"compile_mode": "max-autotune"})})
    assert found["identical"] == [["a", "b"]]
    assert set(found["differing"]) == {"compile_mode"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base": "default", "set": {"lr": 0.1}}, r"matched.arms.x.set.lr: belongs to the recipe"),
        ({"base": "default", "set": {"microbatchs": 4}}, r"matched.arms.x.set.microbatchs: .*'microbatch'"),
        ({"base": "default", "set": {"microbatch": 5}}, "execution.microbatch: 5 does not divide"),
        ({"base": "selected"}, "matched.arms.x.base: 'selected' was not given; pass --selected"),
    ],
)
def test_an_arm_that_cannot_be_is_named(settings, message):
    with pytest.raises(UserError, match=message):
        proved({"x": Arm.parse(settings)}, {"default": DEFAULT})


def test_the_published_speedups_come_out_again():
    fast = compared()["arms"]["recommended"]
    assert fast["speedup_steady"] == pytest.approx(6.29, abs=0.005)
    assert fast["speedup_session"] == pytest.approx(2.03, abs=0.005)
    assert fast["aggregate_targets_per_s"] == pytest.approx(1_533_000, rel=1e-3)
    assert fast["loss_difference_nats"] == pytest.approx(-0.001231, abs=1e-9)
    assert fast["loss_statement"].startswith("no gross difference; -0.001231 nats; one seed cannot show equality")
    assert fast["repeat_spread_nats"] is None


def test_the_published_break_even():
    # 17 s of start at 1,635,536 against 245,035 targets/s: "approximately 5 million targets"
    assert break_even_targets(17.0, 1_635_536, 245_035) == pytest.approx(4.9e6, rel=0.01)
    assert break_even_targets(-1.0, 2.0, 1.0) == 0.0
    assert break_even_targets(17.0, 1.0, 1.0) is None


def test_phases_sum_to_the_process():
    for row in compared()["runs"]:
        assert sum(row["phases_s"].values()) == pytest.approx(row["process_s"])
    assert compared()["arms"]["recommended"]["compiler_cache_warm"] is True
    phases = compared()["arms"]["recommended"]["phases_s"]
    assert phases["compile"] == pytest.approx(5.0)
    assert phases["updates"] == pytest.approx(65.22 - 5.0)
    assert compared()["arms"]["original"]["phases_s"]["compile"] == 0.0


def test_the_reference_beside_itself():
    found = compared()["arms"]["original"]
    assert (found["speedup_steady"], found["speedup_session"]) == (1.0, 1.0)
    assert found["loss_statement"] == "the reference"
    assert found["break_even_targets"] is None


def test_a_longer_start_pays_only_over_a_long_run():
    runs = [run("original", 4.0, 1e6, 130.0), run("recommended", 4.0, 1.3e6, 125.0)]
    runs.append(run("compiled_partial", 4.0, 1e6, 140.0))
    found = compared(runs)
    arm = found["arms"]["recommended"]
    assert arm["extra_start_s"] == pytest.approx(5.0)
    assert arm["break_even_targets"] == pytest.approx(5.0 / (1 / 1e6 - 1 / 1.3e6))
    short, same, long = found["predicted_sessions"]
    assert (short["budget_targets"], long["budget_targets"]) == (TARGETS // 10, TARGETS * 10)
    assert short["shortest"] == "original"
    assert long["shortest"] == "recommended"
    for prediction, share in ((short, 0.1), (same, 1.0), (long, 10.0)):
        validation = 2.0 + 0.5 + (125.0 - TARGETS / 1.3e6 - 5.0 - 3.5)
        expected = share * (TARGETS / 1.3e6 + 1.0) + 5.0 + validation
        assert prediction["session_s"]["recommended"] == pytest.approx(expected, rel=1e-6)
    # for the budget that was trained it is the session itself
    assert same["session_s"]["recommended"] == pytest.approx(125.0)


def test_a_resumed_run_has_no_session_to_compare():
    found = compared(three(resumed=True))
    fast = found["arms"]["recommended"]
    assert fast["speedup_session"] is None
    assert fast["session_s"] is None
    assert "resumed" in fast["reason"]
    assert fast["speedup_steady"] == pytest.approx(6.29, abs=0.005)
    assert "recommended" not in found["predicted_sessions"][1]["session_s"]


def test_rates_of_different_machines_are_not_compared():
    found = compared(three(environment={"class": {"gpu": "GH200"}}))["arms"]["recommended"]
    assert found["speedup_steady"] is None
    assert found["reason"] == "trained on another class of machine than the reference: gpu"
    assert found["loss_difference_nats"] is not None


def many(differences, repeats=(0.0,)):
    """Runs over seeds with a loss difference each, repeats shifted by some nats."""
    runs = [run("compiled_partial", 4.0, 1e6, 100.0)]
    for seed, difference in enumerate(differences, 42):
        for repeat, shift in enumerate(repeats):
            runs.append(run("original", 4.0 + shift, 1e6, 100.0, seed=seed, repeat=repeat))
            runs.append(run("recommended", 4.0 + shift + difference, 2e6, 80.0, seed=seed, repeat=repeat))
    return compared(runs)["arms"]["recommended"]


def test_losses_stand_beside_the_spread_of_repeats():
    near = many([0.001], repeats=(0.0, 0.002))
    assert near["repeat_spread_nats"] == pytest.approx(0.002)
    assert "within the 0.002000 nats between identical repeats" in near["loss_statement"]
    assert "beyond" in many([0.003], repeats=(0.0, 0.002))["loss_statement"]
    assert many([0.05])["loss_statement"].startswith("gross difference; +0.050000 nats")


def test_three_seeds_give_an_interval():
    found = many([0.001, 0.002, 0.003])
    assert found["loss_difference_nats"] == pytest.approx(0.002)
    # t.975 with two degrees of freedom
    assert found["loss_difference_high"] == pytest.approx(0.002 + 4.302653 * 0.001 / 3**0.5, rel=1e-5)
    assert "over 3 seeds" in found["loss_statement"]
    assert many([0.001, 0.002])["loss_difference_low"] is None


def test_speedups_pair_the_same_seed_and_repeat():
    runs = [run("compiled_partial", 4.0, 1e6, 100.0)]
    for seed, (slow, fast) in enumerate([(1e6, 2e6), (1e6, 8e6)], 42):
        runs.append(run("original", 4.0, slow, 100.0, seed=seed))
        runs.append(run("recommended", 4.0, fast, 50.0, seed=seed))
    found = compared(runs)["arms"]["recommended"]
    assert found["speedup_steady"] == pytest.approx(4.0)  # geometric
    assert found["speedup_steady_range"] == [2.0, 8.0]
    assert found["pairs"] == 2


def test_other_recipes_and_executions_are_refused_by_key():
    runs = three()
    recipe = runs[1].recipe | {"lr": 0.5, "beta2": 0.99}
    runs[1] = Run("recommended", 42, 0, runs[1].result | {"recipe_digest": digest(recipe)}, recipe, 1000)
    with pytest.raises(UserError, match=r"recommended-seed42-repeat0: .*recipe.beta2 0.99.*recipe.lr 0.5"):
        compared(runs)
    with pytest.raises(UserError, match=r"execution.microbatch 4 where 16 was proved"):
        compared(three(execution=DEFAULT.plain() | {"compile": True}))
    with pytest.raises(UserError, match="status is 'nonfinite'"):
        compared(three(status="nonfinite"))
    with pytest.raises(UserError, match="compiled_partial: no run"):
        compared(three()[:2])
    with pytest.raises(UserError, match=r"matched.reference: 'slow' is no arm"):
        compared(reference="slow")


def test_scripts_from_arms_to_comparison(tmp_path):
    for name, value in {
        "recipe": RECIPE.plain(),
        "default": DEFAULT.plain(),
        "recommended": FAST.plain(),
        "arms": {name: a.plain() for name, a in ARMS.items()},
    }.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(value, sort_keys=False))
    inputs = [x for k in ("recipe", "default", "recommended", "arms") for x in (f"--{k}", tmp_path / f"{k}.yaml")]
    table, folder = tmp_path / "arms.json", tmp_path / "arms"
    done = script("prove_recipes.py", *inputs, "--output", table, "--folder", folder)
    assert done.returncode == 0, done.stderr
    assert "microbatch" in done.stdout
    assert read_execution(folder / "recommended.yaml") == FAST

    paths = []
    for one in three():
        home = tmp_path / "runs" / f"{one.arm}-seed{one.seed}-repeat{one.repeat}"
        home.mkdir(parents=True)
        (home / "recipe.yaml").write_text(yaml.safe_dump(Recipe.parse(one.recipe).plain()))
        (home / "metrics.jsonl").write_text('{"targets": 1000000, "loss": 5.0}\n{"targets": 2000000, "loss": 4.0}\n')
        (home / "result.json").write_text(json.dumps(one.result))
        paths.append(home / "result.json")
    assert read_run(paths[1]) == three()[1]
    matched = tmp_path / "matched.json"
    done = script("compare_matched.py", "--arms", table, "--reference", "original", "--output", matched, *paths)
    assert done.returncode == 0, done.stderr
    assert json.loads(matched.read_text()) == json.loads(json.dumps(compared()))
    assert "steady 6.29x, session 2.03x" in done.stdout

    (paths[0].parent / "metrics.jsonl").write_text("")
    done = script("compare_matched.py", "--arms", table, "--reference", "original", "--output", matched, *paths)
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [f"error: {paths[0].parent / 'metrics.jsonl'}: does not begin with a window's targets; train the run again"],
    )


def script(name, *arguments):
    command = [sys.executable, ROOT / "src/scripts" / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_arm_that_cannot_be_compiled_here_is_named_and_the_rest_is_compared(tmp_path):
    arms = proved()
    ok = [run("original", 3.0, 250_000, 450), run("recommended", 3.0, 1_600_000, 80)]
    reason = "execution.compile: torch.compile failed with InvalidCxxCompiler"
    failed = run("compiled_partial", 3.0, 1_600_000, 80)
    execution, recipe = failed.result["execution"], failed.recipe
    files.write_yaml(tmp_path / "compiled_partial-seed42-repeat0/recipe.yaml", recipe)
    result = {"status": "compile_error", "reason": reason, "recipe_digest": digest(recipe), "execution": execution}
    path = tmp_path / "compiled_partial-seed42-repeat0/result.json"
    files.write_json(path, result)
    found = compare([*ok, read_run(path)], arms, "original")
    assert found["failed"] == {"compiled_partial": reason}
    assert found["order"] == list(found["arms"]) == ["original", "recommended"]
    assert {row["arm"] for row in found["runs"]} == {"original", "recommended"}
    with pytest.raises(UserError, match=r"the reference did not train: execution\.compile"):
        compare([*ok, read_run(path)], arms, "compiled_partial")
