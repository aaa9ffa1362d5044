"""Readings beside a measurement: energy at window edges, gaps as None with a reason, foreign processes told apart."""

import csv
import sys
import types

import pytest

from speedproof.measure import once, sensors, telemetry
from speedproof.measure.telemetry import Sampler, energy_counter, summary


class Source:
    """Readings from a list, one a second on a clock of their own."""

    columns = ("power_w", "energy_j", "throttle_reasons")
    missing = None

    def __init__(self, rows, energy_source="counter"):
        self.rows, self.energy_source, self.closed = list(rows), energy_source, False

    def read(self, worker):
        return self.rows.pop(0)

    def close(self):
        self.closed = True


def sampled(rows, energy_source="counter"):
    sampler = Sampler(Source([], energy_source))
    sampler.rows = rows
    return sampler


def test_counter_is_read_between_its_readings():
    rows = [{"monotonic_s": float(t), "energy_j": 100.0 * t} for t in range(6)]
    found = sampled(rows).energy([(1.5, 2.5), (2.5, 4.25)])
    assert found == {"energy_j": pytest.approx(275.0), "energy_source": "counter", "energy_reason": None}


def test_power_is_integrated_where_there_is_no_counter():
    rows = [{"monotonic_s": float(t), "power_w": power, "energy_j": None} for t, power in enumerate((0, 100, 100, 300))]
    assert energy_counter(rows) == [(0.0, 0.0), (1.0, 50.0), (2.0, 150.0), (3.0, 350.0)]


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (Sampler(None), "no telemetry"),
        (sampled([], None), None),
        (sampled([{"monotonic_s": 1.0, "energy_j": 5.0}]), "not covered"),
        (sampled([{"monotonic_s": t, "energy_j": 5.0} for t in (1.5, 9.0)]), "not covered"),
        (sampled([{"monotonic_s": t, "energy_j": None} for t in (0.0, 9.0)]), "not covered"),
    ],
)
def test_missing_energy_is_none_and_never_zero(sampler, reason):
    found = sampler.energy([(1.0, 2.0)])
    assert found["energy_j"] is None
    assert reason is None or reason in found["energy_reason"]


def test_table_holds_gaps_as_empty_fields(tmp_path):
    source = Source([{"power_w": 5.5, "energy_j": None, "throttle_reasons": ""}] * 100)
    with Sampler(source, tmp_path / "telemetry.csv", interval_s=0.01) as sampler:
        while len(sampler.rows) < 3:
            pass
    assert source.closed
    rows = list(csv.reader((tmp_path / "telemetry.csv").open()))
    assert rows[0] == ["seconds", "power_w", "energy_j", "throttle_reasons"]
    assert rows[1] == ["0.000", "5.5", "", ""]
    assert len(rows) == 1 + len(sampler.rows)


def test_summary_of_a_window():
    rows = [
        {"power_w": 100.0, "sm_clock_mhz": 1980, "throttle_reasons": "sw_power_cap", "foreign_processes": 0},
        {
            "power_w": 300.0,
            "sm_clock_mhz": 1000,
            "throttle_reasons": "sw_power_cap+hw_slowdown",
            "foreign_processes": 2,
        },
    ]
    found = summary(rows)
    assert found["power_w"] == 200.0
    assert found["sm_clock_mhz"] == 1490
    assert found["throttle_reasons"] == ["hw_slowdown", "sw_power_cap"]
    assert found["foreign_processes"] == 2
    assert summary([])["power_w"] is None
    assert summary([])["foreign_processes"] is None


def test_throttle_bits_by_name():
    assert sensors.throttle_names(0) == ""
    assert sensors.throttle_names(0x4 | 0x40) == "sw_power_cap+hw_thermal_slowdown"


