"""Cells and grids of Markdown and CSV tables."""

from collections.abc import Iterable, Sequence
from typing import Any

GIB = 2**30


def number(value: float | None, form: str, unit: str = "") -> str:
    """A figure in the given format, a dash where there is none."""
    return "–" if value is None else f"{value:{form}}{unit}"


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: set[int]) -> str:
    """A Markdown table; a bar inside a cell would end it."""
    ruler = ["--:" if i in numeric else "---" for i in range(len(head))]
    lines = [head, ruler, *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in c) + " |" for c in lines
    )


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted columns; lists as text."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value) if isinstance(value, list) else value
    return found
