"""Fetching single files from the hub: retried, resumed, and checked by us.

The client compares sizes but no checksums, so a flipped byte would pass; here every file is hashed, and compared with
the hub's own SHA-256 where it publishes one (large files). Proxy, mirror and token follow the client's usual
environment variables (HTTPS_PROXY, HF_ENDPOINT, HF_TOKEN), its waits HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT.
"""

import os
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.progress import Progress
from speedproof.core.store import Store
from speedproof.settings.experiment import Tokenizer

KIND = "downloads"
WAITS_S = (1.0, 4.0, 10.0, 30.0)
"""Waits between attempts at one file; one attempt more than there are waits."""

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Request:
    """One file of one revision of a repository; `kind` is "dataset" or "model"."""

    kind: str
    repository: str
    revision: str
    name: str

    @property
    def key(self) -> str:
        """The config key that names the repository."""
        return {"dataset": "data", "model": "tokenizer"}[self.kind] + ".repository"

    def fault(self, found: str, advice: str) -> UserError:
        return UserError(f"{self.key}: {self.repository} at {self.revision[:12]}, file {self.name}: {found}; {advice}")


class _Transient(Exception):
    """Worth another attempt."""


def tokenizer_request(tokenizer: Tokenizer) -> Request:
    """The tokenizer.json that a config's `tokenizer` with source `hub` names."""
    return Request("model", tokenizer.repository, tokenizer.revision, TOKENIZER_FILE)


def fetch(request: Request, store: Store) -> dict[str, Any]:
    """The file's row of a manifest: name, sha256, bytes, store. Downloads it only when the store lacks it.

    Raises: UserError naming repository and file when the hub lacks it, refuses it, sends wrong bytes or stays silent.
    """
    identity = asdict(request)
    if store.find(KIND, identity) is None:
        with store.lock(KIND, identity):
            if store.find(KIND, identity) is None:
                _download(request, store, identity)
    entry = store.path(KIND, identity)
    return {"name": request.name, "store": {"kind": KIND, "identity": identity}} | files.read_json(entry / "file.json")


def stored(request: Request, store: Store) -> Path:
    """Where the store keeps the file. Raises UserError when it was never fetched; nothing is fetched here."""
    entry = store.find(KIND, asdict(request))
    if entry is None:
        raise request.fault("is not in the store", "run `snakemake fetch_data` with network")
    return entry / request.name


def _download(request: Request, store: Store, identity: dict[str, Any]) -> None:
    scratch = store.scratch(KIND, identity)  # survives a kill, and the next attempt goes on in the middle
    for wait in (*WAITS_S, None):
        try:
            path, expected = _attempt(request, scratch)
            found = {"sha256": files.sha256(path), "bytes": path.stat().st_size}
            wrong = {key: value for key, value in expected.items() if found[key] != value}
            if wrong:
                shutil.rmtree(scratch)
                scratch.mkdir(parents=True)
                key, value = next(iter(wrong.items()))
                raise _Transient(f"the hub sent wrong bytes ({key} {found[key]}, expected {value})")
            break
        except _Transient as error:
            if wait is None:
                advice = "check the network, HF_ENDPOINT and the proxy, then run `snakemake fetch_data` again"
                raise request.fault(f"{error}, {len(WAITS_S) + 1} attempts", advice) from None
            print(f"{request.name}: {error}; trying again in {wait:.0f} s", file=sys.stderr, flush=True)
            time.sleep(wait)
    with store.publish(KIND, identity) as folder:
        (folder / request.name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, folder / request.name)
        files.write_json(folder / "file.json", found)
    shutil.rmtree(scratch, ignore_errors=True)


def _attempt(request: Request, scratch: Path) -> tuple[Path, dict[str, Any]]:
    """Download into `scratch`; the file and what the hub says of it (bytes, and sha256 for large files).

    The client's `http_get` is called and not its `hf_hub_download`, which throws a part away when its process ends.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import httpx2
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    part = None
    try:
        url = hf_hub_url(request.repository, request.name, repo_type=request.kind, revision=request.revision)
        metadata = get_hf_file_metadata(url, timeout=HF_HUB_ETAG_TIMEOUT)
        if metadata.commit_hash is None or metadata.etag is None or metadata.size is None:
            raise request.fault("the server is no hub (its answer names no commit, etag or size)", "check HF_ENDPOINT")
        expected: dict[str, Any] = {"bytes": metadata.size}
        if re.fullmatch(r"[0-9a-f]{64}", metadata.etag):
            expected["sha256"] = metadata.etag
        headers = build_hf_headers()
        if urlsplit(metadata.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # the token is the hub's, and no business of who stores its files
        part = scratch / re.sub(r"\W", "_", metadata.etag)  # parts of two versions never meet
        have = part.stat().st_size if part.exists() else 0
        with Progress(f"fetch {request.name}", metadata.size, "bytes") as progress, open(part, "ab") as stream:
            http_get(
                metadata.location,
                stream,
                resume_size=have,
                headers=headers,
                expected_size=metadata.size,
                tqdm_class=_bar(progress),
            )
        return part, expected
    except errors.OfflineModeIsEnabled:
        raise request.fault(
            "is not in the store, and HF_HUB_OFFLINE forbids fetching it", "run `snakemake fetch_data` with network"
        ) from None
    except (errors.GatedRepoError, errors.RepositoryNotFoundError):
        raise request.fault(
            "the hub does not know or not show this repository", "check the name, and set HF_TOKEN if it needs one"
        ) from None
    except errors.RevisionNotFoundError:
        raise request.fault("the hub has no such revision", "check the revision beside it") from None
    except errors.RemoteEntryNotFoundError:
        raise request.fault("the hub has no such file at this revision", "check the revision beside it") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise request.fault(
                f"the hub refused it (HTTP {status})", "set HF_TOKEN to a token that may read it"
            ) from None
        if status == 416 and part is not None:
            part.unlink()  # longer than what the hub has
        if status is None or status in (408, 416, 429) or status >= 500:
            raise _Transient(f"the hub answered HTTP {status}") from None
        raise request.fault(f"the hub answered HTTP {status}", "check the repository and HF_ENDPOINT") from None
    except (httpx2.HTTPError, ConnectionError, TimeoutError) as error:
        raise _Transient(f"the hub did not answer ({type(error).__name__})") from None
    except OSError as error:
        if error.errno is not None:
            raise  # a full disk, a forbidden folder: not the hub's fault
        if part is not None:
            part.unlink(missing_ok=True)
        raise _Transient(f"the hub sent wrong bytes ({str(error).splitlines()[0]})") from None
    except ValueError as error:
        raise request.fault(str(error).splitlines()[0], "check the repository and HF_ENDPOINT") from None


def _bar(progress: Progress) -> type:
    """The client's progress bar, drawn by ours: one bar on a terminal, a line now and then in a log."""
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any):
            progress.update(options.get("initial") or 0)
            super().__init__(disable=True)

        def update(self, n: float | None = 1) -> None:
            progress.update(progress.done + (n or 0))

    return Bar
