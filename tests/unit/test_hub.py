"""Fetching from a hub of the tests' own, reached through HF_ENDPOINT in a subprocess.

The repository's name says what the hub does wrong; every other part is as the real one answers: redirects, ETag,
X-Linked-Etag and X-Linked-Size of large files, ranges.
"""

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
REVISION = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"
NAME = "en/c4-train.00000-of-01024.json.gz"
CONTENT = gzip.compress(b"".join(json.dumps({"text": os.urandom(40).hex()}).encode() + b"\n" for _ in range(4000)))
SHA256 = hashlib.sha256(CONTENT).hexdigest()

REPOSITORIES = ["fine", "drops", "flips-once", "flips", "flips-small", "short", "busy-once", "busy"]
REPOSITORIES += ["no-file", "no-revision", "no-repository", "private", "forbidden", "silent", "no-hub"]


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def _send(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        found = re.search(r"/tests/([a-z-]+)/", self.path)
        fault = found.group(1) if found else ""
        seen, lock = self.server.seen, self.server.lock
        with lock:
            seen[fault, self.command] += 1
            count = seen[fault, self.command]
            self.server.ranges.setdefault(fault, []).append(self.headers.get("Range"))
            place = "storage" if self.path.startswith("/cdn/") else fault
            self.server.tokens.setdefault(place, set()).add(self.headers.get("Authorization"))
        if fault == "silent":
            self.server.stopped.wait(60)
            self.close_connection = True
        elif fault == "busy" or (fault == "busy-once" and count == 1):
            self._send(500, b"busy")
        elif fault == "no-hub":
            self._send(200, b"hello")
        elif fault in ("no-file", "no-revision", "no-repository"):
            kind = {"no-file": "Entry", "no-revision": "Revision", "no-repository": "Repo"}[fault]
            self._send(404, b"", X_Error_Code=f"{kind}NotFound", X_Error_Message="not found")
        elif (
            fault == "private"
            and not self.path.startswith("/cdn/")
            and self.headers.get("Authorization") != "Bearer hf_right"
        ):
            self._send(401, b"", X_Error_Code="RepoNotFound")
        elif fault == "forbidden":
            self._send(403, b"no")
        elif self.path.startswith("/cdn/") or fault == "flips-small":
            self._body(fault, count)
        else:
            # To another host, as the real hub does: its client follows a redirect within the host even for metadata.
            location = f"http://localhost:{self.server.server_port}/cdn{self.path}"
            facts = {"X_Repo_Commit": REVISION, "X_Linked_Etag": f'"{SHA256}"', "X_Linked_Size": str(len(CONTENT))}
            self._send(302, b"", Location=location, ETag='"pointer"', **facts)

    def _body(self, fault, count):
        content = bytearray(CONTENT)
        if fault in ("flips", "flips-small") or (fault == "flips-once" and count <= 2):
            content[len(content) // 2] ^= 1
        if fault == "short":
            content = content[:-100]
        start = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-")).group(1))
        status, extra = (
            (206, {"Content_Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}) if start else (200, {})
        )
        body, length = bytes(content[start:]), len(content) - start
        if fault == "drops" and count <= 2:
            body = body[: length // 2]
            self.close_connection = True
        # Small files carry the Git hash of their content as ETag, which is no checksum that could be compared.
        if fault == "stops" and not start:
            self._send(status, body[: length // 2], Content_Length=str(length))
            self.server.stopped.wait(60)
            return
        self._send(status, body, Content_Length=str(length), ETag='"a1b2c3"', X_Repo_Commit=REVISION, **extra)


@pytest.fixture(scope="module")
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.seen, server.ranges, server.tokens = Counter(), {}, {}
    server.lock, server.stopped = threading.Lock(), threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.stopped.set()
    server.shutdown()
    server.server_close()
    thread.join()


def environment(server, home: Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HTTP", "http"))}
    kept |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1,localhost",
    }
    kept |= {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1", "PYTHONPATH": str(ROOT / "src")}
    return kept | more


FETCH_ALL = """
import json, sys
from pathlib import Path
import huggingface_hub.constants
from speedproof.core.errors import UserError
from speedproof.core.store import Store
from speedproof.data import hub
hub.WAITS_S = (0.0, 0.0)
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 4096  # of ten million: resuming starts at the last whole one
outcomes, store = {}, Store(Path(sys.argv[1]))
for name in sys.argv[4:]:
    request = hub.Request("dataset", f"tests/{name}", sys.argv[2], sys.argv[3])
    try:
        outcomes[name] = {"row": hub.fetch(request, store), "path": str(hub.stored(request, store))}
    except UserError as error:
        outcomes[name] = {"error": str(error)}
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(server, tmp_path_factory):
    """What became of each repository, all fetched in one process."""
    folder = tmp_path_factory.mktemp("hub")
    command = [sys.executable, "-c", FETCH_ALL, str(folder / "store"), REVISION, NAME, *REPOSITORIES]
    done = subprocess.run(
        command, env=environment(server, folder / "home"), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"store": folder / "store"}


@pytest.mark.parametrize("name", ["fine", "drops", "flips-once", "busy-once"])
def test_the_right_bytes_arrive(outcomes, name):
    assert "row" in outcomes[name], outcomes[name]
    row = outcomes[name]["row"]
    assert (row["name"], row["sha256"], row["bytes"]) == (NAME, SHA256, len(CONTENT))
    assert Path(outcomes[name]["path"]).read_bytes() == CONTENT


def test_a_dropped_connection_goes_on_where_it_broke(outcomes, server):
    assert "row" in outcomes["drops"]
    starts = [int(r[6:-1]) for r in server.ranges["drops"] if r and r != "bytes=0-"]
    assert starts, "nothing was resumed"
    assert all(start > 0 for start in starts)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("flips", "the hub sent wrong bytes .sha256 [0-9a-f]+, expected [0-9a-f]+., 3 attempts; check the network"),
        ("short", "the hub sent wrong bytes"),
        ("busy", "the hub answered HTTP 500, 3 attempts; check the network"),
        ("silent", "the hub did not answer .*, 3 attempts; check the network"),
        ("no-file", "has no such file at this revision; check"),
        ("no-revision", "has no such revision; check"),
        ("no-repository", "does not know or not show this repository; check the name, and set HF_TOKEN"),
        ("private", "does not know or not show this repository; check the name, and set HF_TOKEN"),
        ("forbidden", "HTTP 403.*HF_TOKEN"),
        ("no-hub", "the server is no hub"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_leaves_nothing(outcomes, name, found):
    error = outcomes[name].get("error", "no error")
    assert re.search(found, error), error
    assert f"data.repository: tests/{name} at {REVISION[:12]}, file {NAME}: " in error
    assert "\n" not in error
    identity = {"kind": "dataset", "repository": f"tests/{name}", "revision": REVISION, "name": NAME}
    from speedproof.core.store import Store

    assert Store(outcomes["store"]).find("downloads", identity) is None


def test_a_small_file_has_no_checksum_to_compare_but_is_hashed(outcomes):
    """Only large files carry a SHA-256; what arrived is recorded, so a later change is found."""
    row = outcomes["flips-small"]["row"]
    assert row["sha256"] == hashlib.sha256(Path(outcomes["flips-small"]["path"]).read_bytes()).hexdigest()


def test_a_fetch_that_was_killed_goes_on_where_it_was(server, tmp_path):
    command = [sys.executable, "-c", FETCH_ALL, str(tmp_path / "store"), REVISION, NAME, "stops"]
    patient = environment(server, tmp_path / "home", HF_HUB_DOWNLOAD_TIMEOUT="60")
    running = subprocess.Popen(command, env=patient, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not any(p.is_file() and p.stat().st_size for p in (tmp_path / "store").rglob("unfinished/*/*/*")):
        assert running.poll() is None
        time.sleep(0.05)
    running.kill()
    running.wait()
    done = subprocess.run(command, env=patient, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)["stops"]
    assert Path(outcome["path"]).read_bytes() == CONTENT
    assert int(server.ranges["stops"][-1][6:-1]) > 0
    assert not list((tmp_path / "store").rglob("unfinished/*/*/*"))


def write_settings(folder: Path, **data) -> list[str]:
    config = yaml.safe_load((ROOT / "config" / "default.yaml").read_text())
    config["data"] |= {"source": "hub", "train_files": 1, "validation_files": 1} | data
    (folder / "data.yaml").write_text(yaml.safe_dump(config["data"]))
    (folder / "tokenizer.yaml").write_text(
        yaml.safe_dump(config["tokenizer"] | {"source": "hub", "repository": "tests/fine"})
    )
    script = str(ROOT / "src/scripts/fetch_data.py")
    return [sys.executable, script, "--data", "data.yaml", "--tokenizer", "tokenizer.yaml", "--output", "sources.json"]


def test_the_script_fetches_once_with_token_and_works_offline_after(server, tmp_path):
    command = write_settings(tmp_path, repository="tests/private")
    online = environment(server, tmp_path / "home", HF_TOKEN="hf_right")
    done = subprocess.run(command, cwd=tmp_path, env=online, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Bearer hf_right" in server.tokens["private"]
    assert server.tokens["storage"] == {None}
    manifest = json.loads((tmp_path / "sources.json").read_text())
    assert [row["name"] for row in manifest["files"]] == [NAME, "en/c4-validation.00000-of-00008.json.gz"]
    assert manifest["tokenizer"]["name"] == "tokenizer.json"
    assert str(tmp_path) not in json.dumps(manifest)

    offline = environment(server, tmp_path / "home", HF_HUB_OFFLINE="1")
    requests = server.seen.total()
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert server.seen.total() == requests
    assert json.loads((tmp_path / "sources.json").read_text()) == manifest


def test_offline_with_a_piece_missing_stops_and_names_it(server, tmp_path):
    command = write_settings(tmp_path, repository="tests/fine")
    offline = environment(server, tmp_path / "home", HF_HUB_OFFLINE="1")
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert re.search(rf"error: data\.repository: tests/fine .*{NAME}: is not in the store", done.stderr)
    assert not (tmp_path / "sources.json").exists()


def test_more_files_than_c4_has(server, tmp_path):
    command = write_settings(tmp_path, validation_files=9)
    online = environment(server, tmp_path / "home")
    done = subprocess.run(command, cwd=tmp_path, env=online, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "data.validation_files: 9 asked for, but C4 has 8 validation files" in done.stderr
