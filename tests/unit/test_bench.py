"""The benchmark's modes, rows and ceiling, and that its processes run; no time is compared."""

import json

import pytest
import torch

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.store import Store
from speedproof.evidence import bench
from speedproof.measure import device_lock, forward, matmul


@pytest.fixture
def free_device(tmp_path, monkeypatch):
    """No wait for whoever measures on this machine at the moment."""
    monkeypatch.setattr(device_lock, "FOLDER", tmp_path / "locks")


def test_every_mode_is_found_by_its_name():
    names = [mode.name for mode in bench.MODES]
    assert len(set(names)) == len(names) == 12
    assert [bench.Mode.named(name) for name in names] == list(bench.MODES)
    assert bench.Mode.named("bf16-compiled-tuned") == bench.Mode("bf16", False, True, True)
    with pytest.raises(UserError, match="modes: found 'fp16-eager'; known modes are fp32-eager, "):
        bench.Mode.named("fp16-eager")


@pytest.mark.parametrize("name", ["fp32-eager", "bf16-compiled-tuned", "fp32-forward-compiled"])
def test_sides_differ_in_what_is_the_model_s_own_alone(name, miniature_execution):
    native = miniature_execution(projections="fused", loss="chunked", allocator="tuned")
    mode = bench.Mode.named(name)
    a, b = mode.sides(native)
    assert (a.implementation, b.implementation) == ("transformers", "native")
    assert a.allocator == ("tuned" if mode.tuned else "default")
    assert b.allocator == "tuned"
    assert a.compile == b.compile == a.evaluation_compile == b.evaluation_compile == mode.compiled
    assert a.model_copy(update={"allocator": b.allocator}) == b.peer("transformers")


def test_products_are_all_the_weights_flops(miniature_recipe):
    """2 FLOPs a weight and target forward, 6 with the backward pass: the model's FLOPs without attention's own."""
    shape = miniature_recipe(model={"layers": 3}).model
    attention = 2 * shape.layers * shape.context_length * shape.width
    for backward, flops in ((False, shape.forward_flops_per_target), (True, shape.training_flops_per_target)):
        found = sum(2 * m * k * n * count for (m, k, n), count in matmul.products(shape, 10, backward).items())
        assert found / 10 == flops - attention * (3 if backward else 1)


def test_ceiling_weighs_shapes_by_their_time():
    counts, seconds = {(1, 1, 50): 2, (1, 1, 150): 1}, {(1, 1, 50): 1.0, (1, 1, 150): 3.0}
    assert matmul.flops_per_s(counts, seconds) == pytest.approx((2 * 100 + 300) / 5)


def test_matmul_process_gives_rates_or_reasons(miniature_recipe, miniature_execution, free_device, monkeypatch):
    monkeypatch.setattr(matmul, "LEAST_SECONDS", 0.0)
    found = bench.ceilings(miniature_recipe(), miniature_execution(), {"fp32"})
    assert found["fp32"]["update"] > 0
    assert found["fp32"]["forward"] > 0
    assert found["bf16"]["update"] is None
    assert found["bf16"]["reason"]


def comparison(blocks, reason=None):
    return {"blocks": blocks, "status": "ok" if reason is None else "incomplete", "reason": reason}


def test_row_shows_ratio_interval_and_share_of_the_ceiling(miniature_recipe):
    recipe = miniature_recipe()
    ceiling = {"fp32": {"update": 200 * recipe.model.training_flops_per_target, "forward": 1.0, "reason": ""}}
    entry = bench.row(
        bench.Mode.named("fp32-compiled"), recipe, comparison([[100.0, 150.0, 150.0, 100.0]] * 3), ceiling
    )
    assert (entry["ratio"], entry["share_of_matmul"]) == (pytest.approx(1.5), pytest.approx(0.75))
    assert entry["ceiling_targets_per_s"] == pytest.approx(200)
    line = "fp32 compiled             150 targets/s  1.50x [1.50, 1.50]  75 % of matmul  transformers 100"
    assert bench.describe(entry) == line
    json.dumps(entry, allow_nan=False)


def test_rows_without_a_ratio_say_why(miniature_recipe):
    mode, recipe = bench.Mode.named("bf16-eager"), miniature_recipe()
    line = bench.describe(bench.unsupported(mode, "this x86_64 CPU has no BF16 matrix instructions"))
    assert line == "bf16 eager             unsupported: this x86_64 CPU has no BF16 matrix instructions"
    ceiling = {"bf16": {"update": 1.0, "forward": 1.0, "reason": ""}}
    entry = bench.row(mode, recipe, comparison([], "0 of 3 blocks are valid (compile_error)"), ceiling)
    assert bench.describe(entry) == "bf16 eager             0 of 3 blocks are valid (compile_error)"
    one = bench.row(mode, recipe, comparison([[10.0, 11.0, 11.0, 10.0]]), ceiling)
    assert "1.10x (one block)" in bench.describe(one)


def test_forward_blocks_run_in_processes_of_their_own(
    miniature_recipe, miniature_execution, free_device, tmp_path, monkeypatch
):
    asked = []

    def process(module, request, deadline_s):
        asked.append(request["execution"]["implementation"])
        files.write_json(tmp_path / "request.json", request)
        threads = torch.get_num_threads()
        monkeypatch.setattr(forward, "die_with_parent", lambda: None)
        forward.main(tmp_path / "request.json", tmp_path / "result.json")
        torch.set_num_threads(threads)
        return None, files.read_json(tmp_path / "result.json"), ""

    monkeypatch.setattr(bench, "_process", process)
    native, mode = miniature_execution(), bench.Mode.named("fp32-forward-eager")
    monkeypatch.setattr(bench.Mode, "sides", lambda self, execution: (native, native))
    work = bench.Effort(1, {"deadline_s": 60}, 2, 2)
    found = bench.run_mode(mode, miniature_recipe(), native, work, Store(tmp_path / "store"))
    assert found["status"] == "ok", found
    assert len(asked) == 4
    result = files.read_json(tmp_path / "result.json")
    assert [window["targets"] for window in result["windows"]] == [2 * native.evaluation_batch * 16] * 2
    assert all(rate > 0 for rate in found["blocks"][0])


def test_a_forward_process_that_fails_is_a_finding(miniature_recipe, miniature_execution, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_process", lambda *rest: (None, {"status": "host_oom", "reason": "no memory"}, "tail"))
    record = bench._forward(miniature_execution(), miniature_recipe(), bench.effort(True, 1))
    assert (record["status"], record["reason"], record["log_tail"]) == ("host_oom", "no memory", "tail")
    assert record["targets_per_s"] is None
