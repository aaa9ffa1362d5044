"""The one-pass kernel: for truth in Triton's interpreter, and what is said where it cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speedproof.core.errors import UserError
from speedproof.model.loss import OnePass
from speedproof.training.update import Updater

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def test_the_kernel_is_pinned_to_the_plain_loss():
    """In a process of its own: triton must be told to interpret before anything imports it, as the compiler does."""
    pytest.importorskip("triton", reason="triton is not installed here")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "--rootdir",
        HERE.parents[1],
    ]
    ended = subprocess.run(
        [*command, HERE / "interpreted_cross_entropy.py", HERE / "test_loss.py"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "skipped" not in ended.stdout


@pytest.mark.skipif(INTERPRETED, reason="what is interpreted is not compiled")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself, in tests/cuda")
@pytest.mark.parametrize("slope", [True, False])
def test_it_compiles_for_a_gpu_that_is_not_there(slope, tmp_path, monkeypatch):
    """For capability 9.0 and rows of 32,000 in BF16: each logit is read, and written, once, 16 bytes at a time."""
    triton = pytest.importorskip("triton", reason="triton is not installed here")
    from triton.backends.compiler import GPUTarget

    from speedproof.model.cross_entropy import _cross_entropy_row as kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict(zip(kernel.arg_names, ["*bf16", "*i64", "*fp32", "i32", "constexpr", "constexpr"], strict=True))
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(4)}
    source = triton.compiler.ASTSource(kernel, types, {"BLOCK": 32768, "SLOPE": slope}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 32})
    assert made.asm["cubin"]
    assert made.asm["ptx"].count("ld.global.v4") == 4
    assert made.asm["ptx"].count("st.global.v4") == (4 if slope else 0)


def test_a_missing_triton_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "speedproof.model.cross_entropy", raising=False)
    with pytest.raises(UserError, match=r"execution\.loss: 'triton' needs the package triton.*use chunked"):
        OnePass()


@pytest.mark.skipif(INTERPRETED, reason="here a CPU interprets it")
def test_a_cpu_is_no_place_for_it(miniature_recipe, miniature_execution):
    with pytest.raises(UserError, match=r"execution\.loss: 'triton' is a kernel for GPUs; use chunked on cpu"):
        Updater(miniature_recipe(), miniature_execution(loss="triton"), "cpu")
    assert miniature_execution(loss="triton", device="cuda").contradiction() is None
