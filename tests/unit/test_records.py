"""Statuses come from what happened, records are reused while they are true, and caches are never shared."""

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import miniature
import pytest

from speedproof.core import identity as identities
from speedproof.core.errors import UserError
from speedproof.core.store import Store
from speedproof.measure import compiler_cache as caches
from speedproof.measure import device_lock, isolate, once, records, utilisation, worker
from speedproof.measure.environment import python_path
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import Protocol
from speedproof.settings.recipe import Recipe

RECIPE = miniature.recipe(
    model={"vocab_size": 64, "ffn_width": 64},
    preset="tiny",
    data="0" * 64,
    budget_targets=4000,
    subset_blocks=2,
    seed=1,
    lr=1e-3,
    warmup_fraction=0.1,
)
EXECUTION = miniature.execution(microbatch=2)
PROTOCOL = {
    "warmup_updates": 2,
    "windows": 3,
    "updates_per_window": 5,
    "min_window_seconds": 0.0,
    "profile_updates": 0,
    "deadline_s": 30,
}

FAKE_WORKER = """
import json, os, pathlib, signal, sys, time
request, result = map(pathlib.Path, sys.argv[1:])
with open(os.environ["FAKE_RUNS"], "a") as runs:
    runs.write("run ")
print("worker at work in", os.environ["FAKE_PLACE"], flush=True)
behaviour = os.environ["FAKE_BEHAVIOUR"]
now = time.monotonic()
window = {"targets": 320, "updates": 5, "seconds": 0.1, "loss": 4.0, "grad_norm": 1.0, "data_wait_s": 0.0,
          "compiles": 0, "graph_breaks": 0, "guards": [], "edges": [now, now]}
ok = {"status": "ok", "reason": None, "precision": "fp32", "startup_s": 1.0,
      "windows": [window | {"targets_per_s": rate} for rate in (3000.0, 3300.0, 3100.0)],
      "memory": {"peak_bytes": 10, "setup_bytes": 20}, "warmup": {"first_update_s": 1.0, "total_s": 2.0}}
if behaviour == "ok":
    result.write_text(json.dumps(ok))
elif behaviour == "killed in the profile":
    result.write_text(json.dumps(ok))
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "hangs":
    time.sleep(600)
elif behaviour == "memory error":
    raise MemoryError
elif behaviour == "wrong input":
    result.write_text(json.dumps({"status": "error", "reason": "shard: is missing", "user_error": True}))
elif behaviour == "nonfinite":
    result.write_text(json.dumps({"status": "nonfinite", "reason": "update 5: loss is not finite", "windows": []}))
else:
    sys.exit(int(behaviour))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A worker without torch that behaves as told; `fake.runs()` counts its processes."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "fake_worker.py").write_text(FAKE_WORKER)
    runs = tmp_path / "runs"
    runs.touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    monkeypatch.setenv("FAKE_RUNS", str(runs))
    monkeypatch.setenv("FAKE_PLACE", str(identities.PACKAGE.parent))
    monkeypatch.setattr(once, "worker", types.SimpleNamespace(__name__="fake_worker", median_rate=worker.median_rate))
    monkeypatch.setattr(once.sensors, "open_source", lambda device: None)
    monkeypatch.setattr(device_lock, "FOLDER", tmp_path / "locks")
    monkeypatch.setattr(isolate, "GRACE_S", 0.3)
    monkeypatch.setattr(caches.tempfile, "tempdir", str(tmp_path))
    store = Store(tmp_path / "store")

    (tmp_path / "token_cache.json").write_text(json.dumps({"identity": RECIPE.data}))

    def measure(behaviour="ok", protocol=PROTOCOL, recipe=RECIPE, execution=EXECUTION, **options):
        monkeypatch.setenv("FAKE_BEHAVIOUR", behaviour)
        return records.measure(
            recipe, execution, protocol, store=store, cache_manifest=tmp_path / "token_cache.json", **options
        )

    return types.SimpleNamespace(measure=measure, runs=lambda: runs.read_text().split().count("run"), store=store)


@pytest.mark.parametrize(
    ("behaviour", "status"),
    [
        ("killed", "host_oom"),
        ("137", "host_oom"),
        ("memory error", "host_oom"),
        ("hangs", "timeout"),
        ("1", "error"),
        ("0", "error"),
        ("nonfinite", "nonfinite"),
    ],
)
def test_status_is_what_happened_and_not_an_exit_code(fake, behaviour, status):
    record = fake.measure(behaviour, PROTOCOL | {"deadline_s": 1 if behaviour == "hangs" else 30})
    assert record["status"] == status
    assert record["status"] in records.STATUSES
    assert record["reason"]
    assert record["targets_per_s"] is None
    assert record["mfu_reason"] == "no rate"
    assert record["energy_j_per_million_targets"] is None
    assert record["log_tail"].startswith("worker at work in src")


def test_rate_is_the_median_window(fake):
    record = fake.measure()
    assert record["status"] == "ok"
    assert record["targets_per_s"] == 3100.0
    assert record["flags"] == ["spread 9.7% between the windows"]
    assert [w["targets_per_s"] for w in record["windows"]] == [3000.0, 3300.0, 3100.0]
    assert "edges" not in record["windows"][0]


def test_worker_killed_in_the_profile_keeps_its_timing(fake):
    record = fake.measure("killed in the profile", PROTOCOL | {"profile_updates": 3})
    assert record["status"] == "ok"
    assert record["targets_per_s"] == 3100.0
    assert "before the profile" in record["profile"]["reason"]


def test_wrong_input_is_the_users_and_leaves_no_record(fake):
    with pytest.raises(UserError, match="shard: is missing"):
        fake.measure("wrong input")
    assert not list((fake.store.root / "records").glob("*/*/record.json"))
    assert fake.measure()["status"] == "ok"


@pytest.mark.parametrize(("behaviour", "again"), [("ok", False), ("nonfinite", False), ("1", True), ("hangs", True)])
def test_reuse_and_measuring_again(fake, behaviour, again):
    protocol = PROTOCOL | {"deadline_s": 1} if behaviour == "hangs" else PROTOCOL
    first = fake.measure(behaviour, protocol)
    assert fake.measure(behaviour, protocol) == first
    assert fake.runs() == 1
    fake.measure(behaviour, protocol, remeasure=True)
    assert fake.runs() == (2 if again else 1)
    fake.measure(behaviour, protocol, reuse=False)
    assert fake.runs() == (3 if again else 2)


def test_a_new_finding_takes_the_place_of_a_passing_one(fake):
    assert fake.measure("1")["status"] == "error"
    assert fake.measure("ok", remeasure=True)["status"] == "ok"
    assert fake.measure("1")["status"] == "ok"
    assert fake.runs() == 2


def test_another_deadline_or_decision_reuses_and_another_window_does_not(fake):
    fake.measure()
    longer = fake.measure(protocol=PROTOCOL | {"deadline_s": 60})
    assert fake.runs() == 1
    assert longer["protocol"]["deadline_s"] == 60
    decisions = {"stage_blocks": 5, "blocks": 7, "retention": 1.5, "no_regression": 0.5}
    fake.measure(protocol=Protocol.parse(PROTOCOL | decisions))
    assert fake.runs() == 1
    fake.measure(protocol=PROTOCOL | {"windows": 4})
    fake.measure(mode="synthetic")
    fake.measure(cold=True)
    fake.measure(recipe=Recipe.parse(RECIPE.plain() | {"seed": 2}))
    assert fake.runs() == 5


def test_data_that_cannot_serve_are_named_before_anything_waits(fake):
    with pytest.raises(UserError, match=r"recipe.data: found 1111"):
        fake.measure(recipe=Recipe.parse(RECIPE.plain() | {"data": "1" * 64}))
    with pytest.raises(UserError, match="data-mode: found 'reel'; use real or synthetic"):
        fake.measure(mode="reel")
    assert fake.runs() == 0


def test_an_operator_matters_and_a_comment_or_a_report_does_not(fake, tmp_path, monkeypatch):
    package = tmp_path / "package"
    shutil.copytree(identities.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(identities, "PACKAGE", package)
    monkeypatch.setattr(records, "PACKAGE", package)

    def edit(name, change):
        path = package / name
        path.write_text(change(path.read_text()))
        identities.source_digest.cache_clear()

    try:
        identities.source_digest.cache_clear()
        fake.measure()
        edit("model/loss.py", lambda text: "# a remark\n" + text.replace('"""', '"""Said otherwise. ', 1))
        edit("evidence/statistics.py", lambda text: text + "\nMORE = 1 + 1\n")
        fake.measure()
        assert fake.runs() == 1
        edit("training/update.py", lambda text: text.replace("nll / targets", "nll * targets"))
        fake.measure()
        assert fake.runs() == 2
        edit("training/schedule.py", lambda text: text.replace("math.pi * done", "math.pi / done"))
        wanted = records.identity_of(RECIPE, EXECUTION, PROTOCOL, "real", False)
        _, fields = records.nearest(fake.store, wanted)
        assert list(fields) == ["source"]
        kept = sorted(p.name for p in (fake.store.root / "sources").glob("*/*/training/update.py"))
        assert kept == ["update.py", "update.py"]
    finally:
        identities.source_digest.cache_clear()


def test_identity_holds_no_path_and_no_fact_of_one_job(monkeypatch, tmp_path):
    before = records.identity_of(RECIPE, EXECUTION, PROTOCOL, "real", False)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.chdir(tmp_path)
    assert records.identity_of(RECIPE, EXECUTION, PROTOCOL, "real", False) == before
    text = json.dumps(before)
    assert "/" not in text
    assert os.uname().nodename not in [before["class"].get(key) for key in before["class"]]


def test_attempts_killed_with_their_job_end_in_a_record(fake):
    identity = records.identity_of(RECIPE, EXECUTION, PROTOCOL, "real", False)
    mark = fake.store.scratch("records", identity) / "attempts.json"
    mark.write_text('{"begun": 2}')
    record = fake.measure()
    assert record["status"] == "host_oom"
    assert "2 attempts were killed" in record["reason"]
    assert fake.runs() == 0
    assert not mark.exists()
    assert fake.measure(remeasure=True)["status"] == "ok"


def test_one_killed_attempt_is_tried_again_and_noted(fake):
    identity = records.identity_of(RECIPE, EXECUTION, PROTOCOL, "real", False)
    (fake.store.scratch("records", identity) / "attempts.json").write_text('{"begun": 1}')
    record = fake.measure()
    assert record["status"] == "ok"
    assert "an earlier attempt was killed" in record["flags"]


def test_misspelt_protocol_key_is_named(fake):
    with pytest.raises(UserError, match=r"protocol.window.*did you mean 'windows'"):
        fake.measure(protocol=PROTOCOL | {"window": 3})


def test_microbatch_that_does_not_divide_is_named_before_anything_runs(fake):
    with pytest.raises(UserError, match=r"execution.microbatch: 3"):
        fake.measure(execution=Execution.parse(EXECUTION.plain() | {"microbatch": 3}))
    assert fake.runs() == 0


def test_workers_at_the_same_time_have_their_own_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(caches.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with caches.compiler_cache() as one, caches.compiler_cache() as two:
        assert not set(one.values()) & set(two.values())
        assert all(Path(folder).is_relative_to(tmp_path) for folder in [*one.values(), *two.values()])
        assert not caches.is_warm(one)
        for folder in one.values():
            Path(folder).mkdir(parents=True)
            (Path(folder) / "kernel").touch()
    with caches.compiler_cache() as next_one:
        assert next_one == one
        assert caches.is_warm(next_one)
    with caches.compiler_cache(cold=True) as cold:
        assert not caches.is_warm(cold)
        assert not set(cold.values()) & set(one.values())
    caches.remove_job_cache()
    assert caches.is_warm(one)


def test_a_job_has_its_own_caches_and_removes_them_when_nobody_uses_one(tmp_path, monkeypatch):
    monkeypatch.setattr(caches.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv(caches.ALLOCATION, raising=False)
    with caches.compiler_cache() as one, caches.compiler_cache(cold=True) as cold:
        assert all("77" in Path(folder).parts for folder in one.values())
        caches.remove_job_cache()
        assert Path(cold["TRITON_CACHE_DIR"]).parent.is_dir()
    monkeypatch.setenv(caches.ALLOCATION, "1")
    caches.remove_job_cache()
    assert caches.root().exists()
    monkeypatch.delenv(caches.ALLOCATION)
    caches.remove_job_cache()
    assert not caches.root().exists()


def test_the_last_process_of_a_job_leaves_no_cache(tmp_path):
    code = """
