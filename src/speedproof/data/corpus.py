"""C4 as it is: how its files are called, and the documents inside one."""

import glob
import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from speedproof.core.errors import UserError

HUB_FILES = {"train": 1024, "validation": 8}
"""Files of each split of C4's config `en`."""

READ_ROWS = 256
"""Lines handed over at a time."""


def name_of(split: str, index: int, count: int) -> str:
    """Name of file `index` of `count` of a split, below the corpus's folder."""
    return f"en/c4-{split}.{index:05d}-of-{count:05d}.json.gz"


def documents(path: Path) -> Iterator[str]:
    """Text of each document of a C4 file (gzip, a JSON object a line), in order; an empty text is given as "".

    Lines are read with `datasets` and parsed here: its own JSON reader guesses types, and would turn the text "5" or
    a date into something else. Where reading fails, a plain second pass finds the line.

    Raises: UserError naming file and line of a truncated or malformed file.
    """
    number = 0
    try:
        for line in _lines(path):
            number += 1
            yield text_of(line, path, number)
    except (EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
        _find_fault(path)
        raise UserError(f"{path}: cannot be read after line {number} ({error}); check the file system") from error


def _lines(path: Path) -> Iterator[str]:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="speedproof-datasets-") as cache:
        stream = datasets.load_dataset(
            "text",
            data_files=glob.escape(str(Path(path).absolute())),
            split="train",
            streaming=True,
            cache_dir=cache,
        )
        for batch in stream.with_format("arrow").iter(READ_ROWS):
            yield from batch.column("text").to_pylist()


def text_of(line: str, path: Path, number: int) -> str:
    """The text of one line of a C4 file. Raises UserError naming file and line."""
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise _line_error(path, number, f"is no JSON object ({error.msg} at character {error.pos})") from None
    except ValueError as error:  # a number of thousands of digits
        raise _line_error(path, number, f"cannot be read ({str(error).partition(';')[0]})") from None
    except RecursionError:
        raise _line_error(path, number, "is nested too deeply to be read") from None
    if not isinstance(document, dict):
        raise _line_error(path, number, f"holds {type(document).__name__} and not a JSON object")
    if "text" not in document:
        raise _line_error(path, number, f"has no field 'text' (found {', '.join(map(repr, document)) or 'none'})")
    text = document["text"]
    if not isinstance(text, str):
        raise _line_error(path, number, f"has {json.dumps(text)[:40]} as its text and not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _line_error(path, number, f"holds half a surrogate pair at character {error.start} of its text") from None
    return text


def _find_fault(path: Path) -> None:
    """Read a file plainly, line by line, and raise UserError where it goes wrong; return when it does not."""
    number = 0
    try:
        with gzip.open(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                text_of(line.decode(), path, number)
    except UnicodeDecodeError as error:
        raise _line_error(path, number, f"is not UTF-8 (byte {error.start} of the line)") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = "is cut short" if isinstance(error, EOFError) else f"is damaged gzip ({error})"
        raise UserError(f"{path}: {reason} after line {number}; fetch or copy the file again") from None


def _line_error(path: Path, number: int, found: str) -> UserError:
    return UserError(f"{path}: line {number} {found}; mend the line or fetch the file again")
