"""Measuring on a GPU: its class, its readings, allocator memory, kernels of a profile, one whole record."""

from pathlib import Path

import pytest
import torch
import yaml

from speedproof.core.store import Store
from speedproof.data.loader import SyntheticBatches
from speedproof.measure import records, sensors, trace, worker
from speedproof.measure.device_lock import device_lock
from speedproof.measure.environment import environment
from speedproof.settings.execution import Execution
from speedproof.settings.recipe import Recipe
from speedproof.training.update import Updater

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CONFIG = yaml.safe_load((Path(__file__).resolve().parents[2] / "config/default.yaml").read_text())
MODEL = {"vocab_size": 512, "layers": 2, "width": 128, "heads": 2, "ffn_width": 256, "context_length": 128}
RECIPE = Recipe.parse(
    CONFIG["recipe"]
    | {
        "preset": "tiny",
        "data": None,
        "model": MODEL,
        "targets_per_update": 1024,
        "budget_targets": 10240,
        "precision": "bf16",
    }
)
EXECUTION = Execution.parse(CONFIG["execution"] | {"device": "cuda", "microbatch": 4, "compile": False})
PROTOCOL = {
    "warmup_updates": 2,
    "windows": 2,
    "updates_per_window": 3,
    "min_window_seconds": 1.2,
    "profile_updates": 2,
    "deadline_s": 300,
}


def test_class_names_the_gpu_and_facts_its_uuid():
    found = environment("cuda")
    assert found["class"]["gpu"] == torch.cuda.get_device_name(0)
    assert found["class"]["memory_bytes"] == torch.cuda.get_device_properties(0).total_memory
    assert found["class"]["cuda"] == torch.version.cuda
    assert found["facts"]["gpu_uuid"] not in str(found["class"])


def test_device_is_locked_by_uuid():
    with device_lock("cuda"), device_lock("cpu"):
        pass


def test_readings_of_this_gpu():
    source = sensors.open_source("cuda")
    if source is None:
        pytest.skip("NVML cannot be used here")
    try:
        assert source.read(None)["memory_used_bytes"] > 0
    finally:
        source.close()


def test_memory_of_windows_is_apart_from_set_up():
    result = {"status": "error", "reason": None, "windows": [], "warmup": None, "memory": None}
    updater = Updater(RECIPE, EXECUTION, "cuda")
    held = torch.cuda.memory_allocated()  # also by the tests before: cuBLAS keeps a workspace for each stream it saw
    big = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del big
    batches = worker.DeviceBatch(SyntheticBatches(RECIPE, 1), updater.device)
    worker._time(updater, batches, PROTOCOL | {"min_window_seconds": 0.0}, result)
    assert result["status"] == "ok"
    assert result["memory"]["kind"] == "CUDA allocator"
    assert result["memory"]["setup_bytes"] >= held + 2**28 > result["memory"]["peak_bytes"] > 0


def test_memory_of_a_replayed_graph_is_counted():
    result = {"status": "error", "reason": None, "windows": [], "warmup": None, "memory": None}
    graph = {"optimizer": "arena", "finite_checks": "latched", "capture": "graph"}
    updater = Updater(RECIPE, EXECUTION.model_copy(update=graph), "cuda")
    batches = worker.DeviceBatch(SyntheticBatches(RECIPE, 1), updater.device)
    worker._time(updater, batches, PROTOCOL | {"min_window_seconds": 0.0}, result)
    assert result["status"] == "ok"
    assert result["memory"]["peak_bytes"] >= result["memory"]["setup_bytes"] > 0


def test_profile_counts_kernels(tmp_path):
    updater = Updater(RECIPE, EXECUTION, "cuda")
    batches = SyntheticBatches(RECIPE, 1)
    updater.step(batches.take(RECIPE.blocks_per_update))
    found = trace.profile(updater, batches, 2, tmp_path)
    assert found["kernels_per_update"] > 100
    for name in ("matmul", "attention", "cross-entropy", "RoPE", "norm", "optimizer", "copy"):
        assert found["families"][name]["ms_per_update"] > 0, name
    assert found["trace"]["file"] == trace.TRACE_FILE


def test_whole_record_with_synthetic_data(tmp_path):
    record = records.measure(RECIPE, EXECUTION, PROTOCOL, store=Store(tmp_path), cache_manifest=None, mode="synthetic")
    assert record["status"] in ("ok", "tainted"), record["reason"]
    assert record["memory"]["peak_bytes"] > 0
    assert record["precision"] == "bf16"
    assert record["mfu"] is None or 0 < record["mfu"] < 1
    assert record["energy_j_per_million_targets"] is None or record["energy_j_per_million_targets"] > 0
    assert record["profile"]["kernels_per_update"] > 100
