"""Experiment: the whole config, as `config/default.yaml` names it, and how presets and arms become settings."""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.settings.execution import (
    Allocator,
    Capture,
    CompileMode,
    Execution,
    FiniteChecks,
    Loss,
    Optimizer,
    Projections,
    SdpaBackend,
    Tokens,
)
from speedproof.settings.programme import Programme
from speedproof.settings.recipe import ModelShape, Recipe, RecipeSettings
from speedproof.settings.strict import Strict

MODEL_KEYS = tuple(ModelShape.model_fields)
DECIDING = ("stage_blocks", "blocks", "retention", "no_regression")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class Data(Strict):
    """Where the C4 documents come from."""

    source: Literal["embedded", "files", "hub"] = Field(
        description="embedded: a text that comes with Python; files: C4 on disk in its own layout; hub: fetched once"
    )
    directory: str | None = Field(description="files: the folder that holds en/c4-train.*-of-*.json.gz")
    repository: str = Field(description="hub: the data set")
    revision: str = Field(description="hub: the pinned commit")
    train_files: PositiveInt = Field(description="training files to use, from the first on")
    validation_files: PositiveInt = Field(description="validation files to use, from the first on")
    order_seed: int = Field(description="order of the documents within a file")


class Tokenizer(Strict):
    """Where the tokenizer comes from."""

    source: Literal["train", "file", "hub"] = Field(
        description="train: a BPE of the preset's vocabulary, from the training text; file and hub: one that exists"
    )
    file: str | None = Field(description="file: a tokenizer.json")
    repository: str = Field(description="hub: the model whose tokenizer.json is used")
    revision: str = Field(description="hub: the pinned commit")
    end_of_document: str | None = Field(
        description="the token put after each document; null finds the tokenizer's own end-of-text token"
    )


class Protocol(Strict):
    """How an execution is measured and when a difference counts."""

    warmup_updates: PositiveInt = Field(
        description="updates before the first window; the very first, which compiles, is timed apart"
    )
    windows: PositiveInt = Field(description="timed windows of a process; its rate is their median")
    updates_per_window: PositiveInt = Field(description="whole updates of a window, at least")
    min_window_seconds: NonNegativeFloat = Field(description="a window counts whole updates past this time")
    profile_updates: NonNegativeInt = Field(description="updates traced after the timing; 0: none")
    deadline_s: PositiveInt = Field(description="a worker that takes longer, imports included, becomes `timeout`")
    stage_blocks: NonNegativeInt = Field(
        description="A B B A blocks of a stage's fastest against the incumbent; 0: by single records"
    )
    blocks: PositiveInt = Field(description="A B B A blocks of the final comparison against the default")
    retention: float = Field(gt=0, description="smallest gain that replaces the incumbent")
    no_regression: float = Field(gt=0, le=1, description="lower bound of a ratio that is no regression")

    def measuring(self) -> dict[str, Any]:
        """The part that decides what a record holds; the rest only decides what follows from records."""
        return {key: value for key, value in self.plain().items() if key not in DECIDING}

    def deciding(self) -> dict[str, Any]:
        """The part that decides what follows from records."""
        return {key: value for key, value in self.plain().items() if key in DECIDING}


class Tuning(Strict):
    """The grid; each list is the values to try, in the order of preference at a tie."""

    microbatches: list[PositiveInt] = Field(min_length=1, description="the grid, with compile")
    compile: list[bool] = Field(min_length=1, description="the grid, with microbatches")
    sdpa_backends: list[SdpaBackend] = Field(description="tried on the best two of the grid")
    compile_modes: list[CompileMode] = Field(description="tried on the best")
    losses: list[Loss] = Field(description="tried with projections on the best")
    projections: list[Projections] = Field(description="tried with losses")
    optimizers: list[Optimizer] = Field(description="tried with finite_checks and captures on the best")
    finite_checks: list[FiniteChecks] = Field(description="tried with optimizers")
    captures: list[Capture] = Field(description="tried with optimizers")
    cpu_threads: list[PositiveInt] = Field(description="tried on the best")
    allocators: list[Allocator] = Field(description="tried with tokens on the best")
    tokens: list[Tokens] = Field(description="tried with allocators")


