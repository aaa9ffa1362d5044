"""Whole runs, workers and clocks on a GPU: resume, what a deadline gives back, when a clock is read, what is one."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from miniature import StopAfter

from speedproof.core.errors import Preempted
from speedproof.data.loader import SyntheticBatches, to_device
from speedproof.data.token_cache import TokenCache
from speedproof.evidence.parity import check_parity
from speedproof.measure import records
from speedproof.measure.environment import environment
from speedproof.measure.isolate import run_isolated
from speedproof.settings.experiment import Parity
from speedproof.training.precision import bf16_support
from speedproof.training.session import Session
from speedproof.training.update import Updater, UpdateResult
from speedproof.training.window import run_window

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE, CONTEXT = "cuda", 128
MODEL = {"vocab_size": 512, "layers": 2, "width": 128, "heads": 2, "ffn_width": 256, "context_length": CONTEXT}
CAPTURED = {"optimizer": "arena", "finite_checks": "latched", "capture": "graph"}
VARIANTS = [
    {},
    {"compile": True},
    {"compile": True, "compile_mode": "reduce-overhead", "finite_checks": "merged"},
    {"rope": "uncached"},
    {"projections": "fused"},
    {"projections": "fused", "compile": True},
    {"loss": "chunked"},
    {"loss": "chunked", "compile": True},
    {"loss": "triton"},
    {"loss": "triton", "compile": True},
    {"optimizer": "arena"},
    {"finite_checks": "latched"},
    CAPTURED,
    {"projections": "fused", "loss": "chunked", "optimizer": "arena", "compile": True, "finite_checks": "merged"},
    {"projections": "fused", "loss": "triton", "compile": True, **CAPTURED},
]
"""Execution settings that must not change what is learned; one line for each that is added."""


def named(settings: dict) -> str:
    return "-".join(f"{key}_{value}" for key, value in settings.items()) or "plain"


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture
def recipe(miniature_recipe):
    """Makes recipes in BF16 with four blocks an update."""
    if not bf16_support(DEVICE)[0]:
        pytest.skip(f"needs BF16: {bf16_support(DEVICE)[1]}")

    def make(**changed):
        common = {"model": MODEL, "precision": "bf16", "targets_per_update": 4 * CONTEXT}
        return miniature_recipe(**{**common, "budget_targets": 40 * CONTEXT, **changed})

    return make


@pytest.mark.parametrize(
    "settings", [{}, {"compile_mode": "reduce-overhead"}, {"tokens": "device", **CAPTURED}], ids=named
)
def test_a_compiled_run_with_uneven_epochs_is_taken_up_again(settings, tmp_path, recipe, miniature_execution):
    cache = TokenCache.synthetic(tmp_path, 512, 24 * CONTEXT, 10 * CONTEXT, 0)
    wanted = recipe(data=cache.identity, budget_targets=23 * CONTEXT, virtual_epochs=3)
    execution = miniature_execution(device="cuda", compile=True, microbatch=2, **settings)

    def make(name, stop=None):
        torch._dynamo.reset()
        return Session(wanted, execution, cache, {"repeat": 0}, tmp_path / name, stop=stop)

    whole, stopped = make("whole"), make("stopped", StopAfter(4))
    whole.run()
    with pytest.raises(Preempted):
        stopped.run()
    again = make("stopped")
    again.run()
    a, b = whole.result(), again.result()
    assert (a["resumed"], b["resumed"]) == (False, True)
    assert a["partial_shapes"] == b["partial_shapes"] == [[1, CONTEXT]]
    assert set(again.updater.compiled.shapes) == {(2, CONTEXT)}
    assert (a["targets"], a["updates"]) == (b["targets"], b["updates"])
    assert [t for t, _ in a["epoch_losses"]] == [t for t, _ in b["epoch_losses"]]
    # Kernels with atomic sums need not repeat to the last bit.
    assert a["full_validation_loss"] == pytest.approx(b["full_validation_loss"], abs=1e-3)
    for name, weight in whole.updater.model.state_dict().items():
        other = again.updater.model.state_dict()[name]
        assert (weight - other).norm() <= 0.01 * weight.norm(), name


@pytest.mark.parametrize("settings", VARIANTS, ids=named)
def test_every_setting_keeps_losses_and_gradients(settings, tmp_path, recipe, miniature_execution):
    cache = TokenCache.synthetic(tmp_path, 512, 8 * CONTEXT, 10 * CONTEXT, 0)
    execution = miniature_execution(device="cuda", microbatch=2, **settings)
    tolerances = Parity(blocks=4, loss_tolerance_nats=1e-3, gradient_tolerance=0.05, arm="none")
    found = check_parity(recipe(data=cache.identity), execution, None, cache, tolerances)
    assert found["holds"], found["reason"]


@pytest.mark.parametrize("settings", [*(v for v in VARIANTS if "compile" not in v), VARIANTS[-1]], ids=named)
def test_state_is_canonical_whatever_the_settings(settings, recipe, miniature_execution):
    plain = Updater(recipe(), miniature_execution(device="cuda", microbatch=2), DEVICE)
    fast = Updater(recipe(), miniature_execution(device="cuda", microbatch=2, **settings), DEVICE)
    rows = SyntheticBatches(recipe(), 1).take(4)
    for updater in (plain, fast):
        updater.step(rows)
    wanted, found = plain.state_dict(), fast.state_dict()
    for part in ("model", "moments"):
        assert {n: t.shape for n, t in found[part].items()} == {n: t.shape for n, t in wanted[part].items()}
    plain.load_state_dict(found)
    for part in ("model", "moments"):
        assert all(torch.equal(plain.state_dict()[part][name], tensor) for name, tensor in found[part].items())


HOLD = "import time, torch; x = torch.ones(2**29, device='cuda'); torch.cuda.synchronize(); print('held', flush=True); "


def test_a_deadline_gives_the_memory_back(tmp_path):
    """A worker that holds 2 GiB, with a grandchild in a session of its own that holds as much, and hangs."""
    inner = HOLD + "time.sleep(600)"
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True); "
    torch.zeros(1, device=DEVICE)
    before = torch.cuda.mem_get_info()[0]
    ended = run_isolated([sys.executable, "-c", outer + inner], 30, tmp_path / "log")
    assert ended.timed_out
    assert (tmp_path / "log").read_text().count("held") == 2
    # A new process asks, and by then the driver has cleared up after those that are gone.
    ask = "import torch; print(torch.cuda.mem_get_info()[0])"
    after = int(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout)
    assert after > before - 2**30


def test_the_clock_is_read_when_the_device_has_nothing_left_to_do():
    class Busy:
        """Updates that leave work behind on the device."""

        device = torch.device(DEVICE)

        def submit(self, rows):
            torch.cuda._sleep(10**8)
            return [UpdateResult(loss_sum=1.0, targets=4, grad_norm=1.0)]

        def finish(self):
            return []

    class OneRow:
        def take(self, blocks):
            return None

    idle = []

    def clock():
        idle.append(torch.cuda.current_stream().query())
        return float(len(idle))

    torch.cuda._sleep(10**8)
    run_window(Busy(), OneRow(), [4, 4, 4], clock)
    assert idle[0], "work from before the window is none of its own"
    assert idle[-1], "work of the window belongs to it"
    assert not all(idle), "in between the host does not wait"


def test_rows_on_the_device_are_the_hosts(recipe):
    rows = np.random.default_rng(1).integers(0, 65536, (5, 33), dtype=np.uint16)
    valid = np.array([32, 32, 7, 32, 1])
    for there, here in zip(to_device(rows, valid, DEVICE), to_device(rows, valid, "cpu"), strict=True):
        assert there.dtype == torch.int64
        assert torch.equal(there.cpu(), here)


def test_identity_of_a_measurement_holds_the_gpu_and_no_fact_of_one_job(recipe, miniature_execution):
    protocol = {
        "warmup_updates": 1,
        "windows": 1,
        "updates_per_window": 1,
        "min_window_seconds": 0.0,
        "profile_updates": 0,
    }
    measuring = records.measuring_part(protocol | {"deadline_s": 60})
    identity = records.identity_of(recipe(), miniature_execution(device="cuda"), measuring, "synthetic", False)
    facts = environment(DEVICE)["facts"]
    assert identity["class"]["gpu"] == torch.cuda.get_device_name(0)
    assert identity["class"]["cudnn"] == torch.backends.cudnn.version()
    text = str(identity)
    assert facts["gpu_uuid"] not in text
    assert facts["hostname"] not in text
