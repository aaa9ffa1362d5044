import pytest
import torch

from speedproof.core.errors import UserError
from speedproof.training import precision
from speedproof.training.precision import autocast, bf16_support, compute_dtype, require_resolved, resolve_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(("has", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_takes_what_the_hardware_has(has, expected, miniature_recipe, monkeypatch):
    monkeypatch.setattr(precision, "bf16_support", lambda device: (has, "the reason"))
    recipe = miniature_recipe(precision="auto")
    resolved, reason = resolve_precision(recipe, "cpu")
    assert resolved.precision == expected
    assert reason == f"{expected}: the reason"
    assert resolved.plain() == recipe.plain() | {"precision": expected}


@pytest.mark.parametrize("chosen", ["bf16", "fp32"])
def test_a_chosen_precision_stays(chosen, miniature_recipe, monkeypatch):
    monkeypatch.setattr(precision, "bf16_support", lambda device: pytest.fail("asked the hardware"))
    recipe = miniature_recipe(precision=chosen)
    assert resolve_precision(recipe, "cpu")[0] == recipe


@pytest.mark.parametrize(
    ("flags", "mkldnn", "expected"),
    [
        ({"sse2", "avx2"}, False, False),
        ({"avx512f", "avx512bw"}, True, False),
        ({"avx512_bf16"}, True, True),
        ({"amx_bf16", "amx_tile"}, True, True),
        ({"asimd", "bf16"}, True, True),
        ({"amx_bf16"}, False, False),
    ],
)
def test_cpu_support_needs_the_instructions_and_a_library_that_uses_them(flags, mkldnn, expected, monkeypatch):
    monkeypatch.setattr(precision, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn, raising=False)
    has, reason = bf16_support("cpu")
    assert has is expected
    assert reason


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((10, 3), True)])
def test_cuda_support_by_compute_capability(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    has, reason = bf16_support("cuda")
    assert has is expected
    assert "A GPU" in reason


def test_a_missing_gpu_is_said(miniature_recipe, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"execution\.device: found 'cuda'"):
        resolve_precision(miniature_recipe(precision="auto"), "cuda")


def test_auto_must_be_decided(miniature_recipe):
    with pytest.raises(UserError, match=r"recipe\.precision: found 'auto'"):
        require_resolved(miniature_recipe(precision="auto"))


def test_autocast_follows_the_recipe(miniature_recipe):
    a = torch.ones(2, 2)
    for chosen, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        recipe = miniature_recipe(precision=chosen)
        assert compute_dtype(recipe) == dtype
        with autocast(recipe, CPU):
            assert (a @ a).dtype == dtype
