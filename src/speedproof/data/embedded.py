"""A corpus that every Python brings along: the English prose of its standard library, shaped like C4.

Docstrings are taken from the sources by their syntax trees, so nothing is imported and no module's side effect runs;
pydoc's topics (the language reference) come with them. About 2 MB; the same for one Python version.
"""

import ast
import gzip
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speedproof.core.errors import UserError
from speedproof.data.corpus import name_of

SHORTEST = 100
"""Characters below which a docstring says too little to be a document."""

PROSE = 0.75
"""Smallest share of letters and spaces in a document: what has less is a table or a listing."""

VALIDATION_SHARE = 10
"""One document in this many goes to validation."""

TIMESTAMP = "2000-01-01T00:00:00Z"
"""C4's field, the same everywhere: these documents were never crawled."""

OUTSIDE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders of the standard library's tree that are not the library's prose."""


def prose(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """URL and text of every document below `root` (default: this Python's standard library), no text twice.

    Raises: UserError where the library comes without sources.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    seen = set()
    for url, text in _texts(root):
        letters = sum(character.isalpha() or character.isspace() for character in text)
        if len(text) >= SHORTEST and letters >= PROSE * len(text) and text not in seen:
            seen.add(text)
            yield url, text
    if not seen:
        raise UserError(f"data.source: {root} holds no Python sources to take prose from; use `files` or `hub` instead")


def _texts(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root)
        if OUTSIDE & set(module.parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # templates and deliberately broken sources; they hold no docstrings
        name = ".".join(module.with_suffix("").parts)
        if name == "pydoc_data.topics":
            yield from _topics(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"python://{name}#{getattr(node, 'name', '')}", text


def _topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for name, text in sorted(ast.literal_eval(node).items()):
                yield f"python://pydoc_data.topics#{name}", text.strip()


def write(folder: Path, counts: dict[str, int]) -> list[dict[str, Any]]:
    """Write the corpus below `folder` in C4's layout, `counts` files of each split; split, index and name of each.

    A hash of its text puts a document into a split and a file, so one that is added moves no other.
    """
    lines: dict[tuple[str, int], list[bytes]] = {(s, i): [] for s, count in counts.items() for i in range(count)}
    for url, text in prose():
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        split = "validation" if number % VALIDATION_SHARE == 0 else "train"
        line = json.dumps({"text": text, "timestamp": TIMESTAMP, "url": url}, ensure_ascii=False)
        lines[split, number // VALIDATION_SHARE % counts[split]].append(line.encode() + b"\n")
    rows = []
    for (split, index), content in lines.items():
        name = name_of(split, index, counts[split])
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # No file name and no time inside, or the same text would not give the same bytes.
        with open(path, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as stream:
            stream.writelines(content)
        rows.append({"split": split, "index": index, "name": name})
    return rows
