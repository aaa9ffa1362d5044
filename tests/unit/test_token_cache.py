"""The token cache: reading across shards, what opening refuses, what verifying finds."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.store import Store
from speedproof.data.token_cache import TOKENS_FILE, TokenCache, Tokens, gather


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    return TokenCache.synthetic(tmp_path / "cache", vocab_size=100, train_tokens=5000, validation_tokens=700, seed=3)


@pytest.fixture(scope="module")
def scattered(tmp_path_factory) -> Tokens:
    folder = tmp_path_factory.mktemp("shards")
    sizes, start, shards = [5, 0, 1, 17, 3], 0, []
    for number, size in enumerate(sizes):
        path = folder / f"{number}.bin"
        np.arange(start, start + size, dtype="<u2").tofile(path)
        shards.append((path, size))
        start += size
    return Tokens(shards)


@given(st.integers(0, 26), st.integers(0, 26))
def test_read_across_shards_is_one_row(scattered, start, count):
    if start + count > len(scattered):
        with pytest.raises(IndexError):
            scattered.read(start, count)
    else:
        found = scattered.read(start, count)
        assert found.dtype == np.uint16
        assert found.tolist() == list(range(start, start + count))


def test_read_needs_no_mapped_file(scattered):
    found = scattered.read(2, 10)
    found[:] = 0  # a copy: writing to it must not reach the shard
    assert scattered.read(2, 1)[0] == 2


def test_synthetic_is_deterministic_and_within_the_vocabulary(cache, tmp_path):
    again = TokenCache.synthetic(tmp_path / "again", 100, 5000, 700, 3)
    assert again.identity == cache.identity
    assert np.array_equal(again.train.read(0, 5000), cache.train.read(0, 5000))
    assert cache.train.read(0, 5000).max() == 99
    other = TokenCache.synthetic(tmp_path / "other", 100, 5000, 700, 4)
    assert other.identity != cache.identity


def test_opens_after_a_move(cache, tmp_path):
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    moved = TokenCache.open(tmp_path / "moved" / "token_cache.json", Store(tmp_path / "moved" / "store"))
    assert moved.identity == cache.identity
    assert len(moved.train) == 5000
    assert len(moved.validation) == 700
    assert str(tmp_path) not in (tmp_path / "moved" / "token_cache.json").read_text()


def _shard(cache: TokenCache, folder: Path, split: str = "validation") -> Path:
    return Store(folder / "store").path("shards", cache.manifest[split]["shards"][0]["identity"]) / TOKENS_FILE


def test_missing_shard_is_named(cache, tmp_path):
    path = _shard(cache, tmp_path / "cache")
    path.unlink()
    with pytest.raises(UserError, match="missing from the store") as error:
        TokenCache.open(tmp_path / "cache" / "token_cache.json", Store(tmp_path / "cache" / "store"))
    assert str(path) in str(error.value)


def test_short_shard_is_named_at_opening_and_at_reading(cache, tmp_path):
    path = _shard(cache, tmp_path / "cache")
    os.truncate(path, 200)
    with pytest.raises(UserError, match="has 200 bytes where 1,400 were written") as error:
        TokenCache.open(tmp_path / "cache" / "token_cache.json", Store(tmp_path / "cache" / "store"))
    assert str(path) in str(error.value)
    with pytest.raises(UserError, match="ends after 100 of 700 tokens"):
        cache.validation.read(90, 20)


def test_verify_finds_one_flipped_bit(cache, tmp_path):
    assert cache.verify() == 2
    path = _shard(cache, tmp_path / "cache", "train")
    content = bytearray(path.read_bytes())
    content[1234] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="does not hold what was written") as error:
        cache.verify()
    assert str(path) in str(error.value)


@pytest.mark.parametrize("value", [[], {}, {"identity": "x"}, "text"])
def test_other_json_is_no_manifest(tmp_path, value):
    files.write_json(tmp_path / "token_cache.json", value)
    with pytest.raises(UserError, match="no token cache manifest"):
        TokenCache.open(tmp_path / "token_cache.json", Store(tmp_path / "store"))


def test_identity_follows_the_tokens_and_not_how_they_were_made():
    tokenizer = {"sha256": "t", "vocab_size": 10}
    row = {"split": "train", "index": 0, "identity": {"source": "a"}, "tokens": 3, "documents": 1, "sha256": "x"}
    first = {**row, "index": 1, "sha256": "y"}
    base = gather([row, first], tokenizer)["identity"]
    assert gather([first, {**row, "identity": {"source": "b"}}], tokenizer)["identity"] == base
    assert gather([row, {**first, "sha256": "z"}], tokenizer)["identity"] != base
    assert gather([{**row, "index": 1}, {**first, "index": 0}], tokenizer)["identity"] != base
    assert gather([row, first], tokenizer | {"vocab_size": 11})["identity"] != base
