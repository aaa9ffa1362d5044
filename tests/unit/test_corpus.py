"""C4 files: reading documents, naming the line where something is wrong, the embedded corpus, files on disk."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.store import Store
from speedproof.data import embedded, sources
from speedproof.data.corpus import documents
from speedproof.settings.experiment import Data

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / ".." / "shared" / "data" / "c4-sample"

STRANGE = [
    "plain",
    "NUL \0 inside",
    "emoji 🙂 and 👩‍👩‍👧",
    "שלום עולם, مرحبا بالعالم",
    "line\nbreaks\r\nof\u2028every\x85kind\x0b\x0c",
    "2019-04-25",  # a reader that guesses types would make a date of it
    "5",
    "true",
    "x" * 2_000_000,
    '"quoted" \\ and {"text": 1}',
    "\ufeffmark",
]


def settings(**changes) -> Data:
    return Data.parse(files.read_yaml(ROOT / "config" / "default.yaml")["data"] | changes, "data")


def c4_file(path: Path, lines: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb") as stream:
        for line in lines:
            if not isinstance(line, bytes):
                line = json.dumps({"text": line, "timestamp": "2019-04-25T12:57:54Z", "url": "http://a"}).encode()
            stream.write(line + b"\n")
    return path


def test_strange_texts_come_back_as_they_are(tmp_path):
    path = c4_file(tmp_path / "a.json.gz", [*STRANGE, ""])
    assert list(documents(path)) == [*STRANGE, ""]


def test_texts_of_one_kind_only_are_no_dates_or_numbers(tmp_path):
    for texts in (["2019-04-25", "2020-01-01"], ["5", "6"], ["null"]):
        assert list(documents(c4_file(tmp_path / "a.json.gz", texts))) == texts


def test_unescaped_utf8_and_a_missing_last_newline(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress('{"text": "größer 🙂"}\n{"text": "last"}'.encode()))
    assert list(documents(path)) == ["größer 🙂", "last"]


@pytest.mark.parametrize("folder", [".hidden", "with [brackets] and *", "__cache__", "spaces and ü"])
def test_any_folder_name(tmp_path, folder):
    assert list(documents(c4_file(tmp_path / folder / "a.json.gz", ["one"]))) == ["one"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"text": "unfinished', "line 3 is no JSON object"),
        (b"", "line 3 is no JSON object"),
        (b'["text"]', "line 3 holds list and not a JSON object"),
        (b'{"txt": "a", "url": "b"}', "line 3 has no field 'text' .*'txt', 'url'"),
        (b'{"text": 5}', "line 3 has 5 as its text and not a string"),
        (b'{"text": null}', "line 3 has null as its text"),
        (b'{"text": "\xff"}', "line 3 is not UTF-8"),
        (b'{"text": "ok", "n": ' + b"9" * 5000 + b"}", "line 3 cannot be read .*digits"),
        (b'{"text": "\\ud800"}', "line 3 holds half a surrogate pair"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, found):
    path = c4_file(tmp_path / "a.json.gz", ["one", "two", line, "four"])
    with pytest.raises(UserError, match=found) as error:
        list(documents(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_truncated_gzip_is_named(tmp_path):
    path = c4_file(tmp_path / "a.json.gz", [os.urandom(50).hex() for _ in range(2000)])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"is cut short after line \d+"):
        list(documents(path))


def test_a_flipped_byte_in_gzip_is_found(tmp_path):
    path = c4_file(tmp_path / "a.json.gz", [os.urandom(50).hex() for _ in range(2000)])
    content = bytearray(path.read_bytes())
    content[-6] ^= 1  # of the checksum
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged gzip"):
        list(documents(path))


def test_plain_text_is_no_gzip(tmp_path):
    path = tmp_path / "en" / "a.json.gz"
    path.parent.mkdir()
    path.write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match="Not a gzipped file"):
        list(documents(path))


def test_reading_needs_neither_network_nor_a_writable_home(tmp_path):
    path = c4_file(tmp_path / "a.json.gz", ["one", "two"])
    code = f"from speedproof.data.corpus import documents; print(list(documents({str(path)!r})))"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "HOME": "/nonexistent/home"}
    environment |= {"HF_ENDPOINT": "http://192.0.2.1:9", "HTTPS_PROXY": "http://192.0.2.1:9"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['one', 'two']", done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[dict, Store]:
    store = Store(tmp_path_factory.mktemp("embedded") / "store")
    return sources.find(settings(), None, store), store


def test_embedded_is_c4_shaped_and_large_enough(made):
    manifest, store = made
    assert [row["name"] for row in manifest["files"]] == [
        "en/c4-train.00000-of-00002.json.gz",
        "en/c4-train.00001-of-00002.json.gz",
        "en/c4-validation.00000-of-00001.json.gz",
    ]
    texts = [list(documents(sources.locate(row, manifest, store))) for row in manifest["files"]]
    together = [text for part in texts for text in part]
    assert len(set(together)) == len(together)
    assert 1_300_000 < sum(map(len, together)) < 4_000_000
    assert 0.05 < len(texts[2]) / len(together) < 0.15
    assert min(map(len, together)) >= embedded.SHORTEST
    with gzip.open(sources.locate(manifest["files"][0], manifest, store)) as stream:
        assert set(json.loads(stream.readline())) == {"text", "timestamp", "url"}
    assert sources.verify(manifest, store) == 3


def test_embedded_is_deterministic_and_held_by_the_store(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    (library / "pkg").mkdir(parents=True)
    for number in range(40):
        text = f"Say what function number {number} does in more words than anyone needs to read. " * 3
        (library / "pkg" / f"m{number}.py").write_text(f'"""{text}"""\nraise SystemExit("imported")\n')
    (library / "broken.py").write_text("def (:\n")
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda name: str(library))
    found = [sources.find(settings(), None, Store(tmp_path / name)) for name in ("one", "two")]
    assert found[0] == found[1]
    (library / "pkg" / "m0.py").unlink()
    assert sources.find(settings(), None, Store(tmp_path / "one")) == found[0]


def test_embedded_without_sources_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"data\.source: .* holds no Python sources"):
        list(embedded.prose(tmp_path))


def test_files_on_disk_are_listed_in_order_and_checked(tmp_path):
    for index in (2, 0, 1):
        c4_file(tmp_path / "c4" / "en" / f"c4-train.{index:05d}-of-01024.json.gz", [f"text {index}"])
    c4_file(tmp_path / "c4" / "en" / "c4-validation.00000-of-00008.json.gz", ["v"])
    store = Store(tmp_path / "store")
    manifest = sources.find(settings(source="files", directory=str(tmp_path / "c4")), None, store)
    assert [row["name"] for row in manifest["files"]] == [
        "en/c4-train.00000-of-01024.json.gz",
        "en/c4-train.00001-of-01024.json.gz",
        "en/c4-validation.00000-of-00008.json.gz",
    ]
    second = sources.locate(sources.row_of(manifest, "train", 1), manifest, store)
    assert list(documents(second)) == ["text 1"]
    assert sources.verify(manifest, store) == 3
    second.write_bytes(second.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match="does not hold what was fetched") as error:
        sources.verify(manifest, store)
    assert str(second) in str(error.value)
    second.unlink()
    with pytest.raises(UserError, match="no such file"):
        sources.verify(manifest, store)


def test_too_few_files_name_the_key_and_what_was_found(tmp_path):
    c4_file(tmp_path / "en" / "c4-train.00000-of-01024.json.gz", ["a"])
    with pytest.raises(UserError, match=r"data\.train_files: 2 asked for, but .* holds 1 files"):
        sources.find(settings(source="files", directory=str(tmp_path)), None, Store(tmp_path / "store"))
    wanted = settings(source="files", directory=str(tmp_path), train_files=1)
    with pytest.raises(UserError, match=r"data\.validation_files: 1 asked for, but .* holds 0 files"):
        sources.find(wanted, None, Store(tmp_path / "store"))


@pytest.mark.parametrize(("directory", "found"), [(None, "found null"), ("/nonexistent", "is no folder")])
def test_directory_is_named(tmp_path, directory, found):
    with pytest.raises(UserError, match=rf"data\.directory: .*{found}"):
        sources.find(settings(source="files", directory=directory), None, Store(tmp_path))


def test_the_real_sample_is_read(tmp_path):
    if not SAMPLE.is_dir():
        pytest.skip("the sample of real C4 documents does not lie beside this checkout")
    wanted = settings(source="files", directory=str(SAMPLE), train_files=1)
    manifest = sources.find(wanted, None, Store(tmp_path))
    texts = [list(documents(sources.locate(row, manifest, Store(tmp_path)))) for row in manifest["files"]]
    assert [len(part) for part in texts] == [29, 6]
    assert [sum(map(len, part)) for part in texts] == [37_721, 4_698]