class Arm(Strict):
    """One arm of the matched runs: a base execution with some settings changed."""

    base: Literal["default", "selected", "recommended"]
    set: dict[str, Any] = Field(default_factory=dict, description="execution settings of this arm")


class Matched(Strict):
    """Which runs are trained over the whole budget and compared."""

    presets: list[str] = Field(description="those of `presets` that are trained")
    seeds: list[NonNegativeInt] = Field(min_length=1, description="each arm is trained once with each")
    repeats: PositiveInt = Field(description="identical runs of each arm and seed; two or more give the spread")
    checkpoint_minutes: float = Field(gt=0, description="interval of the resumable state")
    reference: str = Field(description="the arm that the others are compared with")
    arms: dict[str, Arm] = Field(
        min_length=1, description="by name: `base` is default, selected or recommended, `set` what is changed of it"
    )

    @model_validator(mode="after")
    def _reference_is_an_arm(self) -> "Matched":
        if self.reference not in self.arms:
            raise ValueError(f"reference {self.reference!r} is no arm; choose one of {', '.join(self.arms)}")
        return self


class Parity(Strict):
    """When a fast path still computes the reference."""

    blocks: PositiveInt = Field(description="validation blocks compared, at full context")
    loss_tolerance_nats: float = Field(gt=0, description="largest difference of the loss, in nats a target")
    gradient_tolerance: float = Field(gt=0, description="aggregate relative gradient error")
    arm: str = Field(description="the matched arm whose trained weights are checked")


class Slurm(Strict):
    """What a job asks of the scheduler; null leaves the flag out."""

    account: str | None = Field(description="null: that of your last job, or the site's default")
    partition: str | None = Field(description="of every job that no other key names one for")
    data_partition: str | None = Field(description="of jobs that need no GPU; without qos and reservation")
    fetch_partition: str | None = Field(description="one with a network; null fetches where Snakemake runs")
    gpu_type: str | None = Field(
        description="as `sinfo -o %G` names it; all records of an experiment must come from one"
    )
    constraint: str | None = Field(description="feature of the nodes of measuring jobs")
    qos: str | None = Field(description="of jobs in `partition`")
    reservation: str | None = Field(description="of jobs in `partition`")
    gpus: Literal[0, 1] = Field(description="GPUs of a measuring job")
    cpus: PositiveInt = Field(description="CPUs of a measuring job")
    mem_mb: PositiveInt = Field(description="memory of a measuring job")
    data_cpus: PositiveInt = Field(description="CPUs of a job that prepares data")
    data_mem_mb: PositiveInt = Field(
        description="memory of a job that prepares data; a second attempt gets twice as much"
    )
    measure_minutes: PositiveInt = Field(description="time limit of one measurement; above protocol.deadline_s")
    compare_minutes: PositiveInt = Field(description="time limit of a job of A B B A blocks")
    train_minutes: PositiveInt = Field(
        description="time limit of a training run, which saves before it and goes on in the next attempt"
    )
    data_minutes: PositiveInt = Field(description="time limit of a job that prepares or fetches data")
    allocation_minutes: PositiveInt = Field(description="time limit of the one job of `make allocation`")