@pytest.fixture
def pynvml(monkeypatch):
    """NVML of a machine whose GPU runs processes 10 (the worker), 11 (its child) and 99."""

    class NVMLError(Exception):
        pass

    def refuse(*arguments):
        raise NVMLError("not supported")

    def by_uuid(name):
        return "handle" if name == "GPU-5f0e" else refuse()

    module = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 5000,
        nvmlDeviceGetPowerUsage=refuse,
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=7),
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=97, memory=40),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 4,
        nvmlDeviceGetClockInfo=lambda handle, which: {1: 1980, 2: 3201}[which],
        nvmlDeviceGetTemperature=lambda handle, which: 55,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [types.SimpleNamespace(pid=p) for p in (10, 11, 99)],
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(sensors, "members", lambda leader: {10: "", 11: ""})
    return module


def test_gpu_is_found_by_uuid_and_a_refused_reading_is_none(pynvml):
    row = sensors.NvmlSource("5f0e").read(10)
    assert row["sm_clock_mhz"] == 1980
    assert row["energy_j"] == 5.0
    assert row["power_w"] is None
    assert row["throttle_reasons"] == "sw_power_cap"
    assert row["memory_used_bytes"] == 7
    assert set(row) == set(sensors.NvmlSource.columns)


def test_foreign_processes_are_not_the_workers_own(pynvml):
    source = sensors.NvmlSource("5f0e")
    assert source.read(10)["foreign_processes"] == 1
    assert source.read(None)["foreign_processes"] is None
    # In a container NVML counts pids of the host: the worker is not among them, and nothing can be said.
    assert source.read(4242)["foreign_processes"] is None


def test_unknown_gpu_means_no_telemetry(pynvml, monkeypatch):
    monkeypatch.setattr(sensors, "gpu", lambda: {"uuid": "other"})
    assert sensors.open_source("cuda") is None


def test_foreign_process_in_a_window_taints_the_record():
    window = {"targets": 10, "updates": 1, "seconds": 1.0, "targets_per_s": 10.0, "edges": [1.0, 2.0]}
    record = {
        "status": "ok",
        "reason": None,
        "flags": [],
        "protocol": {"profile_updates": 0},
        "environment": {"class": {}},
    }
    recipe = types.SimpleNamespace(precision="fp32", model_copy=lambda update: recipe)
    for foreign, status in ((0, "ok"), (None, "ok"), (1, "tainted")):
        sampler = sampled([{"monotonic_s": 1.5, "foreign_processes": foreign}], None)
        found = once._with_result(dict(record, flags=[]), {"windows": [dict(window)]}, sampler, recipe)
        assert found["status"] == status
        assert (found["targets_per_s"] == 10.0) == (status == "ok")


def test_rapl_counts_over_its_wrap(tmp_path):
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    (package / "max_energy_range_uj").write_text("1000000\n")

    def reads(value):
        (package / "energy_uj").write_text(str(value))
        return source.read(None)["energy_j"]

    (package / "energy_uj").write_text("900000")
    source = sensors.HostSource(tmp_path)
    assert source.energy_source == "RAPL package counters"
    start = reads(900000)
    assert reads(950000) - start == pytest.approx(0.05)
    assert reads(50000) - start == pytest.approx(0.15)


def test_host_without_counter_or_psutil_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    source = sensors.HostSource(tmp_path)
    assert source.read(None) == dict.fromkeys(sensors.HostSource.columns)
    assert source.energy_source is None
    assert source.missing == "no readable RAPL counter"


def test_host_tells_the_workers_load_from_others(tmp_path, monkeypatch):
    pytest.importorskip("psutil")
    source = sensors.HostSource(tmp_path)
    times = types.SimpleNamespace
    readings = iter([(0, 0, 0), (100, 60, 20)])

    def reading():
        total, busy, own = next(readings)
        source._own = lambda worker: own
        found = times(idle=total - busy, iowait=0)
        return type("Times", (tuple,), vars(found))((busy, total - busy, 0, 0, 0, 0, 0, 0))

    monkeypatch.setattr(source._psutil, "cpu_times", reading)
    assert source._load(5) == {}
    assert source._load(5) == {"cpu_percent": 60.0, "foreign_cpu_percent": 40.0}


def test_sampler_interval_is_a_second():
    assert telemetry.INTERVAL_S == 1.0
