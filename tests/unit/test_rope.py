import numpy as np
import pytest
import torch

from speedproof.model.rope import CachedRope, UncachedRope, tables

LENGTH, SIZE, THETA = 24, 8, 10000.0


@pytest.fixture
def x():
    return torch.randn(2, LENGTH, 3, SIZE, generator=torch.Generator().manual_seed(0))


def expected(x: np.ndarray) -> np.ndarray:
    """Pair i of the two halves as a complex number, turned by position · theta^(−2i/D)."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    angles = np.arange(x.shape[1])[:, None] * THETA ** (-2.0 * np.arange(half) / x.shape[-1])
    turned = pairs * np.exp(1j * angles)[None, :, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("kind", [CachedRope, UncachedRope])
def test_it_turns_each_pair_by_its_angle(kind, x):
    found = kind(LENGTH, SIZE, THETA).double()(x.double())
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected(x.double().numpy()), atol=1e-12)


def test_cached_and_uncached_agree_to_the_last_bit(x):
    cached, uncached = CachedRope(LENGTH, SIZE, THETA), UncachedRope(LENGTH, SIZE, THETA)
    assert torch.equal(cached(x), uncached(x))
    assert torch.equal(cached(x[:, :5]), uncached(x[:, :5]))
    assert torch.equal(cached(x.bfloat16()), uncached(x.bfloat16()))
    assert cached(x.bfloat16()).dtype == torch.bfloat16


def test_scores_depend_on_the_distance_alone():
    rope = CachedRope(LENGTH, SIZE, THETA).double()
    one = torch.randn(SIZE, dtype=torch.float64).expand(1, LENGTH, 1, SIZE)
    turned = rope(one)[0, :, 0]
    scores = turned @ turned.T
    for distance in (0, 1, 7):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))


def test_tables_are_computed_anew_when_the_dtype_changes():
    rope = CachedRope(LENGTH, SIZE, THETA)
    single = rope.cos.clone()
    rope.bfloat16()
    assert rope.cos.dtype == torch.float32
    assert torch.equal(rope.cos, single), "a cast through BF16 must not coarsen the angles"
    rope.double()
    assert torch.equal(rope.cos, tables(LENGTH, SIZE, THETA, torch.device("cpu"), torch.float64)[0])
    assert not torch.equal(rope.cos, single.double())
    rope.float()
    assert torch.equal(rope.cos, single)


def test_tables_are_computed_anew_when_the_device_changes():
    with torch.device("meta"):
        rope = CachedRope(LENGTH, SIZE, THETA)
    assert rope.cos.device.type == "meta"
    rope.to_empty(device="cpu")
    assert torch.equal(rope.cos, CachedRope(LENGTH, SIZE, THETA).cos)
    rope.to_empty(device="cpu")
    assert torch.equal(rope.cos, CachedRope(LENGTH, SIZE, THETA).cos), "to_empty leaves buffers without content"


def test_tables_are_no_part_of_a_checkpoint():
    assert CachedRope(LENGTH, SIZE, THETA).state_dict() == {}
