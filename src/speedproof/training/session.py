"""One training run: a recipe's whole budget under one execution, in windows, virtual epochs and a full validation.

    budget  = virtual epochs, each ended by a validation on the fixed subset (the boundary cuts its last update short)
    epoch   = windows of whole updates, one line of metrics.jsonl each
    session = training phase (subset scan, windows, epoch validations, checkpoints) + full validation

A run can be stopped between two updates and go on in another process, on the CPU in deterministic mode with bitwise
equal weights.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speedproof.core import files
from speedproof.core.errors import Preempted, UserError
from speedproof.core.identity import digest
from speedproof.core.progress import Progress
from speedproof.data.loader import TrainingBatches, subset_blocks, validation_targets
from speedproof.data.resident import ResidentBatches
from speedproof.data.token_cache import TokenCache
from speedproof.settings.execution import Execution
from speedproof.settings.recipe import Recipe
from speedproof.training import checkpoint
from speedproof.training.compile import compiles, recompile_reasons
from speedproof.training.evaluate import Evaluation, evaluate
from speedproof.training.ledger import Ledger, Tally, process_seconds, window_ends
from speedproof.training.stopping import Stop
from speedproof.training.update import Updater
from speedproof.training.window import run_window

METRICS, WEIGHTS, RESULT = "metrics.jsonl", "weights.safetensors", "result.json"

FIRST_SAVE_S = 10.0
"""What a save is taken to last as long as none was timed."""


class Session:
    """A run: made or resumed, brought to its end by `run`, written down by `write`."""

    def __init__(
        self,
        recipe: Recipe,
        execution: Execution,
        cache: TokenCache,
        identity: dict[str, Any],
        scratch: Path,
        *,
        checkpoint_interval_s: float = 600.0,
        stop: Stop | None = None,
        waited_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        process_clock: Callable[[], float] = process_seconds,
    ):
        """`identity`, whose `repeat` goes into the result, guards the resume state in `scratch`.

        `waited_s` were spent waiting for the device and count neither as start-up nor as the process's own time.

        Raises: UserError for a recipe that the cache or the execution does not fit, and for a resume state that is
        damaged or another run's.
        """
        _check(recipe, execution, cache)
        self.recipe, self.execution, self.cache = recipe, execution, cache
        self.identity, self.scratch, self.metrics = identity, scratch, scratch / METRICS
        self.interval_s, self.stop, self.clock = checkpoint_interval_s, stop or Stop(), clock
        self.device = torch.device(execution.device)
        self.updater = Updater(recipe, execution, self.device)
        self.ledger, self.tally, cursor = Ledger(), Tally(), 0
        state = checkpoint.load(scratch, identity)
        self.resumed = state is not None
        if state is not None:
            self.ledger, self.tally = Ledger(**state.counters["ledger"]), Tally(**state.counters["tally"])
            cursor = state.counters["cursor"]
            self.updater.load_state_dict(_from_state(state))
            checkpoint.set_random_state(state.tensors, self.device)
        _cut(self.metrics, self.ledger.metrics_bytes)
        resident = partial(ResidentBatches, device=self.device)
        self.batches = (resident if execution.tokens == "device" else TrainingBatches)(cache.train, recipe, cursor)
        self._began = cursor
        self._compiling = True  # the first window of a process holds its compilation
        self._update_s, self._save_s, self._saved_at = 0.0, FIRST_SAVE_S, clock()
        self._process_s = lambda before=self.ledger.process_s - waited_s: before + process_clock()
        self._phase_s: Callable[[], float] | None = None  # None outside the training phase
        self.ledger.waited_for_device_s += waited_s
        self.ledger.startup_s += process_clock() - waited_s

    def run(self) -> None:
        """Train the whole budget and validate on the whole split, from wherever the run stands.

        TERM and Ctrl-C are requests to stop meanwhile. Raises: Preempted once the state is saved; NonFinite,
        CompileError and UserError as update and evaluation give them, with the last saved state in place.
        """
        with self.stop.listening(), self.batches:
            self._train()
            self._pause()
            start = self.clock()
            with Progress("validate", validation_targets(self.cache.validation), "targets") as bar:
                self.full = self._evaluate(None, bar)
            self._full_validation_s = self.clock() - start

    def write(self, output: Path, environment: dict[str, Any]) -> None:
        """Fill the folder `output` with what a finished run leaves behind.

        That is recipe.yaml, execution.yaml, metrics.jsonl, weights.safetensors and, last, result.json.
        """
        output.mkdir(parents=True, exist_ok=True)
        files.write_yaml(output / "recipe.yaml", self.recipe.plain())
        files.write_yaml(output / "execution.yaml", self.execution.plain())
        shutil.copyfile(self.metrics, output / METRICS)
        checkpoint.save_weights(output / WEIGHTS, self.updater.state_dict()["model"])
        files.write_json(output / RESULT, self.result() | {"environment": environment})

    def result(self) -> dict[str, Any]:
        """What result.json says of a finished run.

        A resumed run's seconds are sums over its processes: `resumed` marks them as no session to compare.
        """
        self.ledger.process_s = self._process_s()
        compiling = self.execution.compile or self.execution.evaluation_compile
        return self.ledger.timings(self.updater.targets_seen) | {
            "status": "ok",
            "recipe_digest": digest(self.recipe.plain()),
            "execution": self.execution.plain(),
            "data": self.cache.identity,
            "seed": self.recipe.seed,
            "repeat": self.identity["repeat"],
            "targets": self.updater.targets_seen,
            "updates": self.updater.updates,
            "full_validation_s": self._full_validation_s,
            "session_s": self.ledger.training_phase_s + self._full_validation_s,
            "full_validation_loss": self.full.loss,
            "full_validation_targets": self.full.targets,
            "epoch_losses": self.ledger.epoch_losses,
            "resumed": self.resumed,
            "partial_shapes": self._partial_shapes(),
            "compiles": compiles() if compiling else 0,
            "recompile_reasons": recompile_reasons() if compiling else [],
            "peak_memory_bytes": _peak_memory_bytes(self.device),
        }

    def _train(self) -> None:
        start = self.clock()
        self._phase_s = lambda before=self.ledger.training_phase_s: before + self.clock() - start
        self.subset = subset_blocks(self.cache.validation, self.recipe)
        self.ledger.subset_scan_s += self.clock() - start
        context = self.recipe.model.context_length
        with Progress("train", self.recipe.total_targets - self._began * context, "targets") as self._bar:
            for epoch, ends in enumerate(window_ends(self.recipe)):
                for end in ends:
                    self._window(end)
                if epoch == len(self.ledger.epoch_losses):
                    self._validate_epoch()
        self.ledger.training_phase_s, self._phase_s = self._phase_s(), None

    def _partial_shapes(self) -> list[list[int]]:
        """Shapes [blocks, context] of the shorter microbatches, which only the end of an epoch has."""
        ends = [0, *self.recipe.epoch_ends()]
        left = {(b - a) % self.recipe.blocks_per_update % self.execution.microbatch for a, b in pairwise(ends)}
        return [[blocks, self.recipe.model.context_length] for blocks in sorted(left - {0})]

    def _window(self, end: int) -> None:
        if self.batches.cursor >= end:
            return
        while self.batches.cursor < end:
            self._pause()
            piece = run_window(self.updater, self.batches, self._plan(end), self.clock, self.tally.count)
            self._update_s = piece.seconds / piece.updates
            self.tally.add_time(piece)
        self._log(
            {
                "targets": self.updater.targets_seen,
                "updates": self.updater.updates,
                "lr": float(self.updater.optimizer.param_groups[0]["lr"]),
            }
            | self.tally.line()
        )
        self.ledger.close_window(self.tally, self._compiling)
        self._compiling, self.tally = False, Tally()

    def _plan(self, end: int) -> Iterator[int]:
        """Blocks of each update up to `end`; it ends early, after one update or more, to save or to stop."""
        cursor = self.batches.cursor
        while cursor < end:
            blocks = min(self.recipe.blocks_per_update, end - cursor)
            yield blocks
            cursor += blocks
            self._bar.update((cursor - self._began) * self.recipe.model.context_length)
            if self._due() or self._reason():
                return

    def _validate_epoch(self) -> None:
        start = self.clock()
        found = self._evaluate(self.subset, None)
        seconds, targets = self.clock() - start, self.updater.targets_seen
        self.ledger.epoch_validation_s += seconds
        self.ledger.epoch_losses.append([targets, found.loss])
        epoch = len(self.ledger.epoch_losses)
        self._log({"epoch": epoch, "targets": targets, "validation_loss": found.loss, "seconds": seconds})

    def _evaluate(self, blocks: np.ndarray | None, bar: Progress | None) -> Evaluation:
        watch = _Watch(self, bar)
        return evaluate(
            self.updater.model, self.cache.validation, self.recipe, self.execution, self.device, blocks, watch
        )

    def _log(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, allow_nan=False) + "\n"
        with open(self.metrics, "a", encoding="utf-8") as stream:
            stream.write(text)
        self.ledger.metrics_bytes += len(text)

    def _due(self) -> bool:
        return self.clock() - self._saved_at >= self.interval_s

    def _reason(self) -> str | None:
        return self.stop.reason(margin_s=2 * (self._update_s + self._save_s) + 5)

    def _pause(self) -> None:
        """Save where that is due; where the run is to stop, save and raise Preempted."""
        if reason := self._reason():
            self.save()
            done, total = self.updater.targets_seen, self.recipe.total_targets
            raise Preempted(f"{reason}; state saved after {done:,} of {total:,} targets, the same command goes on")
        if self._due():
            self.save()

    def save(self) -> None:
        """Save all that the rest of the run depends on. Raises: UserError; the state before is then intact."""
        start, ledger = self.clock(), self.ledger
        updater = self.updater.state_dict()
        tensors = {f"{part}.{name}": t for part in ("model", "moments") for name, t in updater.pop(part).items()}
        if self.metrics.exists():
            with open(self.metrics, "rb") as stream:
                os.fsync(stream.fileno())
        ledger.process_s = self._process_s()
        if self._phase_s is not None:
            # The time of this save is not known yet; it is lost to a run that goes on from it.
            ledger.training_phase_s = self._phase_s()
        counters = {
            "cursor": self.batches.cursor,
            "updater": updater,
            "ledger": asdict(ledger),
            "tally": asdict(self.tally),
        }
        state = checkpoint.State(tensors | checkpoint.random_state(self.device), counters)
        checkpoint.save(self.scratch, self.identity, state)
        self._saved_at = self.clock()
        self._save_s = self._saved_at - start
        ledger.checkpoint_s += self._save_s


class _Watch:
    """Progress of an evaluation that also stops the run: nothing is trained meanwhile, so the state can be saved."""

    def __init__(self, session: Session, bar: Progress | None):
        self._session, self._bar = session, bar

    def update(self, done: float, note: str = "") -> None:
        if self._bar is not None:
            self._bar.update(done, note)
        if self._session._reason():
            self._session._pause()


def _check(recipe: Recipe, execution: Execution, cache: TokenCache) -> None:
    execution.check(recipe)
    if recipe.data != cache.identity:
        raise UserError(
            f"recipe.data: found {recipe.data}, but the token cache is {cache.identity}; "
            f"use the cache that this recipe was resolved with, or resolve it again"
        )
    if cache.vocab_size > recipe.model.vocab_size:
        raise UserError(
            f"recipe.model.vocab_size: {recipe.model.vocab_size} is smaller than the {cache.vocab_size} entries of "
            f"the tokenizer; use a preset with at least as many"
        )


def _from_state(state: checkpoint.State) -> dict[str, Any]:
    """The updater's part of a state, as `Updater.load_state_dict` takes it."""
    parts: dict[str, Any] = {"model": {}, "moments": {}}
    for name, tensor in state.tensors.items():
        part, _, rest = name.partition(".")
        if part in parts:
            parts[part][rest] = tensor
    return parts | state.counters["updater"]


def _cut(metrics: Path, size: int) -> None:
    """Cut metrics.jsonl back to where it was when the state was saved; what came later is trained again.

    Raises: UserError when it is shorter than that.
    """
    metrics.parent.mkdir(parents=True, exist_ok=True)
    found = metrics.stat().st_size if metrics.exists() else 0
    if found < size:
        raise UserError(
            f"{metrics}: holds {found} bytes where the resume state knows of {size}; "
            f"delete {metrics.parent} to start this run again from its beginning"
        )
    if found:
        os.truncate(metrics, size)


def _peak_memory_bytes(device: torch.device) -> int:
    """Peak of the allocator on CUDA, of resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
