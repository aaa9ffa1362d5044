"""The fast path on a GPU against the plain one. Every test skips where there is none."""

import numpy as np
import pytest
import torch

from speedproof.data.token_cache import TokenCache
from speedproof.model.attention import UnsupportedBackend
from speedproof.model.llama import build
from speedproof.model.rope import CachedRope
from speedproof.training.compile import compiles, graph_breaks
from speedproof.training.evaluate import evaluate
from speedproof.training.precision import bf16_support
from speedproof.training.update import NonFinite, Updater

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE, CONTEXT = "cuda", 128
MODEL = {"vocab_size": 512, "layers": 2, "width": 128, "heads": 2, "ffn_width": 256, "context_length": CONTEXT}
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-3, 0.05
"""Nats a target; aggregate relative error of the gradient against the FP32 reference."""


@pytest.fixture
def recipe(miniature_recipe):
    """BF16 with four blocks an update and no clipping, so that the optimizer is given the gradient itself."""
    if not bf16_support(DEVICE)[0]:
        pytest.skip(f"needs BF16: {bf16_support(DEVICE)[1]}")
    return miniature_recipe(
        model=MODEL, precision="bf16", targets_per_update=4 * CONTEXT, budget_targets=400 * CONTEXT, grad_clip=1e9
    )


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def rows(blocks: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, (blocks, CONTEXT + 1)).astype(np.uint16)


def make(recipe, execution) -> Updater:
    try:
        return Updater(recipe, execution, DEVICE)
    except UnsupportedBackend as reason:
        pytest.skip(str(reason))


def gradients(updater: Updater) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in updater.model.named_parameters()}


def check_parity(recipe, execution, monkeypatch, batches=((4, 0), (4, 1), (4, 2), (4, 3))) -> Updater:
    """Loss and gradient of several updates with fixed weights, against the FP32 explicit-attention reference.

    Several, since a CUDA graph is recorded at the second or third call and replayed after that.
    """
    updater, reference, found = make(recipe, execution), build(recipe, None, DEVICE), {}
    monkeypatch.setattr(updater.optimizer, "step", lambda: found.update(gradients(updater)))
    for blocks, seed in batches:
        batch = rows(blocks, seed)
        result = updater.step(batch)
        ids = torch.from_numpy(batch.astype(np.int64)).to(DEVICE)
        reference.zero_grad()
        nll = reference.nll_sum(ids[:, :-1], ids[:, 1:])
        (nll / result.targets).backward()
        assert abs(result.loss_sum - nll.item()) / result.targets < LOSS_TOLERANCE
        error = sum((found[n] - w.grad).square().sum().item() for n, w in reference.named_parameters())
        size = sum(w.grad.square().sum().item() for w in reference.parameters())
        assert (error / size) ** 0.5 < GRADIENT_TOLERANCE, f"gradient of the batch with seed {seed}"
    return updater


@pytest.mark.parametrize("backend", ["auto", "flash", "cudnn", "math"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_bf16_parity_of_each_backend(backend, compiled, recipe, miniature_execution, monkeypatch):
    execution = miniature_execution(device="cuda", microbatch=2, sdpa_backend=backend, compile=compiled)
    check_parity(recipe, execution, monkeypatch)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])
@pytest.mark.parametrize("finite_checks", ["separate", "merged"])
def test_bf16_parity_of_each_compile_mode(mode, finite_checks, recipe, miniature_execution, monkeypatch):
    execution = miniature_execution(
        device="cuda", microbatch=2, compile=True, compile_mode=mode, finite_checks=finite_checks
    )
    check_parity(recipe, execution, monkeypatch)