class Experiment(Strict):
    """The whole config."""

    experiment: str = Field(pattern=NAME, description="name of the results folder")
    store: str = Field(min_length=1, description="folder of the content-addressed store; experiments may share one")
    presets: list[str] = Field(min_length=1, description="models to try, by their names in config/presets")
    execution: Execution
    data: Data
    tokenizer: Tokenizer
    recipe: RecipeSettings
    protocol: Protocol
    tuning: Tuning
    matched: Matched
    parity: Parity
    programme: Programme
    slurm: Slurm

    @model_validator(mode="after")
    def _names_agree(self) -> "Experiment":
        lists = {"presets": self.presets, "matched.presets": self.matched.presets, "matched.seeds": self.matched.seeds}
        for key, values in lists.items():
            if twice := [value for value in values if values.count(value) > 1]:
                # One run counted twice would pass for a repeat without any spread.
                raise ValueError(f"{key} names {twice[0]!r} twice; name each once")
        becoming_paths = {
            "presets": self.presets,
            "matched.arms": self.matched.arms,
            "programme": (*self.programme.rows, *self.programme.pairs),
        }
        for key, names in becoming_paths.items():
            for name in names:
                if not re.fullmatch(NAME, name):
                    raise ValueError(f"{key}: {name!r} becomes a file's name; use letters, digits, '.', '_' and '-'")
        for preset in self.matched.presets:
            if preset not in self.presets:
                raise ValueError(f"matched.presets names {preset!r}, which presets does not list; add it there")
        for key, preset in self.programme.presets().items():
            if preset not in self.presets:
                raise ValueError(f"{key} names {preset!r}, which presets does not list; add it there")
        if self.parity.arm not in self.matched.arms:
            raise ValueError(f"parity.arm {self.parity.arm!r} is no arm of matched.arms; choose one of them")
        if self.slurm.measure_minutes * 60 <= self.protocol.deadline_s:
            raise ValueError(
                f"slurm.measure_minutes ({self.slurm.measure_minutes}) does not lie above protocol.deadline_s "
                f"({self.protocol.deadline_s}), so a slow candidate would be killed before it is recorded; raise it"
            )
        return self


def typed(value: Any) -> Any:
    """What `snakemake --config` gave, with the numbers, booleans and nulls that it leaves as text inside a group."""
    if isinstance(value, Mapping):
        return {key: typed(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [typed(entry) for entry in value]
    if isinstance(value, str):
        with contextlib.suppress(yaml.YAMLError):
            read = yaml.safe_load(value)
            return read if value and (read is None or isinstance(read, bool | int | float)) else value
    return value


def load_preset(name: str, config: Experiment, folder: Path) -> tuple[ModelShape, RecipeSettings]:
    """Read `<folder>/<name>.yaml`: the model's six sizes, and recipe keys that this preset overrides."""
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise UserError(f"presets: {name!r} has no file {path}; known presets are {known}")
    values = files.read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: found {values!r}; expected keys {', '.join(MODEL_KEYS)}")
    shape = ModelShape.parse({k: v for k, v in values.items() if k in MODEL_KEYS}, str(path))
    overrides = {k: v for k, v in values.items() if k not in MODEL_KEYS}
    return shape, RecipeSettings.parse(config.recipe.plain() | overrides, str(path))


def recipe_for(preset: str, config: Experiment, folder: Path, data: str | None) -> Recipe:
    """The preset's whole recipe on the token cache with identity `data`."""
    shape, settings = load_preset(preset, config, folder)
    value = settings.plain() | {"preset": preset, "model": shape.plain(), "data": data}
    return Recipe.parse(value, "recipe")


def read_config(path: Path) -> dict[str, Any]:
    """Read one config file. Raises UserError when it holds no keys."""
    value = files.read_yaml(path)
    if not isinstance(value, dict):
        raise UserError(
            f"{path}: found {value!r}; give keys such as those of config/default.yaml, or leave the file out"
        )
    return value


def read_recipe(path: Path) -> Recipe:
    """Read a resolved recipe that a result was written with."""
    return Recipe.parse(files.read_yaml(path), str(path))


def read_execution(path: Path) -> Execution:
    """Read a complete execution, `selected.yaml` for one."""
    return Execution.parse(files.read_yaml(path), str(path))


def changed(base: Execution, settings: Any, where: str) -> Execution:
    """`base` with some settings changed. Raises UserError naming the wrong one under `where`."""
    if not isinstance(settings, dict):
        raise UserError(f"{where}: found {settings!r}; expected settings by name, such as {{microbatch: 8}}")
    return Execution.parse(base.plain() | settings, where)
