"""The C4 files of an experiment: where each lies, and its checksum.

All three sources end in one manifest (`sources.json`), which later steps read without knowing where it came from:
{"source", "revision", "python", "directory", "tokenizer",
 "files": [{"split", "index", "name", "sha256", "bytes", "store": {"kind", "identity"} or null}]}.
A file without "store" lies below "directory", which is `data.directory` as the config gives it; "tokenizer" is the
row of a tokenizer.json that was fetched from the hub.
"""

import platform
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.identity import source_digest
from speedproof.core.progress import Progress
from speedproof.core.store import Store
from speedproof.data import embedded, hub
from speedproof.data.corpus import HUB_FILES, name_of
from speedproof.settings.experiment import Data, Tokenizer


def find(data: Data, tokenizer: Tokenizer | None, store: Store) -> dict[str, Any]:
    """Make or fetch whatever is missing and return the manifest; only source `hub` uses the network.

    Raises: UserError naming data.<key> or the file that is wrong.
    """
    counts = {"train": data.train_files, "validation": data.validation_files}
    manifest = {"source": data.source, "revision": None, "python": None, "directory": None, "tokenizer": None}
    if data.source == "embedded":
        manifest["python"] = platform.python_version()
        manifest["files"] = _embedded(counts, store)
    elif data.source == "files":
        manifest["directory"] = data.directory
        manifest["files"] = _listed(data.directory, counts)
    else:
        manifest["revision"] = data.revision
        manifest["files"] = _fetched(data, counts, store)
    if tokenizer is not None and tokenizer.source == "hub":
        manifest["tokenizer"] = hub.fetch(hub.tokenizer_request(tokenizer), store)
    return manifest


def _embedded(counts: dict[str, int], store: Store) -> list[dict[str, Any]]:
    identity = {"python": platform.python_version(), "files": counts, "code": source_digest("embedded")}
    entry = store.find("corpus", identity)
    if entry is None:
        with store.lock("corpus", identity):
            if store.find("corpus", identity) is None:
                with store.publish("corpus", identity) as folder:
                    files.write_json(folder / "files.json", embedded.write(folder, counts))
        entry = store.path("corpus", identity)
    place = {"kind": "corpus", "identity": identity}
    return [_described(row, entry / row["name"]) | {"store": place} for row in files.read_json(entry / "files.json")]


def _listed(directory: str | None, counts: dict[str, int]) -> list[dict[str, Any]]:
    if directory is None:
        raise UserError(
            "data.directory: found null; give the folder that holds en/c4-train.*-of-*.json.gz, or change data.source"
        )
    if not Path(directory).is_dir():
        raise UserError(f"data.directory: {directory} is no folder; give the one that holds en/c4-train.*-of-*.json.gz")
    chosen = []
    for split, count in counts.items():
        found = sorted(Path(directory, "en").glob(f"c4-{split}.*-of-*.json.gz"))
        if len(found) < count:
            raise UserError(
                f"data.{split}_files: {count} asked for, but {directory} holds {len(found)} files "
                f"en/c4-{split}.*-of-*.json.gz; lower it to that, or add files"
            )
        chosen += [
            ({"split": split, "index": index, "name": f"en/{path.name}", "store": None}, path)
            for index, path in enumerate(found[:count])
        ]
    rows = []
    with Progress("check files", sum(path.stat().st_size for _, path in chosen), "bytes") as progress:
        for row, path in chosen:
            rows.append(_described(row, path))
            progress.update(progress.done + rows[-1]["bytes"])
    return rows


def _fetched(data: Data, counts: dict[str, int], store: Store) -> list[dict[str, Any]]:
    for split, count in counts.items():
        if count > HUB_FILES[split]:
            raise UserError(
                f"data.{split}_files: {count} asked for, but C4 has {HUB_FILES[split]} {split} files; use at most that"
            )
    rows = []
    for split, count in counts.items():
        for index in range(count):
            request = hub.Request("dataset", data.repository, data.revision, name_of(split, index, HUB_FILES[split]))
            rows.append({"split": split, "index": index} | hub.fetch(request, store))
    return rows


def _described(row: dict[str, Any], path: Path) -> dict[str, Any]:
    return row | {"sha256": files.sha256(path), "bytes": path.stat().st_size}


def row_of(manifest: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """The row of one file. Raises UserError when the manifest has none."""
    for row in manifest["files"]:
        if (row["split"], row["index"]) == (split, index):
            return row
    raise UserError(f"--index: the manifest has no {split} file {index}; raise data.{split}_files and fetch again")


def locate(row: dict[str, Any], manifest: dict[str, Any], store: Store) -> Path:
    """Where the file of a manifest's row lies. Raises UserError naming it when it is missing."""
    path = _folder(row, manifest, store) / row["name"]
    if not path.is_file():
        raise UserError(f"{path}: no such file; {_mending(row, manifest, store)}")
    return path


def _folder(row: dict[str, Any], manifest: dict[str, Any], store: Store) -> Path:
    place = row["store"]
    return Path(manifest["directory"]) if place is None else store.path(place["kind"], place["identity"])


def _mending(row: dict[str, Any], manifest: dict[str, Any], store: Store) -> str:
    again = "run `snakemake fetch_data -R fetch_data`"
    if row["store"] is None:
        return f"copy it again, or {again} to take the folder as it is now"
    return f"delete {_folder(row, manifest, store)} and {again}"


def checked(row: dict[str, Any], manifest: dict[str, Any], store: Store) -> Path:
    """Where the file of a manifest's row lies, once its size and SHA-256 are those of the row.

    Raises: UserError naming it when it is missing or holds something else: what is made of it is kept under the row's
    checksum, and would pass for what it is not.
    """
    path = locate(row, manifest, store)
    if path.stat().st_size != row["bytes"] or files.sha256(path) != row["sha256"]:
        found = f"does not hold what was fetched (SHA-256 {row['sha256'][:12]}…)"
        raise UserError(f"{path}: {found}; {_mending(row, manifest, store)}")
    return path


def verify(manifest: dict[str, Any], store: Store) -> int:
    """Check size and SHA-256 of every file; returns their number. Raises UserError naming a wrong one."""
    rows = manifest["files"] + ([manifest["tokenizer"]] if manifest["tokenizer"] else [])
    with Progress("verify corpus", sum(row["bytes"] for row in rows), "bytes") as progress:
        for row in rows:
            checked(row, manifest, store)
            progress.update(progress.done + row["bytes"])
    return len(rows)
