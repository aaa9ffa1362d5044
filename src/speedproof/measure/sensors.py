"""Where readings come from: NVML for a GPU, psutil and RAPL for a CPU; a reading that is not there is None, never 0."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from speedproof.measure.environment import gpu, nvml_handle
from speedproof.measure.isolate import members

Row = dict[str, Any]

THROTTLE_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""NVML's bits of what holds the clocks down."""

HARMFUL = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")


class Source(Protocol):
    """Something that can be read once a second. `missing` says why a whole source or its energy is not there."""

    columns: tuple[str, ...]
    energy_source: str | None
    missing: str | None

    def read(self, worker: int | None) -> Row: ...

    def close(self) -> None: ...


class NvmlSource:
    """A GPU by its UUID. Raises whatever NVML raises where it is not there."""

    columns = (
        "sm_clock_mhz",
        "memory_clock_mhz",
        "power_w",
        "energy_j",
        "memory_used_bytes",
        "gpu_utilisation_percent",
        "memory_utilisation_percent",
        "temperature_c",
        "throttle_reasons",
        "foreign_processes",
    )
    missing: str | None = None

    def __init__(self, uuid: str):
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        try:
            self._handle = nvml_handle(uuid)
        except Exception:
            pynvml.nvmlShutdown()
            raise
        counter = self._try(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        self.energy_source = "NVML energy counter" if counter is not None else "integrated NVML power"

    def read(self, worker: int | None) -> Row:
        n, handle = self._nvml, self._handle
        energy = self._try(n.nvmlDeviceGetTotalEnergyConsumption, handle)
        power = self._try(n.nvmlDeviceGetPowerUsage, handle)
        memory = self._try(n.nvmlDeviceGetMemoryInfo, handle)
        rates = self._try(n.nvmlDeviceGetUtilizationRates, handle)
        asked = getattr(n, "nvmlDeviceGetCurrentClocksEventReasons", n.nvmlDeviceGetCurrentClocksThrottleReasons)
        bits = self._try(asked, handle)
        return {
            "sm_clock_mhz": self._try(n.nvmlDeviceGetClockInfo, handle, n.NVML_CLOCK_SM),
            "memory_clock_mhz": self._try(n.nvmlDeviceGetClockInfo, handle, n.NVML_CLOCK_MEM),
            "power_w": None if power is None else power / 1000,
            "energy_j": None if energy is None else energy / 1000,
            "memory_used_bytes": memory and memory.used,
            "gpu_utilisation_percent": rates and rates.gpu,
            "memory_utilisation_percent": rates and rates.memory,
            "temperature_c": self._try(n.nvmlDeviceGetTemperature, handle, n.NVML_TEMPERATURE_GPU),
            "throttle_reasons": None if bits is None else throttle_names(bits),
            "foreign_processes": self._foreign(worker),
        }

    def _foreign(self, worker: int | None) -> int | None:
        """Processes on the GPU that are not the worker's; None when NVML counts pids of another namespace."""
        running = self._try(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        pids = {process.pid for process in running or ()}
        if worker is None or worker not in pids:
            return None
        others = pids - {worker}
        return len(others - members(worker).keys()) if others else 0

    def _try(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        self._nvml.nvmlShutdown()


class HostSource:
    """The CPU: psutil's figures where it is installed, RAPL's energy where it may be read."""

    columns = (
        "cpu_percent",
        "foreign_cpu_percent",
        "cpu_clock_mhz",
        "memory_used_bytes",
        "temperature_c",
        "energy_j",
    )

    def __init__(self, powercap: Path = Path("/sys/class/powercap")):
        try:
            import psutil
        except ImportError:
            psutil = None
        self._psutil = psutil
        self._last: tuple[float, float, float, int | None] | None = None
        self._packages = [Package(path) for path in sorted(powercap.glob("intel-rapl:?"))]
        readable = bool(self._packages) and all(p.read() is not None for p in self._packages)
        self.energy_source = "RAPL package counters" if readable else None
        self.missing = None if readable else "no readable RAPL counter"
        if not readable:
            self._packages = []

    def read(self, worker: int | None) -> Row:
        row: Row = dict.fromkeys(self.columns)
        if self._packages:
            row["energy_j"] = sum(package.read() or 0.0 for package in self._packages)
        if self._psutil is None:
            return row
        with contextlib.suppress(Exception):
            row["memory_used_bytes"] = self._psutil.virtual_memory().used
            row["cpu_clock_mhz"] = round(self._psutil.cpu_freq().current)
        with contextlib.suppress(Exception):
            row["temperature_c"] = max(
                s.current for group in self._psutil.sensors_temperatures().values() for s in group
            )
        return row | self._load(worker)

    def _load(self, worker: int | None) -> Row:
        """Busy share of all CPUs since the last reading, and the part of it that is not the worker's."""
        times = self._psutil.cpu_times()
        total = sum(times[:8])
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        own = self._own(worker)
        before, self._last = self._last, (total, busy, own, worker)
        if before is None or total <= before[0]:
            return {}
        share = 100 * (busy - before[1]) / (total - before[0])
        if worker is None or before[3] != worker:
            return {"cpu_percent": share}
        mine = 100 * max(0.0, own - before[2]) / (total - before[0])
        return {"cpu_percent": share, "foreign_cpu_percent": max(0.0, share - mine)}

    def _own(self, worker: int | None) -> float:
        used = 0.0
        for pid in members(worker) if worker else ():
            with contextlib.suppress(self._psutil.Error):
                used += sum(self._psutil.Process(pid).cpu_times()[:2])
        return used

    def close(self) -> None:
        pass


class Package:
    """One RAPL package: joules since it was made, over the counter's wrap."""

    def __init__(self, folder: Path):
        self._folder, self._last, self._joules = folder, None, 0.0

    def read(self) -> float | None:
        try:
            now = int((self._folder / "energy_uj").read_text())
            span = int((self._folder / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            return None
        if self._last is not None:
            self._joules += (now - self._last if now >= self._last else now - self._last + span) / 1e6
        self._last = now
        return self._joules


def throttle_names(bits: int) -> str:
    """Names of the set bits, joined by `+`; empty for none."""
    return "+".join(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def open_source(device: str) -> Source | None:
    """What can be read about `device`; None where there is nothing to read from."""
    if device != "cuda":
        return HostSource()
    try:
        return NvmlSource(gpu()["uuid"])
    except Exception:  # no package, no library, no permission: each only means that there is no telemetry
        return None


def memory_used_bytes(device: str) -> int | None:
    """Memory in use on the GPU by anybody; None on CPU and without NVML."""
    source = open_source(device) if device == "cuda" else None
    if source is None:
        return None
    try:
        return source.read(None)["memory_used_bytes"]
    finally:
        source.close()
