"""The published programme's main rows on one GPU within a few minutes: measured, published, ratio, status.

Rows are in the order of their worth, each process has a deadline inside what time is left, and the table is printed
and saved after each one, so that a cut loses little. Timings go through the same workers and records as the
experiment; tokens are random ones in a real token cache. Needs no corpus, no network, no Snakemake and no NVML.
"""

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.errors import Preempted, UserError
from speedproof.core.identity import digest
from speedproof.core.store import Store
from speedproof.data.token_cache import TokenCache
from speedproof.evidence import gpu_steps
from speedproof.evidence.gpu_rows import FIGURES, PROFILED, ROWS, Row
from speedproof.evidence.published import read_published
from speedproof.measure.compiler_cache import compiler_cache
from speedproof.measure.device_lock import device_lock
from speedproof.measure.environment import cpu_ids, environment
from speedproof.measure.isolate import run_isolated
from speedproof.measure.once import LOG_FILE, log_tail, measure_once, status_of
from speedproof.settings.experiment import Experiment, Parity, changed, read_execution, recipe_for
from speedproof.settings.recipe import Recipe

PROTOCOL = {"warmup_updates": 5, "windows": 3, "updates_per_window": 20, "min_window_seconds": 2.0}
PROFILED_UPDATES = 3
PARITY = Parity(blocks=2, loss_tolerance_nats=1e-3, gradient_tolerance=0.05, arm="none")

TRAIN_TOKENS, VALIDATION_TOKENS = 24 * 2**20, 4 * 2**20
RECIPE = {"targets_per_update": 32768, "budget_targets": TRAIN_TOKENS - 1024}

TOY_MODEL = {"vocab_size": 512, "layers": 1, "width": 64, "heads": 1, "ffn_width": 128, "context_length": 64}
TOY_TOKENS = 2**16
TOY_RECIPE = {"targets_per_update": 32 * 64, "budget_targets": TOY_TOKENS - 64}
TOY_PROTOCOL = {"warmup_updates": 2, "windows": 2, "updates_per_window": 3, "min_window_seconds": 0.0}

OLDEST_TORCH = (2, 11)
RESERVE_S = 12.0
"""Kept back for ending a worker and writing the table."""

PATIENCE = 4
"""A process may take so many times the seconds that its row expects."""

PASSED = ("ok", "skipped")


