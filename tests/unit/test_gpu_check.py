"""The GPU check: rows in their order and time, what counts as comparable, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speedproof.core.errors import Preempted, UserError
from speedproof.evidence import gpu_check
from speedproof.evidence.gpu_check import Check
from speedproof.evidence.gpu_rows import FIGURES, ROWS, Row
from speedproof.evidence.published import read_published
from speedproof.measure.environment import python_path
from speedproof.measure.isolate import _born
from speedproof.settings.experiment import changed

ROOT = Path(__file__).resolve().parents[2]
LADDER = "update_ladder_20m."

GPU_CLASS = {"gpu": "NVIDIA H200", "torch": "2.13.0+cu130", "driver": "580.1", "cuda": "13.0", "cudnn": 91400}


def record(rate=100.0, **changes):
    """What a worker's record holds that the table reads."""
    families = {"cross-entropy": {"ms_per_update": 2.0}, "RoPE": {"ms_per_update": 1.0}}
    return {
        "status": "ok",
        "reason": None,
        "precision": "bf16",
        "targets_per_s": rate,
        "memory": {"peak_bytes": 2**30},
        "profile": {"kernels_per_update": 50.0, "ms_per_update": 7.0, "families": families},
        "flags": [],
    } | changes


class Fake(Check):
    """A check on a pretended GPU, where a process takes `cost` seconds of a clock of its own."""

    def __init__(self, out, rows=ROWS, answers=None, minutes=60.0, cost=1.0):
        self.answers, self.cost, self.ran, self.deadlines = answers or {}, cost, [], []
        super().__init__(ROOT, "cuda", minutes, out, rows)

    def _run(self, row, deadline_s, folder):
        Clock.now += self.cost
        self.ran.append(f"{row.preset} {row.title}")
        self.deadlines.append(deadline_s)
        answer = self.answers.get(row.title, record())
        if isinstance(answer, BaseException):
            raise answer
        found = {"gradient_error": 0.01, "passed": 9} if FIGURES[row.figure].step != "measure" else {}
        return found | answer

    def line(self, title, preset="20m"):
        return next(line for line in self.lines if (line["preset"], line["title"]) == (preset, title))


class Clock:
    now = 0.0

    @classmethod
    def monotonic(cls):
        return cls.now


@pytest.fixture(autouse=True)
def _pretend(monkeypatch, tmp_path):
    monkeypatch.setattr("speedproof.measure.device_lock.FOLDER", tmp_path / "locks")
    monkeypatch.setattr("speedproof.measure.device_lock.gpu", lambda: {"uuid": "x"})
    monkeypatch.setattr(gpu_check, "TRAIN_TOKENS", 2**15)
    monkeypatch.setattr(gpu_check, "VALIDATION_TOKENS", 2**12)


@pytest.fixture
def pretend_gpu(monkeypatch):
    monkeypatch.setattr(gpu_check, "environment", lambda device: {"class": GPU_CLASS, "facts": {}})
    monkeypatch.setattr(gpu_check, "time", Clock)


def test_rows_are_whole_and_begin_with_the_most_telling(tmp_path):
    published = read_published(ROOT / "config/published.yaml")["rows"]
    check = Check(ROOT, "cpu", 1, tmp_path)
    for row in ROWS:
        changed(check.final, row.settings | {"device": "cuda"}, row.title).check(gpu_check_recipe(row))
        assert row.published is None or row.published in published
        if row.published and row.preset != "all":
            assert published[row.published].get("preset") == row.preset
    order = [(row.preset, row.figure) for row in ROWS if row.settings or row.preset != "all"]
    assert [row.title for row in ROWS[:2]] == ["original eager 8", "final compiled 32"]
    first = {pair: order.index(pair) for pair in reversed(order)}
    assert first["20m", "rate"] < first["20m", "parity"] < first["20m", "validation"] < first["20m", "kernels"]
    assert first["20m", "kernels"] < first["50m", "rate"] < first["90m", "rate"]
    assert (
        check.final.plain() | {"device": "cuda", "cpu_threads": 8}
        == gpu_check.read_execution(ROOT / "config/executions/gh200-20m.yaml").plain()
    ), "the final row is the published execution"


def gpu_check_recipe(row):
    preset = "20m" if row.preset == "all" else row.preset
    return gpu_check.recipe_for(preset, gpu_check._config(ROOT, "cuda"), ROOT / "config/presets", None)


