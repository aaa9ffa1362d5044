"""The tuner on a pretend machine: places known from the config, one change at a time, nothing marginal retained."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from speedproof.core.errors import UserError
from speedproof.evidence import stages
from speedproof.evidence.recommend import recommend
from speedproof.evidence.tuner import Tuner, finalists, stage_pair
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import Experiment, Tuning, read_execution, recipe_for

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Experiment.parse(yaml.safe_load((ROOT / "config/default.yaml").read_text()))
RECIPE = recipe_for("nano", CONFIG, ROOT / "config/presets", "tokens")
DEFAULT = CONFIG.execution  # eager, microbatch 4, backend auto, 2 threads
TUNING = Tuning.parse(
    {
        "microbatches": [4, 16],
        "compile": [False, True],
        "sdpa_backends": ["auto", "flash", "math"],
        "compile_modes": ["default", "max-autotune"],
        "losses": [],
        "projections": [],
        "optimizers": [],
        "finite_checks": [],
        "captures": [],
        "cpu_threads": [1, 2],
        "allocators": [],
        "tokens": [],
    }
)


def record(name, execution, rate, status="ok", spread=0.0):
    windows = [{"targets_per_s": rate * (1 + s)} for s in (-spread / 2, 0, spread / 2)]
    return {
        "name": name,
        "status": status,
        "reason": None if status == "ok" else f"it ended as {status}",
        "recipe": RECIPE.plain(),
        "environment": {"class": {"cpu": "this one"}},
        "protocol": CONFIG.protocol.measuring(),
        "execution": execution,
        "targets_per_s": rate if status == "ok" else None,
        "windows": windows if status == "ok" else [],
        "warmup": {"first_update_s": 1.5, "total_s": 2.0},
        "memory": {"peak_bytes": 1000},
        "flags": [],
    }


def tuned(records, tuning=TUNING, default=DEFAULT, **keywords):
    return Tuner(default, tuning, RECIPE, records, **({"retention": 1.05} | keywords))


def measured(machine, tuning=TUNING, default=DEFAULT):
    """Run all stages on `machine`: execution -> rate, (rate, spread) or a status; returns records and plans."""
    records, plans = [], {}
    for stage in stages.stage_names(tuning, default):
        plan = plans[stage] = tuned(records, tuning, default).run(until=stage).plan(stage).plain()
        for slot in plan["slots"]:
            if "skipped" in slot:
                records.append({"status": "skipped", "reason": slot["skipped"]})
                continue
            found = machine(Execution.parse(slot["execution"]))
            if isinstance(found, str):
                records.append(record(slot["name"], slot["execution"], 0, found))
            else:
                rate, spread = found if isinstance(found, tuple) else (found, 0.0)
                records.append(record(slot["name"], slot["execution"], rate, spread=spread))
    return records, plans


def machine(compiled=2.0, large=1.5, backend=None, mode=1.0, threads=1.0):
    """Rate as a product of what each setting gains over the default's."""

    def rate(e):
        gain = (compiled if e.compile else 1) * (large if e.microbatch == 16 else 1)
        gain *= (backend or {}).get(e.sdpa_backend, 1.0)
        gain *= mode if e.compile and e.compile_mode == "max-autotune" else 1
        return 1000.0 * gain * (threads if e.cpu_threads == 1 else 1)

    return rate


def test_places_follow_from_the_config():
    assert stages.stage_names(TUNING, DEFAULT) == ["grid", "sdpa", "compile_mode", "cpu_threads"]
    assert [stages.slots(s, TUNING, DEFAULT) for s in stages.stage_names(TUNING, DEFAULT)] == [4, 4, 1, 1]
    assert stages.stage_names(CONFIG.tuning, DEFAULT) == ["grid", "sdpa", "cpu_threads"]
    assert [stages.slots(s.name, CONFIG.tuning, DEFAULT) for s in stages.STAGES] == [4, 2, 0, 0, 0, 1, 0]
    with pytest.raises(UserError, match="known stages are grid"):
        stages.slots("speed", TUNING, DEFAULT)