from speedproof.measure.compiler_cache import compiler_cache, root
with compiler_cache():
    assert root().is_dir()
print(root())
"""
    env = os.environ | {"SLURM_JOB_ID": "78", "TMPDIR": str(tmp_path), "PYTHONPATH": python_path()}
    env.pop(caches.ALLOCATION, None)
    left = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert left.stdout.strip().startswith(str(tmp_path))
    assert not Path(left.stdout.strip()).exists()


def test_utilisation_needs_the_exact_name_and_cannot_exceed_the_peak():
    recipe = Recipe.parse(
        RECIPE.plain()
        | {
            "precision": "bf16",
            "targets_per_update": 32768,
            "budget_targets": 10**6,
            "model": {
                "vocab_size": 32000,
                "layers": 8,
                "width": 320,
                "heads": 5,
                "ffn_width": 896,
                "context_length": 1024,
            },
        }
    )
    found = utilisation.mfu(recipe, 1_636_281, "NVIDIA GH200 120GB")
    assert found["mfu"] == pytest.approx(0.2285, abs=2e-4)
    assert utilisation.mfu(recipe, 1.0, "NVIDIA GH300")["mfu"] is None
    assert "no peak is known for 'NVIDIA GH300'" in utilisation.mfu(recipe, 1.0, "NVIDIA GH300")["mfu_reason"]
    assert utilisation.mfu(recipe, 1.0, None)["mfu_reason"] == "no peak is known for a CPU"
    with pytest.raises(utilisation.ImpossibleRate):
        utilisation.mfu(recipe, 8e6, "NVIDIA GH200 120GB")


@pytest.mark.parametrize("protocol", [None, [1], "text"])
def test_a_protocol_that_is_no_dictionary_is_one_sentence(protocol):
    with pytest.raises(UserError, match=r"^protocol: found"):
        records.measuring_part(protocol)
