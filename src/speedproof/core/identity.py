"""Identities from content: what must agree for a result to be used again. Standard library only."""

import ast
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent

READING = ("data/loader.py", "data/resident.py", "data/token_cache.py")
"""From the store's shards to batches: part of whatever is trained or measured."""

SOURCES: dict[str, tuple[str, ...]] = {
    "embedded": ("data/embedded.py",),
    "tokenizer": ("data/corpus.py", "data/tokenizer.py"),
    "shards": ("data/corpus.py", "data/tokenizer.py", "data/shards.py"),
    "data": (
        "data/corpus.py",
        "data/embedded.py",
        "data/hub.py",
        "data/shards.py",
        "data/sources.py",
        "data/token_cache.py",
        "data/tokenizer.py",
    ),
    "training": ("model", *READING, "training"),
    "measure": ("model", *READING, "training", "measure/worker.py"),
    "parity": ("model", *READING, "training", "evidence/parity.py", "evidence/derivatives.py"),
    "stages": ("evidence/stages.py", "evidence/tuner.py", "evidence/recommend.py", "evidence/statistics.py"),
    "matched": ("evidence/arms.py", "evidence/matched.py", "evidence/statistics.py"),
    "programme": ("evidence/programme.py", "evidence/statistics.py", "settings/programme.py"),
    "peers": (
        "model",
        *READING,
        "training",
        "measure/worker.py",
        "evidence/parity.py",
        "evidence/peers.py",
        "evidence/statistics.py",
    ),
    "export": ("evidence/export.py", "model/names.py"),
    "summary": (
        "evidence/allocation.py",
        "evidence/grid.py",
        "evidence/programme_tables.py",
        "evidence/summary.py",
        "evidence/tables.py",
        "evidence/published.py",
        "evidence/plots.py",
        "evidence/statistics.py",
    ),
}
"""The parts of the package that can change each kind of costly result."""


def canonical(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, 64 hex digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # A bare string is a docstring or a note on the line above it; neither can change what is computed.
            node.body = [
                entry
                for entry in body
                if not (
                    isinstance(entry, ast.Expr)
                    and isinstance(entry.value, ast.Constant)
                    and isinstance(entry.value.value, str)
                )
            ]
    return tree


@functools.lru_cache(maxsize=256)  # most files stand behind several kinds, and the Snakefile asks for all of them
def parsed(source: str) -> str:
    """The code of a Python source as its syntax tree: comments, docstrings and layout left out."""
    return ast.dump(_without_docstrings(ast.parse(source)), annotate_fields=False, include_attributes=False)


def source_files(kind: str) -> list[Path]:
    """The files behind `kind` of result, sorted; see `SOURCES`."""
    files: list[Path] = []
    for part in SOURCES[kind]:
        path = PACKAGE / part
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return files


@functools.cache
def source_digest(kind: str) -> str:
    """Digest of the parsed code that can change a `kind` of result (a key of `SOURCES`).

    A changed comment, docstring or layout leaves it as it was; a changed operator does not.
    """
    return digest({str(p.relative_to(PACKAGE)): parsed(p.read_text(encoding="utf-8")) for p in source_files(kind)})


def differences(a: Any, b: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two nested dictionaries, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted(set(a) | set(b)):
            found |= differences(a.get(key), b.get(key), f"{prefix}.{key}" if prefix else str(key))
        return found
    return {} if a == b else {prefix: (a, b)}
