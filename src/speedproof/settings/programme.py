"""Programme: single measurements and compared pairs by name, each a change of the experiment's execution."""

from typing import Any, Literal

from pydantic import Field, model_validator

from speedproof.settings.execution import Execution
from speedproof.settings.strict import Strict

Part = Literal[
    "ladder",
    "rope_ablation",
    "finite_checks",
    "sdpa",
    "compile_modes",
    "cpu_threads",
    "larger_models",
    "cold_start",
    "synthetic",
    "kernels",
]
"""What a row or pair belongs to; each part is a target of the graph."""


class Row(Strict):
    """One measurement in one fresh process."""

    parts: list[Part] = Field(min_length=1)
    preset: str
    set: dict[str, Any] = Field(description="execution settings that differ from `execution`")
    against: str | None = Field(None, description="the row that its rate and its start are set against")
    synthetic: bool = Field(False, description="one random batch kept on the device, in the place of real data")
    cold: bool = Field(False, description="empty compiler caches")
    profile: bool = Field(False, description="trace three updates after the timing")


class Pair(Strict):
    """Two executions in A B B A blocks of fresh processes; B is the one that may be better."""

    parts: list[Part] = Field(min_length=1)
    preset: str
    a: dict[str, Any] = Field(description="execution settings that differ from `execution`")
    b: dict[str, Any] = Field(description="execution settings that differ from `execution`")


class Programme(Strict):
    """What is measured beside the tuner and the matched runs."""

    stand_ins: dict[str, str] = Field(
        description="published preset: the small one of this experiment that rehearses it; its figures get no ratio"
    )
    rows: dict[str, Row] = Field(description="single measurements by name")
    pairs: dict[str, Pair] = Field(description="compared executions by name")

    @model_validator(mode="after")
    def _rows_agree(self) -> "Programme":
        for name, row in self.rows.items():
            if row.against is None:
                continue
            if row.against not in self.rows:
                raise ValueError(f"rows.{name}.against: {row.against!r} is no row; use one of {', '.join(self.rows)}")
            if self.rows[row.against].preset != row.preset:
                raise ValueError(f"rows.{name}.against: {row.against!r} has another preset; choose one of {row.preset}")
        return self

    def presets(self) -> dict[str, str]:
        """The preset that each key names."""
        named = {f"programme.rows.{name}.preset": row.preset for name, row in self.rows.items()}
        named |= {f"programme.pairs.{name}.preset": pair.preset for name, pair in self.pairs.items()}
        return named | {f"programme.stand_ins.{name}": preset for name, preset in self.stand_ins.items()}

    def executions(self, default: Execution) -> dict[str, Execution]:
        """The complete execution of `rows/<name>`, `pairs/<name>/a` and `pairs/<name>/b`."""
        changes = {f"rows/{name}": (row.set, f"rows.{name}.set") for name, row in self.rows.items()}
        for name, pair in self.pairs.items():
            changes |= {f"pairs/{name}/{arm}": (getattr(pair, arm), f"pairs.{name}.{arm}") for arm in "ab"}
        return {
            name: Execution.parse(default.plain() | settings, f"programme.{where}")
            for name, (settings, where) in changes.items()
        }

    def of_part(self, part: Part) -> list[str]:
        """The results of a part as `rows/<name>` and `pairs/<name>`."""
        rows = [f"rows/{name}" for name, row in self.rows.items() if part in row.parts]
        return rows + [f"pairs/{name}" for name, pair in self.pairs.items() if part in pair.parts]
