"""train.py as a person or a job runs it: stopped by TERM, killed, started again, and taken from the store."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import miniature
import pytest
import torch
from safetensors.torch import load_file

from speedproof.core import files
from speedproof.core.errors import EXIT_PREEMPTED, EXIT_USER
from speedproof.data.token_cache import TokenCache

ROOT = Path(__file__).parents[2]
UPDATES = 300

EXECUTION = miniature.EXECUTION | {"microbatch": 2}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipe, execution and token cache of a run of some seconds."""
    folder = tmp_path_factory.mktemp("bench")
    cache = TokenCache.synthetic(folder, 64, UPDATES * 64 + 100, 400, 0)
    model = {"vocab_size": 64, "layers": 1, "width": 16, "heads": 2, "ffn_width": 24, "context_length": 16}
    recipe = miniature.RECIPE | {
        "model": model,
        "data": cache.identity,
        "budget_targets": UPDATES * 64,
        "virtual_epochs": 3,
        "subset_blocks": 8,
        "seed": 3,
        "warmup_fraction": 0.1,
    }
    files.write_yaml(folder / "recipe.yaml", recipe)
    files.write_yaml(folder / "execution.yaml", EXECUTION)
    return folder


LAUNCH = """
import runpy, sys
from pathlib import Path
from speedproof.measure import device_lock
device_lock.FOLDER = Path(sys.argv.pop(1))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
"""Runs a script with locks of its own: the node's might be held by a real measurement for hours."""


def start(bench: Path, repeat: int, *options: str) -> subprocess.Popen[str]:
    """train.py under way; `repeat` makes it a run of its own and names its output folder."""
    command = [
        *(sys.executable, "-c", LAUNCH, bench / "locks", "src/scripts/train.py"),
        *("--deterministic", "--repeat", repeat, "--output", bench / f"run{repeat}", "--store", bench / "store"),
        *("--recipe", bench / "recipe.yaml", "--execution", bench / "execution.yaml"),
        *("--cache", bench / "token_cache.json", *options),
    ]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env={key: value for key, value in environ.items() if not key.startswith("SLURM_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and everything said."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out + err


def wait_for(process: subprocess.Popen[str], bench: Path, pattern: str) -> None:
    """Wait until the unfinished run has left a file like `pattern`."""
    limit = time.monotonic() + 90
    while not list((bench / "store" / "unfinished" / "runs").glob(f"*/{pattern}")):
        if process.poll() is not None or time.monotonic() > limit:
            process.kill()
            pytest.fail(f"no {pattern} was written: {process.communicate()}")
        time.sleep(0.01)


def learnt(folder: Path) -> tuple[dict, list[dict]]:
    """Weights, and metrics without what takes time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "targets_per_s", "data_wait_s")
    return load_file(folder / "weights.safetensors"), [{k: v for k, v in x.items() if k not in timed} for x in lines]


def assert_same_training(a: Path, b: Path) -> None:
    (weights, lines), (others, other_lines) = learnt(a), learnt(b)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert lines == other_lines


@pytest.fixture(scope="module")
def whole(bench: Path) -> Path:
    """A run that nothing disturbed."""
    code, said = finish(start(bench, 0))
    assert code == 0, said
    assert "trained; 19,200 targets" in said
    assert list((bench / "store" / "unfinished" / "runs").iterdir()) == []
    return bench / "run0"


def test_term_saves_and_the_same_command_goes_on(bench, whole):
    process = start(bench, 1)
    wait_for(process, bench, "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    assert code == EXIT_PREEMPTED, said
    assert "stopped early: SIGTERM received; state saved after" in said
    assert not (bench / "run1").exists()
    code, said = finish(start(bench, 1))
    assert code == 0, said
    assert "(resumed)" in said
    assert_same_training(whole, bench / "run1")
    assert json.loads((bench / "run1" / "result.json").read_text())["resumed"] is True


def test_a_killed_run_goes_on_from_its_last_save(bench, whole):
    process = start(bench, 2, "--checkpoint-minutes", "0")
    wait_for(process, bench, "state-??*")
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert not (bench / "run2").exists()
    code, said = finish(start(bench, 2))
    assert code == 0, said
    assert "(resumed)" in said
    assert_same_training(whole, bench / "run2")


def test_a_job_about_to_end_stops_before_it_begins_to_train(bench, whole):
    code, said = finish(start(bench, 3, "--end-time", str(time.time() + 20)))
    assert code == EXIT_PREEMPTED, said
    assert "stopped early: the job ends in" in said


def test_a_finished_run_comes_from_the_store(bench, whole):
    for path in whole.iterdir():
        path.unlink()
    code, said = finish(start(bench, 0))
    assert code == 0, said
    assert "from the store" in said
    assert len(list(whole.iterdir())) == 5


def test_a_stored_run_that_lost_a_file_is_named(bench, whole):
    (entry,) = {
        p.parent for p in (bench / "store" / "runs").glob("*/*/result.json") if files.read_json(p)["repeat"] == 0
    }
    (entry / "weights.safetensors").rename(entry / "elsewhere")
    code, said = finish(start(bench, 0))
    (entry / "elsewhere").rename(entry / "weights.safetensors")
    assert code == EXIT_USER
    assert f"error: {entry}: this run lost its weights.safetensors; delete the folder" in said


def test_one_flipped_byte_of_the_data_stops_the_run_before_it_trains(bench, whole):
    shard = max((bench / "store" / "shards").glob("*/*/tokens.bin"), key=lambda p: p.stat().st_size)
    kept = shard.read_bytes()
    shard.write_bytes(kept[:100] + bytes([kept[100] ^ 1]) + kept[101:])
    code, said = finish(start(bench, 4))
    shard.write_bytes(kept)
    assert code == EXIT_USER
    assert f"error: {shard}: this shard (train, file 0) does not hold what was written" in said
    assert not (bench / "run4").exists()


def test_a_budget_that_is_too_large_is_one_sentence(bench):
    recipe = files.read_yaml(bench / "recipe.yaml") | {"budget_targets": 10**6}
    files.write_yaml(bench / "large.yaml", recipe)
    code, said = finish(start(bench, 0, "--recipe", str(bench / "large.yaml")))
    assert code == EXIT_USER
    assert said.startswith("error: recipe.budget_targets: 1,000,000 targets are more than")
    assert said.count("\n") == 1
