import json
import multiprocessing
import os
import subprocess
import sys

import pytest

from speedproof.core import files
from speedproof.core.errors import UserError


class DiskFull:
    """A stream that fails like a full disk once `limit` bytes are written."""

    def __init__(self, stream, limit):
        self.stream, self.limit = stream, limit

    def write(self, data):
        if self.stream.tell() + len(data) > self.limit:
            raise OSError(28, "No space left on device")
        return self.stream.write(data)


@pytest.mark.parametrize("limit", [0, 1, 7])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, limit):
    target = tmp_path / "result.json"
    files.write_json(target, {"old": True})
    with pytest.raises(OSError, match="No space"), files.atomic(target) as stream:
        DiskFull(stream, limit).write(b"new bytes")
    assert files.read_json(target) == {"old": True}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_same_value_same_bytes_and_no_nan(tmp_path):
    files.write_json(tmp_path / "a", {"b": 1, "a": [1.5, "é"]})
    files.write_json(tmp_path / "b", {"a": [1.5, "é"], "b": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "c", {"x": float("nan")})
    assert not (tmp_path / "c").exists()


def test_results_are_readable_by_others(tmp_path):
    old = os.umask(0o022)
    try:
        files.write_text(tmp_path / "a", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
def test_malformed_json_names_the_file(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.json.*delete it"):
        files.read_json(path)


def test_malformed_yaml_and_missing_file_name_the_file(tmp_path):
    (tmp_path / "x.yaml").write_text("a: [1")
    with pytest.raises(UserError, match=r"x\.yaml"):
        files.read_yaml(tmp_path / "x.yaml")
    with pytest.raises(UserError, match=r"none\.json.*no such file"):
        files.read_json(tmp_path / "none.json")


def test_place_replaces_the_target_whole(tmp_path):
    (tmp_path / "source").write_text("new")
    (tmp_path / "target").write_text("old")
    files.place(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]


def _hold(path, held, release):
    with files.lock(path):
        held.set()
        release.wait(30)


def test_lock_is_held_against_others_and_freed_by_death(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "x.lock", held, release))
    process.start()
    assert held.wait(30)
    with pytest.raises(UserError, match=r"x\.lock"), files.lock(tmp_path / "x.lock", timeout_s=0.1):
        pass
    process.kill()
    process.join()
    with files.lock(tmp_path / "x.lock", timeout_s=10) as waited:
        assert waited >= 0


def test_json_is_plain_json(tmp_path):
    files.write_json(tmp_path / "a", {"rate": 1.25})
    assert json.loads((tmp_path / "a").read_text()) == {"rate": 1.25}


@pytest.mark.parametrize("value", [{}, [], "text", None, {"slot": 1}])
def test_json_of_another_kind_names_what_it_lacks(tmp_path, value):
    files.write_json(tmp_path / "a.json", value)
    with pytest.raises(UserError, match=r"a\.json: holds no 'slots'"):
        files.read_json(tmp_path / "a.json", "slots")


def test_a_script_names_the_file_that_could_not_be_written_and_what_to_do():
    code = (
        "import errno\nfrom speedproof.core.errors import run\n"
        "def main():\n    raise OSError(errno.ENOSPC, 'x', '/read', None, '/written')\nrun(main)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "error: /written: No space left on device; make room and run it again\n"
