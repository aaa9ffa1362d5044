import pytest
import torch

from speedproof.model import attention as module
from speedproof.model.attention import UnsupportedBackend, attention, check_backend, explicit

CPU = torch.device("cpu")


def qkv(dtype=torch.float32, length=12):
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, 3, length, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3))


def by_hand(q, k, v):
    """Row by row, over the positions that a query may see."""
    out = torch.empty_like(v)
    for t in range(q.shape[2]):
        weights = (k[:, :, : t + 1] * q[:, :, t : t + 1]).sum(-1) / q.shape[-1] ** 0.5
        weights = weights.exp() / weights.exp().sum(-1, keepdim=True)
        out[:, :, t] = (weights[..., None] * v[:, :, : t + 1]).sum(2)
    return out


def test_explicit_attention_is_the_formula():
    q, k, v = (x.detach().double() for x in qkv())
    torch.testing.assert_close(explicit(q, k, v), by_hand(q, k, v), rtol=0, atol=1e-12)
    assert explicit(q, k, v).dtype == torch.float64


@pytest.mark.parametrize("backend", ["auto", "flash", "math"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_each_backend_agrees_with_the_reference(backend, dtype, tolerance):
    inputs, exact = qkv(dtype), [x.detach().double().requires_grad_() for x in qkv(dtype)]
    y, reference = attention(backend)(*inputs), attention("reference")(*exact)
    torch.testing.assert_close(y.double(), reference, rtol=tolerance, atol=tolerance)
    found = torch.autograd.grad(y.float().square().sum(), inputs)
    wanted = torch.autograd.grad(reference.square().sum(), exact)
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() / b.norm() < tolerance


def test_the_reference_is_differentiable_twice():
    small = tuple(x.detach()[:1, :1, :3, :2].double().requires_grad_() for x in qkv())
    assert torch.autograd.gradcheck(explicit, small)
    assert torch.autograd.gradgradcheck(explicit, small)


@pytest.mark.parametrize("backend", ["auto", "flash", "math", "reference"])
def test_what_runs_passes_the_check(backend):
    check_backend(backend, 2, 16, 8, torch.float32, CPU)


def test_a_backend_that_does_not_exist_here_is_named():
    with pytest.raises(UnsupportedBackend, match=r"execution\.sdpa_backend: 'cudnn' does not exist on cpu"):
        check_backend("cudnn", 2, 16, 8, torch.float32, CPU)


def test_a_backend_that_refuses_is_named_with_its_reason(monkeypatch):
    def refuse(q, k, v, backend):
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(module, "forced", refuse)
    with pytest.raises(UnsupportedBackend, match=r"'flash' cannot run 2 heads of 8 .* float32 on cpu \(No available"):
        check_backend("flash", 2, 16, 8, torch.float32, CPU)


@pytest.mark.parametrize(
    ("backend", "reason"), [("flash", "Expected dtype Half or BFloat16."), ("cudnn", "cuDNN was turned off.")]
)
def test_the_reason_is_that_of_the_backend_that_was_asked(backend, reason):
    given = [  # in the order in which PyTorch speaks on a GPU
        *("Memory efficient kernel not used because:", "Memory efficient attention was turned off."),
        *("Flash attention kernel not used because:", "Expected dtype Half or BFloat16."),
        *("CuDNN attention kernel not used because:", "cuDNN was turned off."),
    ]
    warned = [f"{text} (Triggered internally at sdp_utils.cpp:1.)" for text in given]
    assert module._reason(backend, warned, "No available kernel. Aborting execution.") == reason
    assert module._reason(backend, warned, "cuDNN Frontend error") == "cuDNN Frontend error"


def test_running_out_of_memory_is_not_taken_for_a_missing_kernel(monkeypatch):
    def exhausted(q, k, v, backend):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "forced", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        check_backend("flash", 2, 16, 8, torch.float32, CPU)