def test_the_grid_always_holds_the_default():
    elsewhere = DEFAULT.model_copy(update={"microbatch": 8})
    assert stages.slots("grid", TUNING, elsewhere) == 5
    plan = tuned([], default=elsewhere).plan("grid").plain()
    assert plan["slots"][0]["execution"] == elsewhere.plain()


def test_microbatch_must_divide_the_update():
    bad = Tuning.parse(TUNING.plain() | {"microbatches": [4, 5]})
    with pytest.raises(UserError, match=r"tuning.microbatches: 5 does not divide the 16 blocks .*\[1, 2, 4, 8, 16\]"):
        stages.check(bad, RECIPE)


def test_every_gain_is_found_and_confirmed():
    records, plans = measured(machine(backend={"math": 1.2}, mode=1.1, threads=1.3))
    found = finalists(tuned(records))
    best = DEFAULT.model_copy(
        update={
            "compile": True,
            "microbatch": 16,
            "sdpa_backend": "math",
            "compile_mode": "max-autotune",
            "cpu_threads": 1,
        }
    )
    assert found["recommended"] == found["selected"][0]["execution"] == best.plain()
    assert found["selected"][0]["targets_per_s"] == pytest.approx(1000 * 2 * 1.5 * 1.2 * 1.1 * 1.3)
    assert [d["retained"] for d in found["decisions"]] == [True] * 4
    assert [round(d["ratio"], 3) for d in found["decisions"]] == [3.0, 1.2, 1.1, 1.3]
    assert {d["kind"] for d in found["decisions"]} == {"single records"}
    assert found["decisions"][0]["challenger"]["warmup_s"] == 2.0
    assert found["recommended_name"] == (
        "compiled, microbatch 16, compile_mode max-autotune, sdpa_backend math, cpu_threads 1"
    )
    # each stage varies its own settings on what came before it
    assert [s["execution"]["sdpa_backend"] for s in plans["sdpa"]["slots"]] == ["flash", "math"] * 2
    assert [s["execution"]["microbatch"] for s in plans["sdpa"]["slots"]] == [16, 16, 4, 4]
    assert plans["cpu_threads"]["slots"][0]["execution"] == best.plain()


def test_the_published_decisions_come_out_again():
    """Backends within 1 %, max-autotune and threads about 1 % better: all of it stays out of recommended.yaml."""
    records, _ = measured(machine(compiled=2.9, large=1.7, backend={"flash": 1.004}, mode=1.01, threads=1.008))
    found = finalists(tuned(records))
    assert found["recommended"] == DEFAULT.model_copy(update={"compile": True, "microbatch": 16}).plain()
    assert [d["retained"] for d in found["decisions"]] == [True, False, False, False]
    # numerically fastest is another one, and that is what selected.yaml is for
    assert found["selected"][0]["execution"]["compile_mode"] == "max-autotune"


def test_small_gains_do_not_add_up_behind_a_large_one():
    """Microbatch 16 gains 4 % (not retained); with flash on top 9 %: neither change alone pays, so neither comes in."""
    records, plans = measured(machine(compiled=1.0, large=1.04, backend={"flash": 1.048}))
    assert {s["execution"]["microbatch"] for s in plans["sdpa"]["slots"]} == {4, 16}
    best = tuned(records).run().ranking()[0]
    assert best.rate == pytest.approx(1000 * 1.04 * 1.048)
    assert finalists(tuned(records))["recommended"] == DEFAULT.plain()


def test_a_change_that_pays_only_together_comes_in():
    def rate(e):
        return 1200.0 if e.microbatch == 16 and e.sdpa_backend == "math" else 1000.0

    records, _ = measured(rate)
    found = finalists(tuned(records))["recommended"]
    assert (found["microbatch"], found["sdpa_backend"], found["compile"]) == (16, "math", False)


