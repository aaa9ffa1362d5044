"""The measuring scripts on real workers: a record with all beside it, reuse and its reasons, a control, a hard kill."""

import contextlib
import csv
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from speedproof.data.token_cache import TokenCache
from speedproof.measure.environment import python_path
from speedproof.measure.isolate import _born

ROOT = Path(__file__).resolve().parents[2]

PROTOCOL = {
    "warmup_updates": 1,
    "windows": 2,
    "updates_per_window": 2,
    "min_window_seconds": 0.0,
    "profile_updates": 0,
    "deadline_s": 300,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a token cache, a recipe, two executions and a protocol."""
    folder = tmp_path_factory.mktemp("measure")
    cache = TokenCache.synthetic(folder, 64, 20000, 2000, 1)
    config = yaml.safe_load((ROOT / "config/default.yaml").read_text())
    model = {"vocab_size": 64, "layers": 1, "width": 32, "heads": 2, "ffn_width": 64, "context_length": 16}
    recipe = config["recipe"] | {
        "preset": "tiny",
        "data": cache.identity,
        "model": model,
        "targets_per_update": 64,
        "budget_targets": 4000,
        "subset_blocks": 2,
        "precision": "fp32",
    }
    execution = config["execution"] | {"microbatch": 2, "cpu_threads": 1}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "a.yaml").write_text(yaml.safe_dump(execution))
    (folder / "protocol.yaml").write_text(yaml.safe_dump(PROTOCOL))
    return folder


WITH_OWN_LOCKS = """
import pathlib, runpy, sys
from speedproof.measure import device_lock
device_lock.FOLDER = pathlib.Path("locks").resolve()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script as if it were alone: these tests are about truth, and need not wait for the node's measurements."""


def command(place, name, *options):
    script = str(ROOT / "src/scripts" / f"{name}.py")
    given = [sys.executable, "-c", WITH_OWN_LOCKS, script, "--recipe", "recipe.yaml"]
    return [*given, "--protocol", "protocol.yaml", "--store", "store", *map(str, options)]


def call(place, name, *options, code=0):
    """Run a script in the folder, on the locks and caches of its own; what it printed."""
    answer = subprocess.run(
        command(place, name, *options), cwd=place, capture_output=True, text=True, env=surroundings(place), check=False
    )
    assert answer.returncode == code, answer.stderr
    return answer.stdout + answer.stderr


def surroundings(place):
    return os.environ | {"PYTHONPATH": python_path(), "TMPDIR": str(place)}


def test_record_with_trace_and_telemetry_then_reuse_and_the_reason_to_measure_again(place):
    options = ("--execution", "a.yaml", "--cache", "token_cache.json", "--profile")
    said = call(
        place, "benchmark", *options, "--output", "one.json", "--telemetry", "one.csv", "--trace", "one.trace.json.gz"
    )
    assert "targets/s" in said
    record = json.loads((place / "one.json").read_text())
    assert record["status"] == "ok"
    assert record["name"] == "a"
    assert [w["targets"] for w in record["windows"]] == [128, 128]
    assert record["profile"]["updates"] == 3
    assert record["profile"]["families"]["matmul"]["ms_per_update"] > 0
    assert record["memory"]["setup_bytes"] > 0
    assert record["energy_j_per_million_targets"] != 0
    assert str(place) not in json.dumps(record)
    assert "traceEvents" in json.loads(gzip.decompress((place / "one.trace.json.gz").read_bytes()))
    assert list(csv.DictReader((place / "one.csv").open()))

    call(place, "benchmark", *options, "--output", "two.json")
    assert (place / "two.json").read_bytes() == (place / "one.json").read_bytes()

    changed = yaml.safe_load((place / "a.yaml").read_text()) | {"cpu_threads": 2}
    (place / "b.yaml").write_text(yaml.safe_dump(changed))
    said = call(place, "why", "--execution", "b.yaml")
    assert "execution.cpu_threads: the nearest record has 1, wanted is 2" in said
    assert "protocol.profile_updates: the nearest record has 3, wanted is 0" in said


def test_control_in_blocks_by_finalists(place):
    execution = yaml.safe_load((place / "a.yaml").read_text())
    (place / "finalists.json").write_text(json.dumps({"default": execution, "recommended": execution}))
    options = ("--finalists", "finalists.json", "--blocks", 1, "--data-mode", "synthetic")
    said = call(place, "compare", *options, "--output", "comparison.json")
    assert "control of the node's noise" in said
    found = json.loads((place / "comparison.json").read_text())
    assert found["control"]
    assert found["status"] == "ok"
    assert [len(block) for block in found["blocks"]] == [4]
    assert [p["arm"] for p in found["details"][0]["processes"]] == list("ABBA")


def test_unused_place_of_a_plan_is_skipped_and_a_wrong_one_named(place):
    (place / "plan.json").write_text(json.dumps({"stage": "sdpa", "slots": [{"skipped": "only one ran"}]}))
    call(place, "benchmark", "--plan", "plan.json", "--slot", 0, "--output", "slot0.json")
    record = json.loads((place / "slot0.json").read_text())
    assert (record["status"], record["reason"]) == ("skipped", "only one ran")
    said = call(place, "benchmark", "--plan", "plan.json", "--slot", 1, "--output", "slot1.json", code=2)
    assert "error: slot: found 1" in said
    assert not (place / "slot1.json").exists()


def test_missing_cache_and_misspelt_setting_are_one_sentence(place):
    options = ("--execution", "a.yaml", "--output", "wrong.json")
    assert "error: cache: " in call(place, "benchmark", *options, code=2)
    (place / "c.yaml").write_text((place / "a.yaml").read_text().replace("microbatch:", "microbach:"))
    said = call(place, "benchmark", "--execution", "c.yaml", "--output", "wrong.json", code=2)
    assert "did you mean 'microbatch'" in said
    assert not (place / "wrong.json").exists()


def test_worker_killed_hard_is_host_oom_and_term_ends_everything(place):
    worker = measure_and_find_worker(place, "killed.json")
    os.kill(worker[1], signal.SIGKILL)
    assert worker[0].wait(120) == 0
    record = json.loads((place / "killed.json").read_text())
    assert record["status"] == "host_oom"
    assert record["targets_per_s"] is None

    script, pid = measure_and_find_worker(place, "stopped.json", "--fresh")
    script.terminate()
    assert script.wait(60) == 75
    assert _born(pid) is None
    assert not (place / "stopped.json").exists()


def measure_and_find_worker(place, output, *options):
    """Start an endless measurement; the script's process and the worker's id once it runs."""
    endless = PROTOCOL | {"min_window_seconds": 3600.0, "deadline_s": 7200}
    (place / "endless.yaml").write_text(yaml.safe_dump(endless))
    given = command(place, "benchmark", "--execution", "a.yaml", "--data-mode", "synthetic", "--output", output)
    given[given.index("protocol.yaml")] = "endless.yaml"
    script = subprocess.Popen([*given, *options], cwd=place, env=surroundings(place))
    end = time.monotonic() + 300
    while time.monotonic() < end and script.poll() is None:
        for child in Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if b"speedproof.measure.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return script, int(child)
        time.sleep(0.05)
    script.kill()
    raise AssertionError("no worker was started")