class Check:
    """The check on one device: `run` measures the rows, and `out` holds the table and all that is behind it."""

    def __init__(self, root: Path, device: str, minutes: float, out: Path, rows: tuple[Row, ...] = ROWS):
        """`root` is the checkout, for its config and tests; `device` "cpu" rehearses at toy size.

        Raises: UserError for what cannot be measured here, or for a folder that holds something else.
        """
        if not minutes > 0:
            raise UserError(f"--minutes: found {minutes:g}; give more than 0")
        self.root, self.device, self.minutes, self.out, self.rows = root, device, minutes, Path(out).resolve(), rows
        self.published = read_published(root / "config/published.yaml")
        self.config = _config(root, device)
        base = read_execution(root / "config/executions/gh200-20m.yaml")
        threads = min(base.cpu_threads, len(cpu_ids()))
        self.final = changed(base, {"device": device, "cpu_threads": threads}, "execution")
        self.machine = environment(device)
        _check_torch(self.machine["class"]["torch"])
        self.found: dict[str, dict[str, Any]] = {}
        """What each process found, by what it ran."""
        self.lines: list[dict[str, Any]] = []
        self._begin, self._waited_s = time.monotonic(), 0.0

    def run(self) -> bool:
        """Go through the rows; whether all of them are ok. Waiting for the device does not count as time."""
        if (self.out / "rows").exists():
            if not (self.out / "check.json").is_file():
                raise UserError(f"--out: {self.out} holds rows of something else; give another folder")
            shutil.rmtree(self.out / "rows")
        self._begin = time.monotonic()
        self._save()
        self.cache = self._make_cache()
        for row in self.rows:
            key = self._key(row)
            begun = key not in self.found and not self._never(row)
            if begun:
                with self._device(row):
                    left = 60 * self.minutes - self.seconds() - RESERVE_S
                    if begun := left >= row.seconds:
                        deadline_s = int(min(left, PATIENCE * row.seconds))
                        print(f"\n{row.preset} {row.title}: up to {deadline_s} s", file=sys.stderr, flush=True)
                        self.found[key] = self._process(row, deadline_s)
            self.lines.append(self._line(row, self.found.get(key)))
            self._save()
            if begun:
                print(self.table(), flush=True)
        print(self.table(), flush=True)
        return all(line["status"] in PASSED for line in self.lines)

    def seconds(self) -> float:
        """Time used so far."""
        return time.monotonic() - self._begin - self._waited_s

    def table(self) -> str:
        """The lines so far as text, under the machine and above the rows still to come."""
        machine = self.machine["class"]
        where = machine.get("gpu") or f"{machine['cpu']}, {machine['cpus']} CPUs"
        versions = [f"{name} {machine[name]}" for name in ("driver", "cuda", "cudnn", "torch") if machine.get(name)]
        head = [f"gpu-check on {where}; {', '.join(versions)}; {self.seconds():.0f} s of {60 * self.minutes:.0f}"]
        if self.device == "cpu":
            head.append("rehearsal at toy size: no figure below is one of a preset")
        head.append(f"published: {self.published['environment']['device']}, measured by others")
        cells = [("row", "unit", "measured", "published", "ratio", "status")]
        for line in self.lines:
            ratio = "-" if line["ratio"] is None else f"{line['ratio']:.3f}"
            status = line["status"] + (f": {line['reason'][:70]}" if line["reason"] and line["status"] != "ok" else "")
            title = f"{line['preset']} {line['title']}"
            figures = (_shown(line[key], line["unit"]) for key in ("measured", "published"))
            cells.append((title, line["unit"], *figures, ratio, status))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        text = [
            "  ".join(cell.rjust(width) if 2 <= n <= 4 else cell.ljust(width) for n, (cell, width) in enumerate(pairs))
            for pairs in (tuple(zip(row, widths, strict=True)) for row in cells)
        ]
        coming = [f"{row.preset} {row.title}" for row in self.rows[len(self.lines) :]]
        tail = [f"{len(coming)} rows to come, next {coming[0]}"] if coming else []
        return "\n".join(["", *head, *(line.rstrip() for line in text), *tail])

    def _key(self, row: Row) -> str:
        """What the row's process is known by: a rehearsal has one toy model in the place of all presets."""
        step = FIGURES[row.figure].step
        return digest([step] if step == "tests" else [step, self._recipe(row.preset, None).model.plain(), row.settings])

    @contextlib.contextmanager
    def _device(self, row: Row) -> Iterator[None]:
        """Hold the device for the row's process; the tests hold it themselves where they measure."""
        if FIGURES[row.figure].step == "tests":
            yield
            return
        with device_lock(self.device) as waited:
            self._waited_s += waited
            yield

    def _never(self, row: Row) -> bool:
        """Whether the row cannot be measured on this device at all."""
        impossible = self.final.model_copy(update=row.settings).contradiction()
        return self.device != "cuda" and bool(FIGURES[row.figure].needs_cuda or impossible)

    def _make_cache(self) -> TokenCache:
        toy = self.device == "cpu"
        train, validation = (TOY_TOKENS, TOY_TOKENS) if toy else (TRAIN_TOKENS, VALIDATION_TOKENS)
        vocab_size = min(self._recipe(row.preset, None).model.vocab_size for row in self.rows if row.preset != "all")
        return TokenCache.synthetic(self.out / "data", vocab_size, train, validation, seed=42)

    def _recipe(self, preset: str, data: str | None) -> Recipe:
        recipe = recipe_for(preset, self.config, self.root / "config/presets", data)
        if self.device == "cuda":
            return recipe
        return Recipe.parse(recipe.plain() | {"model": TOY_MODEL}, "recipe")

    def _process(self, row: Row, deadline_s: int) -> dict[str, Any]:
        """What a fresh process finds for the row; a failure is a status with its reason."""
        name = re.sub(r"[^a-z0-9]+", "-", f"{row.preset} {row.title}".lower())
        folder = self.out / "rows" / f"{len(self.lines) + 1:02d}-{name}"
        folder.mkdir(parents=True)
        try:
            found = self._run(row, deadline_s, folder)
        except Preempted:
            raise
        except Exception as error:  # one row that cannot be measured must not cost the others
            found = {"status": "error", "reason": f"{type(error).__name__}: {error}"}
        (folder / "request.json").unlink(missing_ok=True)  # it holds paths of this machine
        files.write_json(folder / "found.json", found)
        return found

    def _run(self, row: Row, deadline_s: int, folder: Path) -> dict[str, Any]:
        step = FIGURES[row.figure].step
        store, manifest = Store(self.out / "data/store"), self.out / "data/token_cache.json"
        if step == "tests":
            return self._run_step({"step": step, "root": str(self.root)}, deadline_s, folder)
        execution = changed(self.final, row.settings, "execution")
        recipe = self._recipe(row.preset, self.cache.identity)
        if step == "measure":
            profiled = any(r.figure in PROFILED and self._key(r) == self._key(row) for r in self.rows)
            protocol = TOY_PROTOCOL if self.device == "cpu" else PROTOCOL
            measuring = protocol | {"profile_updates": PROFILED_UPDATES * profiled, "deadline_s": deadline_s}
            return measure_once(
                recipe,
                execution,
                measuring,
                store=store,
                cache_manifest=manifest,
                mode="real",
                cold=False,
                folder=folder,
            )
        request = {
            "step": step,
            "recipe": recipe.plain(),
            "execution": execution.plain(),
            "parity": PARITY.plain(),
            "cache": str(manifest),
            "store": str(store.root),
        }
        return self._run_step(request, deadline_s, folder)

    def _run_step(self, request: dict[str, Any], deadline_s: int, folder: Path) -> dict[str, Any]:
        """What a process of `gpu_steps` found, with the status that its end deserves."""
        paths = folder / "request.json", folder / "result.json"
        files.write_json(paths[0], request)
        with compiler_cache() as caches:
            command = [sys.executable, "-m", gpu_steps.__name__, *map(str, paths)]
            ended = run_isolated(command, deadline_s, folder / LOG_FILE, env=caches | {"PYTHONUNBUFFERED": "1"})
        result = files.read_json(paths[1]) if paths[1].is_file() else None
        paths[1].unlink(missing_ok=True)
        log = log_tail(folder / LOG_FILE)
        status, reason = status_of(ended, result, log, deadline_s)
        if result and status == "timeout" and not ended.timed_out:
            # The word after the last test stands, but no deadline cut what came then.
            status, reason = "error", status_of(ended, None, log, deadline_s)[1]
        return (result or {}) | {"status": status, "reason": reason, "worker_s": ended.seconds, "log_tail": log}

    def _line(self, row: Row, found: dict[str, Any] | None) -> dict[str, Any]:
        figure = FIGURES[row.figure]
        measured, status, reason = None, "not reached", "no time was left"
        if self._never(row):
            status, reason = "skipped", "needs CUDA"
        elif found is not None:
            status, reason = found["status"], found["reason"]
            if status == "ok" or (figure.step != "measure" and status in ("failed", "timeout")):
                measured = figure.value(found)  # an error above its tolerance, or the tests that passed before the cut
            if status == "ok" and measured is None:
                profile = found.get("profile") or {}
                status, reason = "error", profile.get("reason") or "the record does not hold it"
        published = self._published(row)
        ratio = None
        comparable = figure.compared and self._comparable(found or {})
        if measured is not None and published and comparable:
            ratio = measured / published
        return asdict(row) | {
            "unit": figure.unit,
            "measured": measured,
            "published": published,
            "ratio": ratio,
            "status": status,
            "reason": reason,
            "flags": (found or {}).get("flags", []),
        }

    def _published(self, row: Row) -> float | None:
        if row.published is None:
            return None
        value = self.published["rows"][row.published]["value"]
        if row.figure == "validation":  # published as the seconds of the whole official split
            return self.published["comparable"]["full_validation_targets"] / value
        return value

    def _comparable(self, found: dict[str, Any]) -> bool:
        """Whether a figure was measured under what the published ones share."""
        return self.device == "cuda" and found.get("precision") == self.published["comparable"]["precision"]

    def _save(self) -> None:
        """Write down what there is; it is whole at any time."""
        value = {
            "device": self.device,
            "minutes": self.minutes,
            "seconds": self.seconds(),
            "environment": self.machine,
            "published_environment": self.published["environment"],
            "rows": self.lines,
        }
        files.write_json(self.out / "check.json", value)
        files.write_text(self.out / "table.txt", self.table().lstrip("\n") + "\n")


def _config(root: Path, device: str) -> Experiment:
    """The default config with the published sizes, or toy ones."""
    path = root / "config/default.yaml"
    value = files.read_yaml(path)
    value["recipe"] |= RECIPE if device == "cuda" else TOY_RECIPE
    return Experiment.parse(value, str(path))


def _check_torch(version: str | None) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version or "0")[:2])
    if numbers < OLDEST_TORCH:
        raise UserError(f"torch: found {version}; install {'.'.join(map(str, OLDEST_TORCH))} or later")


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    digits = {"GiB": 2, "ms": 1, "error": 4}.get(unit, 0)
    return f"{value:,.{digits}f}"
