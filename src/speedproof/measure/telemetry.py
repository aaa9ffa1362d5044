"""What the device did meanwhile: clocks, power, memory, utilisation, temperature once a second, beside a measurement.

It runs in the process that waits for the worker, so that the worker measures nothing but itself. What cannot be read
is empty in the table and None in the record, with a reason.
"""

import bisect
import csv
import itertools
import threading
import time
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.measure.sensors import Row, Source

INTERVAL_S = 1.0


class Sampler:
    """Reads a source every `interval_s` in a thread while a `with` block lasts; the table is written at its end."""

    def __init__(self, source: Source | None, table: Path | None = None, interval_s: float = INTERVAL_S):
        self.worker: int | None = None
        """Process id of the worker, once it is known."""
        self.rows: list[Row] = []
        self._source, self._table, self._interval_s = source, table, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="telemetry")

    def __enter__(self) -> "Sampler":
        if self._source is not None:
            self._thread.start()
        return self

    def _run(self) -> None:
        while True:
            self.sample()
            if self._stop.wait(self._interval_s):
                return

    def sample(self) -> None:
        """Take one reading now."""
        self.rows.append({"monotonic_s": time.monotonic()} | self._source.read(self.worker))

    def __exit__(self, *error: object) -> None:
        if self._source is None:
            return
        self._stop.set()
        self._thread.join()
        self.sample()
        self._source.close()
        if self._table is not None:
            self._write(self._table)

    def _write(self, path: Path) -> None:
        start = self.rows[0]["monotonic_s"]
        with files.atomic(path, "w") as stream:
            table = csv.writer(stream)
            table.writerow(["seconds", *self._source.columns])
            for row in self.rows:
                values = ["" if row.get(name) is None else row[name] for name in self._source.columns]
                table.writerow([f"{row['monotonic_s'] - start:.3f}", *values])

    def between(self, begin: float, end: float) -> list[Row]:
        """Readings inside two moments of `time.monotonic`."""
        return [row for row in self.rows if begin <= row["monotonic_s"] <= end]

    def energy(self, edges: list[tuple[float, float]]) -> dict[str, Any]:
        """Joules used between the edges: `{"energy_j", "energy_source", "energy_reason"}`, None with the reason."""
        if self._source is None:
            return _no_energy("no telemetry: NVML cannot be used here")
        if self._source.energy_source is None:
            return _no_energy(self._source.missing)
        counter = energy_counter(self.rows)
        if not edges or len(counter) < 2 or edges[0][0] < counter[0][0] or edges[-1][1] > counter[-1][0]:
            return _no_energy("the windows are not covered by readings")
        joules = sum(_at(counter, end) - _at(counter, begin) for begin, end in edges)
        return {"energy_j": joules, "energy_source": self._source.energy_source, "energy_reason": None}


def energy_counter(rows: list[Row]) -> list[tuple[float, float]]:
    """Moments and joules: the counter where there is one, else power integrated by trapezia."""
    counted = [(row["monotonic_s"], row["energy_j"]) for row in rows if row.get("energy_j") is not None]
    if counted:
        return counted
    powers = [(row["monotonic_s"], row["power_w"]) for row in rows if row.get("power_w") is not None]
    joules, total = powers[:1] and [(powers[0][0], 0.0)], 0.0
    for (before, low), (now, high) in itertools.pairwise(powers):
        total += (now - before) * (low + high) / 2
        joules.append((now, total))
    return joules


def _at(counter: list[tuple[float, float]], moment: float) -> float:
    """The counter at a moment between two readings, on the straight line between them."""
    place = min(max(bisect.bisect_left(counter, (moment, float("-inf"))), 1), len(counter) - 1)
    (before, low), (after, high) = counter[place - 1], counter[place]
    return low + (high - low) * (moment - before) / (after - before)


def _no_energy(reason: str | None) -> dict[str, Any]:
    return {"energy_j": None, "energy_source": None, "energy_reason": reason}


def summary(rows: list[Row]) -> dict[str, Any]:
    """What the readings of a window come to: means, the reasons that held clocks down, foreign processes."""

    def mean(name: str) -> float | None:
        values = [row[name] for row in rows if row.get(name) is not None]
        return sum(values) / len(values) if values else None

    reasons = {r for row in rows for r in (row.get("throttle_reasons") or "").split("+") if r}
    foreign = [row["foreign_processes"] for row in rows if row.get("foreign_processes") is not None]
    return {
        "readings": len(rows),
        "sm_clock_mhz": mean("sm_clock_mhz"),
        "power_w": mean("power_w"),
        "temperature_c": mean("temperature_c"),
        "cpu_percent": mean("cpu_percent"),
        "foreign_cpu_percent": mean("foreign_cpu_percent"),
        "throttle_reasons": sorted(reasons),
        "foreign_processes": max(foreign) if foreign else None,
    }
