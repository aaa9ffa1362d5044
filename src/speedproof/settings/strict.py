"""Strict settings: every key known, every type exact, every error one sentence that names the key."""

import contextlib
import difflib
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from speedproof.core.errors import UserError


class Strict(BaseModel):
    """A frozen group of settings that refuses unknown keys and silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, value: Any, where: str = "") -> Self:
        """Build from a plain dictionary. Raises UserError naming the first wrong key under `where`."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise UserError(_sentence(cls, error, where)) from None

    def plain(self) -> dict[str, Any]:
        """The settings as plain, JSON-ready dictionaries, every key present."""
        return self.model_dump(mode="json")


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Valid keys of the group of settings at `path` below `model`."""
    for part in path:
        field = model.model_fields.get(str(part))
        annotations = [field.annotation, *get_args(field.annotation)] if field else []
        inner = [a for a in annotations if isinstance(a, type) and issubclass(a, BaseModel)]
        if not inner:
            # A dictionary of groups (arms, stages): step over its free key and look at what it holds.
            continue
        model = inner[0]
    return list(model.model_fields)


def _sentence(model: type[BaseModel], error: ValidationError, where: str) -> str:
    found = error.errors(include_url=False)
    # A misspelt key is missing under its right name too, and the misspelling is what its writer can mend.
    first = next((entry for entry in found if entry["type"] == "extra_forbidden"), found[0])
    location = tuple(first["loc"])
    key = ".".join([*([where] if where else []), *map(str, location)]) or where or model.__name__.lower()
    kind = first["type"]
    if kind == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
        return f"{key}: unknown key; {advice}"
    if kind == "missing":
        return f"{key}: this key is required and missing; add it"
    if kind == "value_error" and not location and not where:
        return str(first["ctx"]["error"])
    if kind == "value_error":
        return f"{key}: {first['ctx']['error']}"
    found = first["input"]
    hint = ""
    if kind == "float_type" and isinstance(found, str):
        with contextlib.suppress(ValueError):
            # YAML reads 1e-3 as text and only 1.0e-3 as a number.
            mantissa, _, exponent = f"{float(found):e}".partition("e")
            hint = f"; write {float(mantissa)}e{int(exponent)}, with a decimal point and no quotes"
    if kind == "string_type" and isinstance(found, int | float):
        hint = f"; put it in quotes, '{found}'"
    if kind == "model_type":
        known = _fields_at(model, location)
        advice = ", or leave it out" if location else ""
        return f"{key}: found {found!r}; give keys below it ({', '.join(known)}){advice}"
    return f"{key}: found {found!r}; {first['msg'][:1].lower()}{first['msg'][1:]}{hint}"