@pytest.mark.usefixtures("pretend_gpu")
def test_figures_stand_beside_the_published_ones(tmp_path):
    check = Fake(tmp_path, answers={"original eager 8": record(490070.0)})
    assert check.run()
    assert check.line("original eager 8")["ratio"] == pytest.approx(2.0)
    assert check.line("kernels an update, eager 8")["measured"] == 50
    assert check.line("cross-entropy, eager 8")["measured"] == pytest.approx(6.0)
    assert check.line("all kernels, compiled 32, cached")["measured"] == pytest.approx(21.0)
    assert check.line("peak, original eager 8")["measured"] == 1.0
    validation = check.line("full validation, eager, batch 8")
    assert validation["published"] == pytest.approx(197_411_295 / 278.83)
    assert validation["ratio"] == pytest.approx(100 / validation["published"])
    assert check.line("parity, fresh weights", "50m")["ratio"] is None, "an error has no better or worse ratio"
    saved = json.loads((tmp_path / "check.json").read_text())
    assert saved["rows"] == json.loads(json.dumps(check.lines))
    table = (tmp_path / "table.txt").read_text()
    assert "gpu-check on NVIDIA H200; driver 580.1, cuda 13.0" in table
    assert all(row.title in table for row in ROWS)


@pytest.mark.usefixtures("pretend_gpu")
def test_rows_of_one_execution_share_a_process(tmp_path):
    check = Fake(tmp_path)
    check.run()
    assert len(check.ran) == len(set(check.ran)) < len(ROWS)
    assert "20m kernels an update, eager 8" not in check.ran


@pytest.mark.usefixtures("pretend_gpu")
def test_another_precision_is_not_compared(tmp_path):
    check = Fake(tmp_path, rows=ROWS[:2], answers={"original eager 8": record(precision="fp32")})
    check.run()
    assert check.lines[0]["measured"] == 100
    assert [line["ratio"] is None for line in check.lines] == [True, False]


@pytest.mark.usefixtures("pretend_gpu")
def test_a_failing_row_says_why_and_the_check_goes_on(tmp_path):
    broken = {
        "original eager 8": record(None, status="device_oom", reason="CUDA out of memory", profile=None),
        "final compiled 32": OSError("no space"),
        "original compiled 8": record(profile={"reason": "the profiler failed"}),
    }
    check = Fake(tmp_path, answers=broken)
    assert not check.run()
    assert len(check.lines) == len(ROWS)
    assert check.line("original eager 8")["status"] == check.line("peak, original eager 8")["status"] == "device_oom"
    assert check.line("final compiled 32")["reason"] == "OSError: no space"
    assert check.line("original compiled 8")["status"] == "ok"
    assert check.line("kernels an update, compiled 8")["reason"] == "the profiler failed"
    assert check.line("original compiled 16")["status"] == "ok"
    assert "device_oom: CUDA out of memory" in check.table()


@pytest.mark.usefixtures("pretend_gpu")
def test_what_no_longer_fits_is_not_begun(tmp_path):
    rows = tuple(Row(f"row {n}", "rate", "20m", {"microbatch": 2**n}, seconds=s) for n, s in enumerate((40, 40, 60, 5)))
    check = Fake(tmp_path, rows=rows, minutes=2.0, cost=30.0)
    assert not check.run()
    assert [line["status"] for line in check.lines] == ["ok", "ok", "not reached", "ok"]
    left = 120 - gpu_check.RESERVE_S
    assert check.deadlines == [left, left - 30, 5 * gpu_check.PATIENCE]


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Preempted("TERM")])
def test_a_cut_keeps_what_was_measured(stop, tmp_path):
    check = Fake(tmp_path, answers={"final compiled 32": stop})
    with pytest.raises(type(stop)):
        check.run()
    saved = json.loads((tmp_path / "check.json").read_text())
    assert [line["title"] for line in saved["rows"]] == ["original eager 8"]
    assert f"{len(ROWS) - 1} rows to come" in (tmp_path / "table.txt").read_text()
    again = Fake(tmp_path)
    assert again.run(), "the same folder serves the next check"


@pytest.mark.usefixtures("pretend_gpu")
def test_bad_input_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/mine.txt").write_text("keep me")
    with pytest.raises(UserError, match="holds rows of something else"):
        Fake(tmp_path).run()
    assert (tmp_path / "rows/mine.txt").is_file()
    with pytest.raises(UserError, match="--minutes: found 0"):
        Fake(tmp_path, minutes=0.0)
    monkeypatch.setitem(GPU_CLASS, "torch", "2.10.1")
    with pytest.raises(UserError, match=r"torch: found 2\.10\.1; install 2\.11"):
        Fake(tmp_path)