def test_a_tie_goes_to_the_simplest():
    only = Tuning.parse(TUNING.plain() | {"sdpa_backends": ["auto"], "compile_modes": ["default"], "cpu_threads": [2]})
    rates = {(4, False): 1000.0, (16, False): 1500.0, (4, True): 1505.0, (16, True): 1300.0}

    def quiet(e):
        return rates[e.microbatch, e.compile]

    def noisy(e):
        return (1560.0, 0.06) if (e.microbatch, e.compile) == (4, True) else quiet(e)

    for pretend in (quiet, noisy):
        records, _ = measured(pretend, only)
        found = finalists(tuned(records, only))
        assert found["recommended"]["compile"] is False
        assert found["recommended"]["microbatch"] == 16
        assert found["selected"][0]["execution"]["compile"] is True


def test_compile_modes_are_skipped_when_eager_is_best():
    records, plans = measured(machine(compiled=0.5))
    assert plans["compile_mode"]["slots"] == [
        {"skipped": "without effect on eager, microbatch 16, where compile is not true"}
    ]
    assert finalists(tuned(records))["recommended"]["microbatch"] == 16


FAST = {
    "losses": ["plain", "chunked", "triton"],
    "projections": ["separate", "fused"],
    "optimizers": ["fused", "arena"],
    "finite_checks": ["separate", "merged", "latched"],
    "captures": ["none", "graph"],
    "allocators": ["default", "tuned"],
}


def test_ways_to_be_faster_are_found_by_recommended():
    """On a GPU, where a captured update needs an arena and the latch: no other combination of the three is planned."""
    default = DEFAULT.model_copy(update={"device": "cuda"})
    tuning = Tuning.parse(TUNING.plain() | FAST | {"compile_modes": []})

    def rate(e):
        gain = 1.5 if e.compile else 1
        gain *= {"plain": 1, "chunked": 1.1, "triton": 1.2}[e.loss] * (0.9 if e.projections == "fused" else 1)
        return 1000.0 * gain * (1.3 if e.capture == "graph" else 1.02 if e.optimizer == "arena" else 1)

    records, plans = measured(rate, tuning, default)
    assert stages.slots("kernels", tuning, default) == 5
    assert stages.slots("update", tuning, default) == 6
    assert [s["execution"]["capture"] for s in plans["update"]["slots"]].count("graph") == 1
    found = finalists(tuned(records, tuning, default))["recommended"]
    wanted = {"loss": "triton", "projections": "separate", "optimizer": "arena", "capture": "graph"}
    assert {key: found[key] for key in wanted} == wanted
    assert found["finite_checks"] == "latched"
    assert found["allocator"] == "default"
    assert stages.slots("update", tuning, DEFAULT) == 5, "there is no graph on a CPU"
    assert stages.slots("kernels", tuning, DEFAULT) == 3, "and no kernel made for GPUs"


def test_what_contradicts_the_incumbent_is_skipped():
    default = DEFAULT.model_copy(update={"device": "cuda"})
    tuning = Tuning.parse(TUNING.plain() | FAST)
    records, plans = measured(machine(mode=1.5), tuning, default)
    assert plans["update"]["slots"][-1]["skipped"].endswith(
        "compile_mode: 'max-autotune' makes CUDA graphs of its own; use default with capture 'graph'"
    )
    assert finalists(tuned(records, tuning, default))["recommended"]["compile_mode"] == "max-autotune"


def test_what_fails_is_passed_over():
    def rate(e):
        if e.compile:
            return "compile_error"
        return "device_oom" if e.microbatch == 16 else 1000.0

    records, plans = measured(rate)
    assert len(plans["sdpa"]["slots"]) == 4
    assert [s for s in plans["sdpa"]["slots"] if "skipped" in s] == [
        {"skipped": "only 1 of the executions before this stage ran"}
    ] * 2
    found = finalists(tuned(records))
    assert found["recommended"] == DEFAULT.plain()


def test_a_default_that_cannot_run_is_replaced():
    records, _ = measured(lambda e: "device_oom" if e == DEFAULT else 1000.0)
    found = finalists(tuned(records))
    assert found["decisions"][0]["retained"]
    assert found["decisions"][0]["reason"].startswith("the default execution did not run")


