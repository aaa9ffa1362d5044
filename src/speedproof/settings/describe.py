"""Write config/README.md from the settings themselves: `python -m speedproof.settings.describe > config/README.md`."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from speedproof.core import files
from speedproof.settings.experiment import Experiment

HEAD = """\
# The configuration

`config/default.yaml` names every key with its default and is the embedded experiment. Other files only override it:
`snakemake --configfile config/gh200.yaml -- all`, and single keys with `--config`, as in
`snakemake --config 'recipe={budget_targets: 400000}' 'tuning={microbatches: [8]}' -n all`.
A number such as `1e-3` is written `1.0e-3`, since YAML takes the first for text.

`config/presets/<name>.yaml` holds a model's six sizes and may override any key of `recipe`.
`config/executions/<device>-<preset>.yaml` are settled executions, complete, to be passed to any `--execution`.

This page is written by `python -m speedproof.settings.describe`.

| key | default | meaning |
|---|---|---|
"""


def _kind(annotation: Any) -> str:
    text = str(annotation) if not isinstance(annotation, type) else annotation.__name__
    return text.replace("typing.", "").replace("Literal[", "one of [").replace("|", "or")


def _cell(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`".replace("|", "\\|")


def rows(model: type[BaseModel], defaults: dict[str, Any], prefix: str = "") -> list[str]:
    """A table row for each key below `model`, in the order of the file."""
    found = []
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += rows(field.annotation, defaults[name], f"{key}.")
        else:
            meaning = field.description or _kind(field.annotation)
            found.append(f"| `{key}` | {_cell(defaults[name])} | {meaning.replace('|', 'or')} |")
    return found


def page(default: Path) -> str:
    """The whole page, with the defaults that the file `default` gives."""
    return HEAD + "\n".join(rows(Experiment, files.read_yaml(default))) + "\n"


if __name__ == "__main__":
    print(page(Path("config/default.yaml")), end="")
