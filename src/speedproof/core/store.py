"""The content-addressed store: everything that costs hours, kept by the identity of what made it.

An entry is a folder `<root>/<kind>/<first two digits>/<digest>` that appears whole or not at all and is never
changed afterwards. Snakemake deletes a rule's outputs before it runs the rule again; the store is why that costs
seconds and not GPU hours.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.identity import differences, digest

IDENTITY = "identity.json"


class Store:
    """A folder of immutable entries; several experiments and processes may share one."""

    def __init__(self, root: Path):
        self.root = Path(root)

    def path(self, kind: str, identity: dict[str, Any]) -> Path:
        """Where the entry of `kind` with this identity lies, or would lie."""
        name = digest(identity)
        return self.root / kind / name[:2] / name

    def find(self, kind: str, identity: dict[str, Any]) -> Path | None:
        """The folder of the entry with this identity, None when there is none."""
        entry = self.path(kind, identity)
        return entry if (entry / IDENTITY).is_file() else None

    @contextlib.contextmanager
    def lock(self, kind: str, identity: dict[str, Any]) -> Iterator[float]:
        """Hold the right to make this entry; yields the seconds waited. Look again with `find` once it is held."""
        entry = self.path(kind, identity)
        with files.lock(entry.with_name(entry.name + ".lock")) as waited:
            yield waited

    @contextlib.contextmanager
    def publish(self, kind: str, identity: dict[str, Any]) -> Iterator[Path]:
        """Yield an empty folder that becomes the entry when the block ends without an error.

        Should another process have published the same identity meanwhile, its entry stays and this one is dropped.
        """
        entry = self.path(kind, identity)
        entry.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name[:12]}.", suffix=".partial"))
        try:
            umask = os.umask(0)
            os.umask(umask)
            folder.chmod(0o777 & ~umask)
            yield folder
            files.write_json(folder / IDENTITY, identity)
            try:
                os.rename(folder, entry)
            except OSError:
                if not (entry / IDENTITY).is_file():
                    raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def replace(self, kind: str, identity: dict[str, Any]) -> None:
        """Drop an entry whose finding is to be made anew (a timeout, say): at once, so that no part of it stays."""
        entry = self.path(kind, identity)
        if entry.exists():
            folder = tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name[:12]}.", suffix=".partial")
            os.rename(entry, folder)
            shutil.rmtree(folder, ignore_errors=True)

    def scratch(self, kind: str, identity: dict[str, Any]) -> Path:
        """A lasting folder for unfinished work on this entry (resume state), outside any rule's outputs."""
        folder = self.root / "unfinished" / kind / digest(identity)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def nearest(self, kind: str, identity: dict[str, Any]) -> tuple[Path, dict[str, tuple[Any, Any]]] | None:
        """The stored entry of `kind` that differs in the fewest fields, with those fields (theirs, wanted).

        Answers "why was this measured again". None when the store holds no entry of this kind.
        """
        best = None
        for path in sorted((self.root / kind).glob(f"*/*/{IDENTITY}")):
            found = differences(files.read_json(path), identity)
            if best is None or len(found) < len(best[1]):
                best = (path.parent, found)
        return best