def test_nothing_that_runs_is_an_error_with_its_reason():
    records, plans = measured(lambda e: "compile_error")
    assert all("skipped" in slot for stage in ("sdpa", "cpu_threads") for slot in plans[stage]["slots"])
    with pytest.raises(UserError, match=r"none of 4 executions ran .*it ended as compile_error"):
        finalists(tuned(records))


@settings(max_examples=60, deadline=None)
@given(
    microbatches=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=3),
    compile_=st.lists(st.booleans(), min_size=1, max_size=2),
    backends=st.lists(st.sampled_from(["auto", "flash", "math"]), max_size=3),
    modes=st.lists(st.sampled_from(["default", "max-autotune"]), max_size=2),
    threads=st.lists(st.sampled_from([1, 2, 4]), max_size=3),
    seed=st.integers(0, 10**6),
)
def test_a_plan_always_fills_the_places_that_the_config_promised(
    microbatches, compile_, backends, modes, threads, seed
):
    tuning = Tuning.parse(
        TUNING.plain()
        | {
            "microbatches": microbatches,
            "compile": compile_,
            "sdpa_backends": backends,
            "compile_modes": modes,
            "cpu_threads": threads,
        }
    )

    def rate(e):
        value = zlib.crc32(f"{seed} {json.dumps(e.plain(), sort_keys=True)}".encode()) % 1000
        return "timeout" if value < 300 else float(value)

    records, plans = measured(rate, tuning)
    for stage, plan in plans.items():
        assert len(plan["slots"]) == stages.slots(stage, tuning, DEFAULT)
        names = [s["name"] for s in plan["slots"] if "name" in s]
        assert len(names) == len(set(names))
    executed = [json.dumps(r["execution"], sort_keys=True) for r in records if r["status"] != "skipped"]
    assert len(executed) == len(set(executed)), "nothing is measured twice"


def test_the_order_of_records_changes_nothing():
    records, _ = measured(machine())
    assert finalists(tuned(records)) == finalists(tuned(records[::-1]))


def test_records_of_another_recipe_or_protocol_are_refused():
    records, _ = measured(machine())
    other = [dict(r) for r in records]
    other[1] = other[1] | {"recipe": RECIPE.plain() | {"lr": 0.5}}
    with pytest.raises(UserError, match=r"recipe.lr 0.5, not 0.001"):
        tuned(other)
    other = [dict(r) for r in records]
    other[2] = other[2] | {"protocol": CONFIG.protocol.measuring() | {"windows": 9}}
    with pytest.raises(UserError, match=r"protocol.windows 9, not 3"):
        tuned(other)
    other[2] = records[2] | {"environment": {"class": {"cpu": "that one"}}}
    with pytest.raises(UserError, match=r"machine.cpu 'that one', not 'this one'"):
        tuned(other)


def test_a_missing_record_is_named():
    records, _ = measured(machine())
    with pytest.raises(UserError, match="'grid' has none of 'compiled, microbatch 4'"):
        tuned([r for r in records if r.get("name") != "compiled, microbatch 4"]).run()


def compared(pair, ratio, blocks=3, noise=0.001):
    made = [[1.0, ratio * (1 + noise * k), ratio, 1.0] for k in range(blocks)]
    return {"a": pair["default"], "b": pair["recommended"], "status": "ok", "reason": None, "blocks": made}


def test_with_stage_blocks_the_interval_decides():
    """A single record says +10 %, blocks say +1 %: blocks win."""
    only = Tuning.parse(TUNING.plain() | {"sdpa_backends": [], "compile_modes": [], "cpu_threads": []})
    records, _ = measured(machine(compiled=1.0, large=1.1), only)
    pair = stage_pair(tuned(records, only, stage_blocks=3), "grid")
    assert pair["default"] == DEFAULT.plain()
    assert pair["recommended"]["microbatch"] == 16
    for ratio, retained in ((1.01, False), (1.10, True)):
        found = finalists(tuned(records, only, stage_blocks=3, comparisons=[compared(pair, ratio)]))
        assert found["decisions"][0]["retained"] is retained
        assert found["decisions"][0]["kind"] == "A B B A blocks"
        assert found["decisions"][0]["blocks"] == 3
        assert found["decisions"][0]["low"] < ratio * 1.002
    with pytest.raises(UserError, match="comparisons: none holds"):
        finalists(tuned(records, only, stage_blocks=3))


