"""Shards: order, content, what a kill, a full disk or a second process leaves, memory."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.store import Store
from speedproof.data import shards, sources
from speedproof.data import tokenizer as tokenizers
from speedproof.data.token_cache import TOKENS_FILE, TokenCache, gather
from speedproof.settings.experiment import Data

ROOT = Path(__file__).parents[2]
STRANGE = ["NUL \0", "🙂", "שלום مرحبا", "x" * 1_500_000, "ends with </s>", "\n", " "]


class Place:
    """A corpus on disk with a tokenizer, and the shards made of it."""

    def __init__(self, folder: Path, train: list[list[str]], validation: list[str]):
        self.folder, self.store = folder, Store(folder / "store")
        for split, parts in (("train", train), ("validation", [validation])):
            for index, texts in enumerate(parts):
                path = folder / "en" / f"c4-{split}.{index:05d}-of-{len(parts):05d}.json.gz"
                path.parent.mkdir(parents=True, exist_ok=True)
                with gzip.open(path, "wt", compresslevel=1) as stream:
                    stream.writelines(json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n" for text in texts)
        settings = files.read_yaml(ROOT / "config" / "default.yaml")["data"]
        settings |= {"source": "files", "directory": str(folder), "train_files": len(train)}
        self.data = Data.parse(settings, "data")
        self.manifest = sources.find(self.data, None, self.store)
        self.tokenizer = folder / "tokenizer.json"
        files.write_text(self.tokenizer, tokenizers.train(["some text to merge"], 260, "</s>").to_str())
        self.tokenizer_manifest = tokenizers.describe(self.tokenizer, 260, None)
        files.write_json(folder / "sources.json", self.manifest)
        files.write_json(folder / "manifest.json", self.tokenizer_manifest)
        files.write_yaml(folder / "data.yaml", self.data.plain())

    def make(self, split: str = "train", index: int = 0, seed: int = 42) -> dict:
        return shards.make_shard(self.manifest, split, index, self.tokenizer, self.tokenizer_manifest, seed, self.store)

    def texts(self, row: dict) -> list[str]:
        """The documents of a shard, decoded."""
        ids = np.fromfile(self.store.path("shards", row["identity"]) / TOKENS_FILE, dtype="<u2")
        decoder = tokenizers.load(self.tokenizer)
        ends = np.flatnonzero(ids == self.tokenizer_manifest["end_of_document"]["id"])
        assert ends[-1] == len(ids) - 1
        starts = np.concatenate([[0], ends[:-1] + 1])
        return [decoder.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in zip(starts, ends, strict=True)]

    def command(self, output: str, split: str = "train") -> list[str]:
        options = {"data": "data.yaml", "sources": "sources.json", "tokenizer": "tokenizer.json"}
        options |= {"manifest": "manifest.json", "split": split, "index": "0", "output": output, "threads": "1"}
        return [sys.executable, str(ROOT / "src/scripts/tokenize_file.py")] + [
            part for key, value in options.items() for part in (f"--{key}", value)
        ]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src")}


@pytest.fixture
def place(tmp_path) -> Place:
    numbered = [[f"document {part} {number}" for number in range(200)] for part in range(2)]
    return Place(tmp_path, numbered, [*STRANGE, "", "last"])


def test_training_documents_are_shuffled_within_their_file(place):
    first, second = place.texts(place.make()), place.texts(place.make(index=1))
    assert sorted(first) == sorted(f"document 0 {number}" for number in range(200))
    assert first != [f"document 0 {number}" for number in range(200)]
    assert [text[11:] for text in first] != [text[11:] for text in second]


def test_the_seed_alone_decides_the_order(place, tmp_path):
    again = Place(tmp_path / "again", [[f"document 0 {number}" for number in range(200)]], ["v"])
    again.tokenizer, again.tokenizer_manifest = place.tokenizer, place.tokenizer_manifest
    assert again.make()["sha256"] == place.make()["sha256"]
    assert place.make(seed=43)["sha256"] != place.make()["sha256"]
    assert sorted(place.texts(place.make(seed=-1))) == sorted(place.texts(place.make()))


def test_validation_keeps_its_order_and_every_character(place):
    row = place.make("validation")
    assert place.texts(row) == [*STRANGE, "last"]
    assert row["documents"] == len(STRANGE) + 1
    assert row["empty_documents"] == 1
    assert place.make("validation", seed=7)["identity"] == row["identity"]


def test_chunks_do_not_show(place, monkeypatch):
    whole = place.make()["sha256"]
    place.store.replace("shards", place.make()["identity"])
    monkeypatch.setattr(shards, "CHUNK_CHARACTERS", 100)
    assert place.make()["sha256"] == whole


def test_made_once(place, monkeypatch):
    row = place.make()
    monkeypatch.setattr(shards, "_write", None)
    assert place.make() == row


def test_cache_over_both_splits(place):
    rows = [place.make("train", 0), place.make("train", 1), place.make("validation")]
    manifest = gather(rows, place.tokenizer_manifest)
    cache = TokenCache(manifest, place.store)
    assert len(cache.train) == rows[0]["tokens"] + rows[1]["tokens"]
    assert manifest["train"]["documents"] == 400
    assert cache.verify() == 3
    assert str(place.folder) not in json.dumps(manifest)


def test_a_file_without_text_is_named(tmp_path):
    place = Place(tmp_path, [["", ""]], ["v"])
    with pytest.raises(UserError, match=r"c4-train.*holds no text at all"):
        place.make()


def test_a_file_that_changed_since_it_was_listed_is_refused(place):
    # The store keeps a shard under the checksum that the list gives; other tokens under it would never be found out.
    path = place.folder / "en" / "c4-train.00000-of-00002.json.gz"
    with gzip.open(path, "wt") as stream:
        stream.write(json.dumps({"text": "another text"}) + "\n")
    for step in (place.make, lambda: sources.verify(place.manifest, place.store)):
        with pytest.raises(UserError, match=r"c4-train\.00000.*does not hold what was fetched.*-R fetch_data"):
            step()
    assert not _left(place.store)
    path.unlink()
    with pytest.raises(UserError, match=r"c4-train\.00000.*no such file; copy it again"):
        place.make()


def test_bad_line_leaves_nothing(tmp_path):
    place = Place(tmp_path, [["one"]], ["v"])
    path = sources.locate(place.manifest["files"][0], place.manifest, place.store)
    with gzip.open(path, "ab") as stream:
        stream.write(b"{broken\n")
    place.manifest = sources.find(place.data, None, place.store)
    with pytest.raises(UserError, match="line 2 is no JSON object"):
        place.make()
    assert _left(place.store) == []


def _left(store: Store) -> list[str]:
    """Whatever lies in the store besides lock files."""
    return [p.name for p in (store.root / "shards").glob("*/*") if not p.name.endswith(".lock")]


def test_full_disk_leaves_nothing_and_a_rerun_works(place):
    """The file system gives out at byte 500, here by a limit on the size of a file."""
    code = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
sys.argv = {place.command("out.json")[1:]!r}
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place.folder, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "File too large" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert _left(place.store) == []
    assert not (place.folder / "out.json").exists()
    assert len(place.texts(place.make())) == 200


def test_killed_in_the_middle_then_run_again(tmp_path, monkeypatch):
    place = Place(tmp_path, [["some words of text " * 20] * 150_000], ["v"])
    running = subprocess.Popen(
        place.command("out.json"), cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not any(p.stat().st_size for p in (tmp_path / "store/shards").glob("*/.*.partial/unordered.bin")):
        assert running.poll() is None, "finished before it could be killed"
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "out.json").exists()
    assert len(_left(place.store)) == 1  # an unfinished folder that no identity leads to
    path = sources.locate(place.manifest["files"][0], place.manifest, place.store)
    with gzip.open(path, "wt") as stream:  # what matters is clearing up: go on with a shorter file
        stream.write('{"text": "one"}\n')
    monkeypatch.setattr(sources, "checked", sources.locate)  # which would find out
    row = place.make()
    assert row["documents"] == 1
    assert _left(place.store) == [place.store.path("shards", row["identity"]).name]


def test_two_processes_at_once_make_one_shard(place):
    both = [
        subprocess.Popen(place.command(f"out{k}.json"), cwd=place.folder, env=ENVIRONMENT, stderr=subprocess.PIPE)
        for k in range(2)
    ]
    for process in both:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    assert files.read_json(place.folder / "out0.json") == files.read_json(place.folder / "out1.json")
    assert len(_left(place.store)) == 1


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Nine million characters more must not cost what keeping their encodings would, about 300 MB."""
    generator = random.Random(3)
    words = ["".join(generator.choices("abcdefgh", k=4)) for _ in range(50)]
    lines = [" ".join(generator.choices(words, k=800)) for _ in range(150)]
    code = """
import json, resource, sys
from pathlib import Path
from speedproof.data import shards
shards.CHUNK_CHARACTERS = 100_000
folder = Path(sys.argv[1])
manifest = json.loads((folder / "manifest.json").read_text())
shards._write(next(folder.glob("en/c4-train*")), folder / "tokenizer.json", manifest, [1, 0], folder)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peaks = []
    for repeats in (5, 20):
        place = Place(tmp_path / str(repeats), [lines * repeats], ["v"])
        command = [sys.executable, "-c", code, str(place.folder)]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] - peaks[0] < 120, peaks
