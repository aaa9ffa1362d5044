"""The loader: an order that depends on the seed alone, a cursor, validation blocks, the copy to the device."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.data.loader import (
    SyntheticBatches,
    TrainingBatches,
    subset_blocks,
    to_device,
    validation_batches,
    validation_targets,
)
from speedproof.data.resident import ResidentBatches, _check_fit
from speedproof.data.token_cache import Tokens
from speedproof.settings.recipe import Recipe

CONFIG = Path(__file__).parents[2] / "config"


def recipe(blocks: int, context: int = 8, **changes) -> Recipe:
    settings = files.read_yaml(CONFIG / "default.yaml")["recipe"]
    shape = files.read_yaml(CONFIG / "presets" / "nano.yaml") | {"context_length": context}
    settings |= {"targets_per_update": 4 * context, "budget_targets": blocks * context, "virtual_epochs": 1}
    return Recipe.parse(settings | {"preset": "nano", "model": shape, "data": None} | changes)


class Counted(Tokens):
    """Token i is i; remembers what was read."""

    def __init__(self, count: int):
        self.count, self.reads = count, []

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, count: int) -> np.ndarray:
        assert start >= 0
        assert start + count <= self.count
        self.reads.append((start, count, threading.current_thread().name))
        return (np.arange(start, start + count) % 65536).astype(np.uint16)


@pytest.fixture
def small_ranges(monkeypatch):
    """Ranges of ten blocks of eight targets: the smallest buffer a recipe can name holds 65,536 of them."""
    monkeypatch.setattr("speedproof.data.loader.MEBIBYTE", 160)


def numbers(rows: np.ndarray) -> list[int]:
    return (rows[:, 0] // 8).tolist()


@pytest.mark.usefixtures("small_ranges")
class TestOrder:
    values = recipe(35, shuffle_buffer_mib=1)

    def order(self, sizes, cursor=0, **changes):
        tokens = Counted(35 * 8 + 1)
        with TrainingBatches(tokens, recipe(35, shuffle_buffer_mib=1, **changes), cursor) as batches:
            rows = np.concatenate([batches.take(size) for size in sizes])
            assert batches.cursor == cursor + sum(sizes)
        assert np.array_equal(rows, rows[:, :1] + np.arange(9, dtype=np.uint16))
        return numbers(rows)

    def test_every_block_once_shuffled_within_its_range(self):
        order = self.order([35])
        assert sorted(order) == list(range(35))
        assert order != list(range(35))
        for start in range(0, 35, 10):
            part = order[start : start + 10]
            assert sorted(part) == list(range(start, min(start + 10, 35)))

    @given(st.lists(st.integers(1, 13), min_size=1, max_size=8))
    def test_order_does_not_depend_on_the_sizes_taken(self, sizes):
        whole = self.order([35])
        sizes = [s for k, s in enumerate(sizes) if sum(sizes[: k + 1]) <= 35]
        if sizes:
            assert self.order(sizes) == whole[: sum(sizes)]

    @given(st.integers(0, 34))
    def test_resume_anywhere_repeats_and_skips_nothing(self, cursor):
        whole = self.order([35])
        assert self.order([35 - cursor], cursor) == whole[cursor:]

    def test_resume_reads_only_its_own_range_and_the_next(self):
        tokens = Counted(35 * 8 + 1)
        with TrainingBatches(tokens, self.values, cursor=17) as batches:
            batches.take(1)
        assert {start for start, _, _ in tokens.reads} <= {80, 160}

    def test_seed_decides(self):
        assert self.order([35], seed=42) == self.order([35], seed=42)
        assert self.order([35], seed=42) != self.order([35], seed=43)

    def test_other_settings_do_not(self):
        assert self.order([35], lr=0.5, targets_per_update=8) == self.order([35])

    def test_ranges_are_read_by_the_thread_one_ahead(self):
        tokens = Counted(35 * 8 + 1)
        with TrainingBatches(tokens, self.values) as batches:
            batches.take(1)
        assert {name for _, _, name in tokens.reads} == {"speedproof-loader_0"}
        assert [start for start, _, _ in tokens.reads] in ([0], [0, 80])  # the second may have been called off

    def test_budget_ends(self):
        with TrainingBatches(Counted(400), self.values, 34) as batches:
            batches.take(1)
            with pytest.raises(IndexError):
                batches.take(1)

    def test_repeat_starts_the_order_again(self):
        with TrainingBatches(Counted(400), self.values, repeat=True) as batches:
            rows = numbers(batches.take(50))
        assert rows[35:] == rows[:15]

    def test_a_smaller_budget_is_a_prefix_where_ranges_are_whole(self):
        with TrainingBatches(Counted(400), recipe(20, shuffle_buffer_mib=1)) as batches:
            assert numbers(batches.take(20)) == self.order([20])

    def test_reading_error_reaches_the_caller(self):
        tokens = Counted(400)

        def read(start, count):
            raise UserError("shard: gone")

        tokens.read = read
        with TrainingBatches(tokens, self.values) as batches, pytest.raises(UserError, match="gone"):
            batches.take(1)

    def test_close_ends_the_thread(self):
        batches = TrainingBatches(Counted(400), self.values)
        batches.take(30)
        batches.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("speedproof-loader")]


def test_budget_larger_than_the_data_names_the_key_and_both_figures():
    with pytest.raises(UserError, match=r"recipe\.budget_targets: 280 .* 272 .*data\.train_files"):
        TrainingBatches(Counted(35 * 8), recipe(35))  # one token short: the last target is missing
    TrainingBatches(Counted(35 * 8 + 1), recipe(35)).close()


def test_budget_rounds_up_to_whole_blocks():
    values = recipe(35, budget_targets=273)
    with TrainingBatches(Counted(1000), values) as batches:
        assert len(batches.take(35)) == 35
        with pytest.raises(IndexError):
            batches.take(1)


def test_synthetic_batch_is_the_same_each_time():
    values = recipe(35)
    with SyntheticBatches(values, 7) as batches, SyntheticBatches(values, 7) as others:
        first = batches.take(4)
        assert first.shape == (4, 9)
        assert first.dtype == np.uint16
        assert first.max() < values.model.vocab_size
        assert np.array_equal(batches.take(4), first)
        assert np.array_equal(others.take(6), np.concatenate([first, first[:2]]))
        assert batches.cursor == 8


@given(st.integers(2, 200), st.integers(1, 9), st.integers(1, 20))
def test_validation_counts_every_target_once_whatever_the_batch(count, batch, context):
    tokens = Counted(count)
    seen = []
    for rows, valid in validation_batches(tokens, context, batch):
        assert rows.shape == (len(valid), context + 1)
        assert len(valid) <= batch
        for row, n in zip(rows, valid, strict=True):
            assert row[:n].tolist() == [t - 1 for t in row[1 : n + 1].tolist()]
            seen += row[1 : n + 1].tolist()
    assert seen == list(range(1, count))
    assert len(seen) == validation_targets(tokens)


def test_validation_subset_gives_those_blocks():
    tokens = Counted(100)
    whole = np.concatenate([rows for rows, _ in validation_batches(tokens, 8, 3)])
    chosen = np.concatenate([rows for rows, _ in validation_batches(tokens, 8, 2, [1, 4, 12])])
    assert np.array_equal(chosen, whole[[1, 4, 12]])
    assert [valid.tolist() for _, valid in validation_batches(tokens, 8, 2, [1, 4, 12])] == [[8, 8], [3]]


def test_subset_is_fixed_whole_and_sorted():
    values = recipe(35, subset_blocks=20)
    chosen = subset_blocks(Counted(35 * 8), values)
    assert len(set(chosen.tolist())) == 20
    assert chosen.tolist() == sorted(chosen.tolist())
    assert chosen.max() <= 33  # block 34 lacks its last target
    assert np.array_equal(chosen, subset_blocks(Counted(35 * 8), values))
    assert not np.array_equal(chosen, subset_blocks(Counted(35 * 8), recipe(35, subset_blocks=20, subset_seed=-1)))


def test_subset_larger_than_the_split_names_the_key():
    with pytest.raises(UserError, match=r"recipe\.subset_blocks: 64 is more than the 34 "):
        subset_blocks(Counted(35 * 8), recipe(35, subset_blocks=64))
    with pytest.raises(UserError, match=r"data\.validation_files: .* 3 targets do not fill"):
        subset_blocks(Counted(4), recipe(35, subset_blocks=1))


def test_to_device_shifts_and_ignores_the_padding():
    rows = np.array([[1, 2, 3, 65535], [4, 5, 0, 0]], dtype=np.uint16)
    inputs, targets = to_device(rows, np.array([3, 1]), "cpu")
    assert inputs.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert targets.tolist() == [[2, 3, 65535], [5, -100, -100]]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert to_device(rows, None, "cpu")[1].tolist() == [[2, 3, 65535], [5, 0, 0]]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_to_device_on_cuda_equals_cpu():
    rows = np.random.default_rng(1).integers(0, 65536, (5, 33), dtype=np.uint16)
    valid = np.array([32, 32, 7, 32, 1])
    for there, here in zip(to_device(rows, valid, "cuda"), to_device(rows, valid, "cpu"), strict=True):
        assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("blocks", [1, 3, 7])
@pytest.mark.parametrize("cursor", [0, 17])
def test_resident_tokens_come_in_the_same_order(blocks, cursor, small_ranges):
    """Across ranges of ten blocks and past the end of the budget of 34; ids reach above 32,767."""
    tokens, settings = Counted(10**6), recipe(34, seed=5)
    tokens.read = lambda start, count: ((np.arange(start, start + count) * 997) % 65536).astype(np.uint16)
    resident = ResidentBatches(tokens, settings, cursor, device="cpu", repeat=True)
    with TrainingBatches(tokens, settings, cursor, repeat=True) as read:
        for _ in range(60 // blocks):
            found, wanted = resident.take(blocks), read.take(blocks)
            assert found.dtype == torch.int64
            assert np.array_equal(found.numpy(), wanted)
            assert resident.state_dict() == read.state_dict()
    for a, b in zip(to_device(found, None, "cpu"), to_device(wanted, None, "cpu"), strict=True):
        assert torch.equal(a, b)


def test_resident_tokens_end_with_the_budget_and_name_what_is_too_much():
    batches = ResidentBatches(Counted(10**4), recipe(30), device="cpu")
    assert batches.take(30).shape == (30, 9)
    with pytest.raises(IndexError):
        batches.take(1)
    with pytest.raises(UserError, match=r"recipe\.budget_targets: 800 targets"):
        ResidentBatches(Counted(500), recipe(100), device="cpu")
    with pytest.raises(UserError, match=r"execution\.tokens: .*3\.00 GiB, more than 50% of the 4\.00 GiB.*use host"):
        _check_fit(3 * 2**30, 4 * 2**30)
    _check_fit(2**30, 4 * 2**30)