def test_blocks_as_they_are_measured_can_be_judged():
    """In blocks of either order, drift cancels, and A stays the default."""
    from speedproof.evidence.statistics import judge
    from speedproof.measure.comparison import KEPT, run_blocks, settled

    fast = DEFAULT.model_copy(update={"microbatch": 16})
    started = iter(range(100))

    def run_one(execution):
        rate = 1000.0 * 1.005 ** next(started) * (1.2 if execution == fast else 1.0)
        return dict.fromkeys(KEPT) | {"status": "ok", "targets_per_s": rate}

    found = judge(settled(run_blocks(DEFAULT, fast, 3, run_one), 3), 1.05)
    assert found["ratio"] == pytest.approx(1.2)
    assert found["high"] - found["low"] < 1e-9
    assert (found["verdict"], found["blocks"]) == ("retain", 3)


def test_an_unchallenged_incumbent_makes_a_control():
    records, _ = measured(machine(compiled=0.5, large=0.5))
    pair = stage_pair(tuned(records, stage_blocks=3), "grid")
    assert pair["default"] == pair["recommended"] == DEFAULT.plain()


# What follows from the finalists


def settled(ratio=2.0, blocks=3, fails=(), pretend=None, noise=0.001):
    records, _ = measured(pretend or machine(backend={"flash": 1.01}))
    found = finalists(tuned(records))
    checks = []
    for entry in found["selected"]:
        checks.append({"name": entry["name"], "execution": entry["execution"], "holds": entry["name"] not in fails})
        if checks[-1]["holds"]:
            break
    checks.append({"name": "default", "execution": found["default"], "holds": "eager, microbatch 4" not in fails})
    name = found["recommended_name"]
    last = {
        "name": name,
        "execution": found["recommended"],
        "holds": name not in fails,
        "reason": "gradient error 0.07",
    }
    return recommend(
        found,
        compared(found, ratio, blocks, noise),
        {"checks": checks, "recommended": last},
        records,
        retention=1.05,
        no_regression=0.98,
    )


def test_retained_and_confirmed_is_recommended():
    table = settled()
    assert table["recommended"]["name"] == "compiled, microbatch 16"
    assert table["selected"]["name"] == "compiled, microbatch 16, sdpa_backend flash"
    assert table["confirmation"]["verdict"] == "retain"
    assert table["confirmation"]["no_regression"] == "no regression"
    assert table["confirmation"]["blocks"] == 3
    default = next(r for r in table["rows"] if r["execution"] == DEFAULT.plain())
    assert (default["ratio_to_default"], default["peak_bytes"], default["warmup_s"]) == (1.0, 1000, 2.0)
    json.dumps(table, allow_nan=False)


@pytest.mark.parametrize(
    ("ratio", "blocks", "noise", "verdict", "why"),
    [
        (1.01, 3, 0.001, "reject", "lies below 1.05"),
        (1.10, 3, 0.1, "inconclusive", "blocks would decide"),
        (3.00, 2, 0.001, "inconclusive", "fewer than 3 blocks"),
        (3.00, 1, 0.001, "inconclusive", "fewer than 3 blocks"),
        (3.00, 0, 0.001, "inconclusive", "no block is valid"),
    ],
)
def test_what_is_not_confirmed_leaves_the_default(ratio, blocks, noise, verdict, why):
    table = settled(ratio, blocks, noise=noise)
    assert table["confirmation"]["verdict"] == verdict
    assert table["recommended"]["execution"] == DEFAULT.plain()
    assert why in table["recommended"]["reason"]


