"""The derivative checks hold on the reference and fail on a planted fault."""

import pytest
import torch

from speedproof.evidence import derivatives
from speedproof.evidence.derivatives import Miniature, check_derivatives
from speedproof.settings.recipe import ModelShape


@pytest.fixture(autouse=True)
def one_thread():
    """Threads only get in each other's way in a model of a few thousand parameters."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Planted(torch.autograd.Function):
    """x² whose derivative is 1 % off."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2.02 * x


class Detached(torch.autograd.Function):
    """x² whose first derivative is right and whose second is forgotten."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x.detach()


def test_reference_holds():
    found = check_derivatives(directions=2)
    assert found["holds"]
    assert [check["name"] for check in found["checks"]] == ["gradcheck", "gradgradcheck", "hessian_vector_product"]
    assert found["checks"][2]["relative_error"] < 1e-6
    assert found["parameters"] == derivatives.SHAPE.parameters


def test_hessian_is_symmetric():
    miniature = Miniature()
    generator = torch.Generator().manual_seed(5)
    flat = miniature.flat()
    u, v = (torch.randn(flat.shape, generator=generator, dtype=flat.dtype) for _ in range(2))
    left, right = u @ miniature.hessian_product(flat, v), v @ miniature.hessian_product(flat, u)
    assert left.item() == pytest.approx(right.item(), rel=1e-10)


def test_padding_has_no_gradient():
    """The last two targets of the second row count for nothing, whatever they are."""
    first, second = Miniature(), Miniature()
    assert (second.targets[-1, -2:] == -100).all()
    assert first(*first.parameters).item() == second(*second.parameters).item()


@pytest.mark.parametrize(("fault", "failing"), [(Planted, "gradcheck"), (Detached, "hessian_vector_product")])
def test_a_planted_fault_is_found(monkeypatch, fault, failing):
    monkeypatch.setattr("speedproof.model.llama.F.silu", fault.apply)
    # Smaller still, since a check that fails goes through every parameter to say where.
    shape = ModelShape(vocab_size=8, layers=1, width=4, heads=1, ffn_width=4, context_length=4)
    found = check_derivatives(Miniature(shape), directions=1)
    checks = {check["name"]: check["holds"] for check in found["checks"]}
    assert not found["holds"]
    assert not checks[failing]
    if fault is Detached:
        assert checks["gradcheck"]  # only the second derivative is wrong
