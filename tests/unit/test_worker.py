"""The worker's windows hold whole updates only, and an error becomes the status that lies at its bottom."""

from types import SimpleNamespace

import pytest
import torch
from test_records import EXECUTION, PROTOCOL, RECIPE

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.data.loader import SyntheticBatches
from speedproof.measure import worker
from speedproof.model.attention import UnsupportedBackend
from speedproof.training.compile import CompileError
from speedproof.training.update import NonFinite, Updater, UpdateResult
from speedproof.training.window import run_window


class Clock:
    """A clock that only moves when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 5), (0.9, 5), (2.5, 13)])
def test_window_counts_whole_updates_past_its_time(seconds, expected):
    clock = Clock()
    done = 0
    for blocks in worker.plan(4, 5, seconds, clock):
        assert blocks == 4
        clock.now += 0.2
        done += 1
    assert done == expected


class Updates:
    """Updates that take half a second of a fake clock."""

    device = torch.device("cpu")

    def __init__(self, clock):
        self.clock = clock

    def submit(self, rows):
        self.clock.now += 0.5
        return [UpdateResult(loss_sum=4.0 * 64, targets=64, grad_norm=1.0)]

    def finish(self):
        return []


def test_time_between_windows_leaves_the_rate_as_it_was():
    clock = Clock()
    batches = SyntheticBatches(RECIPE, 1)
    first = run_window(Updates(clock), batches, worker.plan(4, 5, 0.0, clock), clock)
    clock.now += 10.0
    second = run_window(Updates(clock), batches, worker.plan(4, 5, 0.0, clock), clock)
    assert first.targets_per_s == second.targets_per_s == 64 / 0.5


def timed(updater, protocol=PROTOCOL):
    result = {"status": "error", "reason": None, "windows": [], "warmup": None, "memory": None}
    with worker.DeviceBatch(SyntheticBatches(RECIPE, 1), updater.device) as batches:
        worker._time(updater, batches, protocol, result)
    return result


def test_timing_counts_targets_and_keeps_memory_apart():
    result = timed(Updater(RECIPE, EXECUTION, "cpu"))
    assert result["status"] == "ok"
    assert [w["updates"] for w in result["windows"]] == [5, 5, 5]
    assert [w["targets"] for w in result["windows"]] == [320, 320, 320]
    assert all(w["targets_per_s"] == w["targets"] / w["seconds"] for w in result["windows"])
    assert result["warmup"]["updates"] == 2
    assert result["warmup"]["total_s"] > result["warmup"]["first_update_s"] > 0
    assert result["memory"]["setup_bytes"] > 0
    assert result["memory"]["kind"] == "resident set"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 40),
        ({"compile": True}, 40),
        ({"compile": True, "compile_mode": "reduce-overhead"}, 90),
        ({"compile": False, "compile_mode": "reduce-overhead"}, 40),
        ({"capture": "graph"}, 90),
    ],
)
def test_memory_of_replayed_graphs_is_what_making_them_took(settings, expected, monkeypatch):
    peaks = iter([90, 40])  # of the set-up, in which graphs are made, and of the windows, which allocate nothing
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 95)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100))
    execution = EXECUTION.model_copy(update={"device": "cuda"} | settings)
    assert worker.Memory(torch.device("cuda"), execution.replays).read()["peak_bytes"] == expected


def test_synthetic_batch_stays_where_it_is_and_trains_alike():
    plain, kept = Updater(RECIPE, EXECUTION, "cpu"), Updater(RECIPE, EXECUTION, "cpu")
    batch = worker.DeviceBatch(SyntheticBatches(RECIPE, 1), kept.device)
    assert batch.take(4) is batch.take(4)
    assert plain.step(SyntheticBatches(RECIPE, 1).take(4)) == kept.step(batch.take(4))


def test_recompiling_in_a_window_names_guard_and_sizes():
    updater = Updater(RECIPE, EXECUTION, "cpu")
    grown = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    plain, calls = updater.submit, []

    def submit(rows):
        calls.append(rows)
        grown(torch.zeros(25 if len(calls) == 9 else 11))
        return plain(rows)

    updater.submit = submit
    result = timed(updater)
    assert result["status"] == "recompile_in_window"
    assert [w["compiles"] for w in result["windows"]] == [0, 1, 0]
    assert "window 2" in result["reason"]
    assert "11" in result["reason"]
    assert "25" in result["reason"]


def test_too_much_memory_is_a_status():
    memory = {"peak_bytes": 95, "setup_bytes": None, "device_bytes": 100}
    assert worker.verdict({"windows": [], "memory": memory})[0] == "memory_limit"
    assert worker.verdict({"windows": [], "memory": memory | {"peak_bytes": None, "setup_bytes": 89}})[0] == "ok"
    assert worker.verdict({"windows": [], "memory": memory | {"peak_bytes": None}})[0] == "ok"


def caused(outer, inner):
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "device_oom"),
        (caused(CompileError("torch.compile failed"), torch.OutOfMemoryError("CUDA out of memory")), "device_oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "device_oom"),
        (MemoryError(), "host_oom"),
        (CompileError("execution.compile: torch.compile failed with X"), "compile_error"),
        (caused(CompileError("failed"), UnsupportedBackend("execution.sdpa_backend: 'cudnn'")), "unsupported_kernel"),
        (RuntimeError("No available kernel. Aborting execution."), "unsupported_kernel"),
        (NonFinite(5, "loss"), "nonfinite"),
        (UserError("shard: is missing"), "error"),
        (ZeroDivisionError("division by zero"), "error"),
    ],
)
def test_status_is_what_lies_at_the_bottom(error, status):
    found, reason = worker.status_of(error)
    assert found == status
    assert reason


def test_refused_host_memory_is_host_oom():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert worker.status_of(refused.value)[0] == "host_oom"


def request(tmp_path, **changes):
    value = {
        "recipe": RECIPE.plain(),
        "execution": EXECUTION.plain(),
        "protocol": PROTOCOL,
        "mode": "synthetic",
        "cache": None,
        "store": str(tmp_path / "store"),
    } | changes
    files.write_json(tmp_path / "request.json", value)
    worker.main(tmp_path / "request.json", tmp_path / "result.json")
    return files.read_json(tmp_path / "result.json")


@pytest.fixture(autouse=True)
def _survive(monkeypatch):
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)


def test_exploding_run_is_nonfinite_and_names_update(tmp_path):
    recipe = RECIPE.plain() | {"lr": 1e30, "grad_clip": 1e30, "warmup_fraction": 0.0}
    result = request(tmp_path, recipe=recipe)
    assert result["status"] == "nonfinite"
    assert result["reason"].startswith("update ")
    assert not result["user_error"]


def test_backend_that_is_not_there_is_unsupported(tmp_path):
    result = request(tmp_path, execution=EXECUTION.plain() | {"sdpa_backend": "cudnn"})
    assert result["status"] == "unsupported_kernel"
    assert "cudnn" in result["reason"]


def test_missing_cache_is_the_users(tmp_path):
    result = request(tmp_path, mode="real", cache=str(tmp_path / "token_cache.json"))
    assert result["status"] == "error"
    assert result["user_error"]
    assert "token_cache.json" in result["reason"]


def test_timing_is_on_disk_before_the_profile(tmp_path, monkeypatch):
    seen = {}

    def broken(updater, batches, updates, folder):
        seen.update(files.read_json(folder / "result.json"))
        raise RuntimeError("no profiler here")

    monkeypatch.setattr("speedproof.measure.trace.profile", broken)
    result = request(tmp_path, protocol=PROTOCOL | {"profile_updates": 2})
    assert seen["status"] == "ok"
    assert len(seen["windows"]) == 3
    assert result["status"] == "ok"
    assert "no profiler here" in result["profile"]["reason"]