TESTS = """
import time
import pytest
pytestmark = pytest.mark.cuda
def test_a(): pass
def test_b(): pytest.skip("not here")
def test_max_autotune(): pass
@pytest.mark.parametrize("mode", ["default", "max-autotune", "max-autotune-no-cudagraphs"])
def test_mode(mode): assert "autotune" not in mode
"""


@pytest.mark.parametrize(
    ("more", "deadline", "expected"),
    [
        ("", 60, ("ok", 3, None)),
        ("def test_c(): assert False", 60, ("failed", 3, "test_c")),
        ("def test_c(): time.sleep(60)\ndef test_d(): pass", 15, ("timeout", 3, "cut after 4 tests")),
        (
            "def test_c(): import os; os._exit(3)",
            60,
            ("error", 3, "the worker ended with exit code 3 and left no result"),
        ),
        ("import no_such_module", 60, ("failed", 0, "tests/cuda/test_it.py cannot be read")),
    ],
)
def test_tests_are_counted_and_max_autotune_is_left_out(more, deadline, expected, tmp_path, monkeypatch):
    folder = tmp_path / "checkout/tests/cuda"
    folder.mkdir(parents=True)
    (tmp_path / "checkout/pytest.ini").write_text("[pytest]\nmarkers = cuda: needs a GPU\n")
    (folder / "test_it.py").write_text(TESTS + more)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    check = Check(ROOT, "cpu", 1, tmp_path / "out")
    (tmp_path / "out").mkdir()
    found = check._run_step({"step": "tests", "root": str(tmp_path / "checkout")}, deadline, tmp_path / "out")
    assert (found["status"], found["passed"], found["reason"]) == expected, found["log_tail"]


OPTIONAL = ("snakemake", "typer", "rich", "psutil", "scipy", "datasets", "tokenizers", "pynvml", "huggingface_hub")


def test_it_imports_nothing_optional():
    code = (
        f"import sys\nfor name in {OPTIONAL!r}: sys.modules[name] = None\n"
        "import speedproof.evidence.gpu_check\nassert 'torch' not in sys.modules\n"
        "import speedproof.evidence.gpu_steps, speedproof.evidence.parity, speedproof.training.evaluate\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr


SMALL = """
import signal
import sys
from pathlib import Path
from speedproof.evidence import gpu_check
from speedproof.measure import device_lock
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
device_lock.FOLDER = Path(sys.argv[1]) / "locks"
chosen = [int(number) for number in sys.argv[2].split(",")]
gpu_check.Check.__init__.__defaults__ = (tuple(gpu_check.ROWS[n] for n in chosen),)
import runpy
sys.argv[1:] = ["--device", "cpu", "--out", str(Path(sys.argv[1]) / "out")]
runpy.run_path("src/scripts/gpu_check.py", run_name="__main__")
"""


def start(tmp_path, rows):
    """The script on the CPU with some of its rows, on locks and caches of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", SMALL, str(tmp_path), rows],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": python_path(), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_rehearsal_on_the_cpu(tmp_path):
    """Eager timing, eager validation and a figure that no CPU has, by real processes."""
    said, errors = start(tmp_path, "0,6,16").communicate(timeout=240)
    rows = json.loads((tmp_path / "out/check.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["ok", "ok", "skipped"], said + errors
    assert all(row["measured"] > 0 for row in rows[:2])
    assert all(row["ratio"] is None for row in rows), "toy sizes are not compared"
    assert "rehearsal at toy size" in said
    files = {path.name for path in (tmp_path / "out/rows/01-20m-original-eager-8").iterdir()}
    assert {"found.json", "log.txt"} <= files
    assert "request.json" not in files
    assert str(tmp_path) not in (tmp_path / "out/check.json").read_text()


def test_ctrl_c_leaves_no_worker(tmp_path):
    process = start(tmp_path, "0")
    try:
        end = time.monotonic() + 120
        while not (workers := children(process.pid)) and time.monotonic() < end:
            time.sleep(0.05)
        assert workers
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "stopped by Ctrl-C" in errors
    assert not any(_born(pid) for pid in workers)


def children(parent: int) -> list[int]:
    """Workers that `parent` has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                mine = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent
                if mine and b"speedproof.measure.worker" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