def test_speed_without_parity_is_no_result():
    fast = "compiled, microbatch 16, sdpa_backend flash"
    table = settled(fails=[fast])
    assert table["selected"]["name"] == "compiled, microbatch 16"
    assert fast in table["selected"]["reason"]
    table = settled(fails=[fast, "compiled, microbatch 16"])
    assert table["selected"]["name"] not in (fast, "compiled, microbatch 16")
    assert table["recommended"]["execution"] == DEFAULT.plain()
    assert "gradient error 0.07" in table["recommended"]["reason"]
    everything = [r["name"] for r in table["rows"]]
    with pytest.raises(UserError, match="finalist_parity: no execution"):
        settled(fails=everything)
    with pytest.raises(UserError, match="the default execution is left, and it fails parity"):
        settled(ratio=1.0, fails=["eager, microbatch 4"])


def test_a_control_recommends_the_default_and_gives_the_noise():
    table = settled(ratio=1.0, pretend=machine(compiled=0.9, large=0.9))
    assert table["confirmation"]["control"]
    assert table["confirmation"]["verdict"] is None
    assert table["recommended"]["execution"] == DEFAULT.plain()


def test_a_comparison_of_others_is_refused():
    records, _ = measured(machine())
    found = finalists(tuned(records))
    other = compared(found, 2.0) | {"b": DEFAULT.plain()}
    with pytest.raises(UserError, match="compare again"):
        recommend(found, other, {"checks": []}, records, retention=1.05, no_regression=0.98)


def script(name, *arguments):
    command = [sys.executable, ROOT / "src/scripts" / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_scripts_from_config_to_recommended_yaml(tmp_path):
    for name, value in {
        "default": DEFAULT.plain(),
        "tuning": TUNING.plain(),
        "deciding": CONFIG.protocol.deciding(),
        "recipe": RECIPE.plain(),
    }.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(value))
    common = [x for k in ("default", "tuning", "deciding", "recipe") for x in (f"--{k}", tmp_path / f"{k}.yaml")]
    plan = tmp_path / "plan.json"
    done = script("plan_stage.py", "--stage", "grid", *common, "--output", plan)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(plan.read_text())["slots"]) == 4

    records, _ = measured(machine())
    paths = []
    for number, value in enumerate(records):
        paths.append(tmp_path / f"slot{number}.json")
        paths[-1].write_text(json.dumps(value))
    final = tmp_path / "finalists.json"
    done = script("plan_stage.py", "--stage", "finalists", *common, "--output", final, *paths)
    assert done.returncode == 0, done.stderr
    found = json.loads(final.read_text())

    (tmp_path / "comparison.json").write_text(json.dumps(compared(found, 3.0)))
    check = {"name": "first", "execution": found["selected"][0]["execution"], "holds": True}
    (tmp_path / "parity.json").write_text(json.dumps({"checks": [check]}))
    outputs = {k: tmp_path / f"out/{k}" for k in ("selected.yaml", "recommended.yaml", "tuning.json")}
    done = script(
        "recommend.py",
        *("--finalists", final, "--comparison", tmp_path / "comparison.json", "--parity", tmp_path / "parity.json"),
        *("--deciding", tmp_path / "deciding.yaml", "--selected", outputs["selected.yaml"]),
        *("--recommended", outputs["recommended.yaml"], "--table", outputs["tuning.json"], *paths),
    )
    assert done.returncode == 0, done.stderr
    best = DEFAULT.model_copy(update={"compile": True, "microbatch": 16})
    assert read_execution(outputs["recommended.yaml"]) == best
    assert outputs["recommended.yaml"].read_text().startswith("# recommended: compiled, microbatch 16, 3,000 targets/s")

    done = script("plan_stage.py", "--stage", "sdpa", *common, "--output", tmp_path / "x.json", paths[0])
    assert done.returncode == 2
    assert done.stderr.startswith("error: records: stage 'grid' has none of")
    assert not (tmp_path / "x.json").exists()