@pytest.mark.parametrize("rope", ["cached", "uncached"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_short_microbatches_run_eager_among_compiled_ones(rope, mode, recipe, miniature_execution, monkeypatch):
    execution = miniature_execution(device="cuda", microbatch=2, compile=True, compile_mode=mode, rope=rope)
    updater = check_parity(recipe, execution, monkeypatch, [(4, 0), (3, 1), (4, 2), (3, 3), (4, 4), (1, 5)])
    assert set(updater.compiled.shapes) == {(2, CONTEXT)}


def test_updates_stay_near_the_eager_ones_and_compile_once(recipe, miniature_execution):
    eager = make(recipe, miniature_execution(device="cuda", microbatch=2))
    fast = make(recipe, miniature_execution(device="cuda", microbatch=4, compile=True, finite_checks="merged"))
    counts = []
    for seed in range(8):
        a, b = eager.step(rows(4, seed)), fast.step(rows(4, seed))
        assert b.loss_sum / b.targets == pytest.approx(a.loss_sum / a.targets, abs=5e-3)
        counts.append((compiles(), graph_breaks()))
    assert len(set(counts)) == 1, "the learning rate changed, and nothing may compile for it"


@pytest.mark.parametrize("finite_checks", ["separate", "merged"])
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_a_nonfinite_update_changes_nothing(finite_checks, mode, recipe, miniature_execution):
    compiled = {"compile": True, "compile_mode": mode} if mode else {}
    updater = make(recipe, miniature_execution(device="cuda", microbatch=2, finite_checks=finite_checks, **compiled))
    for seed in range(4):
        updater.step(rows(4, seed))
    state = updater.state_dict()
    before = [tensor.clone() for part in ("model", "moments") for tensor in state[part].values()]
    weight = updater.model.blocks[0].ffn.up.weight

    def poison(weight):
        weight.grad.fill_(float("nan"))

    hook = weight.register_post_accumulate_grad_hook(poison)
    with pytest.raises(NonFinite, match=r"update 5: gradient of blocks\.0\.ffn\.up\.weight"):
        updater.step(rows(4, 5))
    hook.remove()
    after = [tensor for part in ("model", "moments") for tensor in updater.state_dict()[part].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert updater.updates == 4
    assert updater.step(rows(4, 6)).loss_sum > 0


def test_tables_follow_the_device_and_the_dtype():
    rope = CachedRope(CONTEXT, 64, 10000.0)
    cpu = rope.cos.clone()
    rope.to(DEVICE)
    assert rope.cos.device.type == "cuda"
    # The last bit of an angle near 127 is 7.6e-6, and CUDA's powf may be wrong by several.
    torch.testing.assert_close(rope.cos.cpu(), cpu, rtol=0, atol=1e-4)
    single = rope.cos.clone()
    rope.to(torch.bfloat16)
    assert rope.cos.dtype == torch.float32
    assert torch.equal(rope.cos, single)
    rope.to("cpu", torch.float64)
    assert (rope.cos.device.type, rope.cos.dtype) == ("cpu", torch.float64)
    rope.to("cpu", torch.float32)
    assert torch.equal(rope.cos, cpu)


def test_weights_and_state_are_the_same_on_either_device(recipe, miniature_execution):
    gpu, cpu = make(recipe, miniature_execution(device="cuda")), Updater(recipe, miniature_execution(), "cpu")
    for name, weight in cpu.model.state_dict().items():
        assert torch.equal(gpu.model.state_dict()[name].cpu(), weight)
    gpu.step(rows())
    cpu.load_state_dict(gpu.state_dict())
    back = make(recipe, miniature_execution(device="cuda"))
    back.load_state_dict(cpu.state_dict())
    for part in ("model", "moments"):
        for name, tensor in gpu.state_dict()[part].items():
            assert torch.equal(back.state_dict()[part][name], tensor)
    a, b = gpu.step(rows(4, 1)), back.step(rows(4, 1))
    assert a.loss_sum == pytest.approx(b.loss_sum, rel=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_validation_agrees_with_the_reference(compiled, tmp_path, recipe, miniature_execution):
    tokens = TokenCache.synthetic(tmp_path, 512, 1000, 7 * CONTEXT + 50, seed=0).validation
    execution = miniature_execution(device="cuda", evaluation_batch=3, evaluation_compile=compiled)
    found = evaluate(build(recipe, execution, DEVICE), tokens, recipe, execution, DEVICE)
    wanted = evaluate(build(recipe, None, DEVICE), tokens, recipe, None, DEVICE)
    assert found.targets == wanted.targets == 7 * CONTEXT + 49
    assert found.loss == pytest.approx(wanted.loss, abs=LOSS_TOLERANCE)
