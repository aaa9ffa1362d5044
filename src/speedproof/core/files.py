"""Files that are either whole or absent, and locks between processes."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from speedproof.core.errors import UserError


@contextlib.contextmanager
def atomic(path: Path, mode: str = "wb") -> Iterator[Any]:
    """Open a temporary file beside `path` that becomes `path` only when the block ends without an error.

    Raises: OSError as the file system gives it (a full disk, say); the old file is then intact.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes it private; results are meant to be shared
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with atomic(path, "w") as stream:
        stream.write(text)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON with sorted keys; the same value always gives the same bytes.

    Raises: ValueError for NaN or infinity, which JSON cannot hold (use None and say why).
    """
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path, *keys: str) -> Any:
    """Read a JSON file. Raises UserError naming the file when it is missing or malformed, or lacks one of `keys`."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the rule that makes it first") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: is not valid JSON ({error}); delete it and run its rule again") from None
    if missing := [key for key in keys if not isinstance(value, dict) or key not in value]:
        raise UserError(f"{path}: holds no {missing[0]!r}; give the file that is meant, or run its rule again")
    return value


def write_yaml(path: Path, value: Any) -> None:
    """Write `value` as YAML in the order of its keys."""
    write_text(path, yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def read_yaml(path: Path) -> Any:
    """Read a YAML (or JSON) file. Raises UserError naming the file when it is missing or malformed."""
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not valid YAML ({error})") from None


def parse_yaml(text: str, where: str) -> Any:
    """The value of YAML (or JSON) text. Raises UserError naming `where` it came from when it is malformed."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{where}: is not valid YAML ({' '.join(str(error).split())})") from None


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hex; read in pieces, so the size does not matter."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def place(source: Path, target: Path) -> None:
    """Make `target` hold what `source` holds: by hard link where the file system allows, else by a whole copy."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


@contextlib.contextmanager
def lock(path: Path, timeout_s: float = -1) -> Iterator[float]:
    """Hold the lock file `path`; yields the seconds waited for it. It is freed when the process dies.

    Raises: UserError when `timeout_s` (negative: wait for ever) runs out.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    held = FileLock(path, mode=0o666)
    try:
        held.acquire(timeout=timeout_s)
    except Timeout:
        raise UserError(
            f"{path}: another process has held this lock for {timeout_s:.0f} s; wait for it or stop it"
        ) from None
    try:
        yield time.monotonic() - start
    finally:
        held.release()
