"""A run: what it writes, what its timers leave out, and that stopping and going on changes nothing."""

import itertools
import json
import shutil

import miniature
import pytest
import torch
from safetensors.torch import load_file

from speedproof.core.errors import Preempted, UserError
from speedproof.data.loader import TrainingBatches
from speedproof.data.token_cache import TokenCache
from speedproof.settings.recipe import Recipe
from speedproof.training import session as session_module
from speedproof.training.ledger import window_ends
from speedproof.training.session import Session
from speedproof.training.stopping import Stop, job_end_time
from speedproof.training.update import NonFinite, Updater

EXECUTION = miniature.execution(microbatch=2, evaluation_batch=4)
VARYING = ("seconds", "targets_per_s", "data_wait_s")


def recipe_on(cache: TokenCache, **changes: object) -> Recipe:
    """Three virtual epochs of 7, 8 and 8 blocks: the first ends with an update of three blocks, 2 + 1."""
    model = {"vocab_size": 64, "layers": 1, "width": 16, "heads": 2, "ffn_width": 24, "context_length": 8}
    values = {
        "model": model,
        "data": cache.identity,
        "targets_per_update": 32,
        "budget_targets": 23 * 8 - 3,
        "virtual_epochs": 3,
        "subset_blocks": 5,
        "seed": 3,
        "warmup_fraction": 0.2,
    }
    return miniature.recipe(**(values | changes))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    return TokenCache.synthetic(tmp_path_factory.mktemp("cache"), 64, 300, 100, 0)


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallRanges(TrainingBatches):
        """Shuffles ranges of five blocks, so that even a miniature budget crosses their boundaries."""

        _range_blocks = property(lambda self: 5, lambda self, value: None)

        def take(self, blocks: int):
            rows = super().take(blocks)
            taken.append(rows.copy())
            return rows

    taken.clear()
    monkeypatch.setattr(session_module, "TrainingBatches", SmallRanges)


taken: list = []


def make(cache: TokenCache, scratch, identity=None, recipe=None, **options) -> Session:
    return Session(recipe or recipe_on(cache), EXECUTION, cache, identity or {"repeat": 0}, scratch, **options)


def finished(session: Session, folder):
    """Run, write, and return result, metrics and weights."""
    session.run()
    session.write(folder, {})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "result.json").read_text()), lines, load_file(folder / "weights.safetensors")


def plain(lines: list[dict]) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in VARYING} for line in lines]


def test_a_run_consumes_its_budget_and_says_so(cache, tmp_path):
    result, lines, weights = finished(make(cache, tmp_path / "scratch"), tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "recipe.yaml",
        "execution.yaml",
        "metrics.jsonl",
        "weights.safetensors",
        "result.json",
    }
    assert result["targets"] == 184
    assert result["updates"] == 6
    assert [targets for targets, _ in result["epoch_losses"]] == [56, 120, 184]
    assert result["full_validation_targets"] == 99
    assert result["partial_shapes"] == [[1, 8]]
    assert result["resumed"] is False
    assert [line["targets"] for line in lines if "loss" in line] == [32, 56, 88, 120, 152, 184]
    assert [line["epoch"] for line in lines if "epoch" in line] == [1, 2, 3]
    assert result["session_s"] == result["training_phase_s"] + result["full_validation_s"]
    assert result["process_s"] > result["session_s"]
    assert sum(rows.shape[0] for rows in taken) == 23
    assert "embedding.weight" in weights
    assert sum(weight.numel() for weight in weights.values()) == recipe_on(cache).model.parameters


@pytest.mark.parametrize("questions", [1, 2, 3, 5, 8, 11, 14, 20])
def test_a_stopped_run_ends_in_the_same_bits(cache, tmp_path, questions):
    """It is stopped once at every place where it can be: at updates, in an epoch's and in the full validation."""
    whole, lines, weights = finished(make(cache, tmp_path / "a"), tmp_path / "whole")
    order, scratch = [rows.tolist() for rows in taken], tmp_path / "b"
    taken.clear()
    with pytest.raises(Preempted, match="state saved after"):
        make(cache, scratch, stop=miniature.StopAfter(questions)).run()
    torch.manual_seed(99)  # another process has drawn other numbers
    result, again, resumed = finished(make(cache, scratch), tmp_path / "resumed")
    assert [rows.tolist() for rows in taken] == order
    assert weights.keys() == resumed.keys()
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert plain(again) == plain(lines)
    assert result["resumed"] is True
    for key in ("epoch_losses", "full_validation_loss", "targets", "updates"):
        assert result[key] == whole[key]


def test_stopping_before_every_update_ends_in_the_same_bits(cache, tmp_path):
    _, lines, weights = finished(make(cache, tmp_path / "a"), tmp_path / "whole")
    attempts = 0
    while True:
        attempts += 1
        # Growing patience, since a validation that is stopped begins anew.
        session = make(cache, tmp_path / "b", stop=miniature.StopAfter(2 + attempts // 2))
        try:
            _, again, resumed = finished(session, tmp_path / "resumed")
            break
        except Preempted:
            continue
    assert attempts > 6
    assert plain(again) == plain(lines)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_a_killed_run_goes_on_from_its_last_save(cache, tmp_path, monkeypatch):
    """Nothing is saved after update 4 and the process is gone at update 5, with a line of metrics too many."""
    _, lines, weights = finished(make(cache, tmp_path / "a"), tmp_path / "whole")
    submit, calls = Updater.submit, []

    def dying(self, rows):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return submit(self, rows)

    monkeypatch.setattr(Updater, "submit", dying)
    killed = make(cache, tmp_path / "b", checkpoint_interval_s=0)
    save = killed.save
    killed.save = lambda: save() if len(calls) < 3 else None
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    ahead = len((tmp_path / "b" / "metrics.jsonl").read_bytes())
    monkeypatch.setattr(Updater, "submit", submit)
    resumed_session = make(cache, tmp_path / "b")
    assert resumed_session.updater.updates == 2
    assert len((tmp_path / "b" / "metrics.jsonl").read_bytes()) < ahead
    _, again, resumed = finished(resumed_session, tmp_path / "resumed")
    assert plain(again) == plain(lines)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_saving_all_the_time_changes_nothing(cache, tmp_path):
    _, lines, weights = finished(make(cache, tmp_path / "a"), tmp_path / "whole")
    result, again, saved = finished(make(cache, tmp_path / "b", checkpoint_interval_s=0), tmp_path / "saved")
    assert plain(again) == plain(lines)
    assert all(torch.equal(weights[name], saved[name]) for name in weights)
    assert result["checkpoint_s"] > 0
    assert result["resumed"] is False


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """An update takes 1 s (the first 6), the subset 3 s, a validation 10 s, a save 20 s."""
    clock = Clock()

    def taking(seconds, function):
        def slow(*args, **kwargs):
            clock.now += seconds() if callable(seconds) else seconds
            return function(*args, **kwargs)

        return slow

    first = iter([6.0])
    monkeypatch.setattr(Updater, "submit", taking(lambda: next(first, 1.0), Updater.submit))
    monkeypatch.setattr(session_module, "subset_blocks", taking(3, session_module.subset_blocks))
    monkeypatch.setattr(session_module, "evaluate", taking(10, session_module.evaluate))
    monkeypatch.setattr(session_module.checkpoint, "save", taking(20, session_module.checkpoint.save))
    return clock


def test_rates_hold_training_alone(cache, tmp_path, clock):
    options = {"clock": clock, "process_clock": lambda: clock.now - 93, "waited_s": 2.0}
    result, lines, _ = finished(make(cache, tmp_path / "s", checkpoint_interval_s=25, **options), tmp_path / "run")
    assert result["training_update_s"] == 11  # six updates, the first of 6 s
    assert result["first_window_s"] == 6
    assert result["median_targets_per_s"] == 32
    assert result["aggregate_targets_per_s"] == 184 / 11
    assert result["subset_scan_s"] == 3
    assert result["epoch_validation_s"] == 30
    assert result["checkpoint_s"] == 20
    assert result["training_phase_s"] == 3 + 11 + 30 + 20
    assert result["elapsed_targets_per_s"] == 184 / 64
    assert result["full_validation_s"] == 10
    assert result["session_s"] == 74
    assert result["startup_s"] == 5  # seven seconds of the process, two of them spent waiting
    assert result["waited_for_device_s"] == 2
    assert result["process_s"] == 5 + 74
    assert [line["targets_per_s"] for line in lines if "loss" in line] == [32 / 6, 24, 32, 32, 32, 32]


def test_seconds_add_up_over_the_processes_of_a_resumed_run(cache, tmp_path, clock):
    options = {"clock": clock, "process_clock": lambda: clock.now - born}
    born = clock.now - 5
    with pytest.raises(Preempted):
        make(cache, tmp_path / "s", stop=miniature.StopAfter(2), **options).run()
    born = clock.now - 5
    result, _, _ = finished(make(cache, tmp_path / "s", **options), tmp_path / "run")
    assert result["training_update_s"] == 11
    assert result["epoch_validation_s"] == 30
    assert result["subset_scan_s"] == 6  # drawn again
    assert result["startup_s"] == 10


def test_windows_depend_on_the_recipe_alone_and_end_with_epochs(cache):
    recipe = recipe_on(cache)
    assert window_ends(recipe) == [[4, 7], [11, 15], [19, 23]]
    published = recipe_on(
        cache,
        model=recipe.model.plain() | {"context_length": 1024},
        targets_per_update=32768,
        budget_targets=100_000_000,
        virtual_epochs=10,
    )
    ends = window_ends(published)
    assert [epoch[-1] for epoch in ends] == published.epoch_ends()
    assert {len(epoch) for epoch in ends} == {3}
    flat = [0, *(end for epoch in ends for end in epoch)]
    sizes = [-(-(b - a) // 32) for a, b in itertools.pairwise(flat)]
    assert min(sizes) >= 101
    assert max(sizes) <= 103


def test_a_budget_of_one_window_has_a_rate(cache, tmp_path):
    recipe = recipe_on(cache, budget_targets=32, virtual_epochs=1)
    result, _, _ = finished(make(cache, tmp_path / "s", recipe=recipe), tmp_path / "run")
    assert result["median_targets_per_s"] == result["aggregate_targets_per_s"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"recipe": {"seed": 4, "lr": 0.01}}, "recipe.seed is 3 there and 4 here"),
        ({"recipe": {"seed": 3, "lr": 0.02}}, "recipe.lr is 0.01 there and 0.02 here"),
        ({"execution": {"microbatch": 4}}, "execution.microbatch is 2 there and 4 here"),
        ({"data": "other"}, "data is 'cache' there and 'other' here"),
        ({"source": "new"}, "source is 'old' there and 'new' here"),
    ],
)
def test_another_runs_state_is_refused_by_field(cache, tmp_path, change, named):
    identity = {
        "source": "old",
        "recipe": {"seed": 3, "lr": 0.01},
        "execution": {"microbatch": 2},
        "data": "cache",
        "repeat": 0,
    }
    with pytest.raises(Preempted):
        make(cache, tmp_path, identity, stop=miniature.StopAfter(2)).run()
    with pytest.raises(UserError, match=named):
        make(cache, tmp_path, identity | change)
    assert make(cache, tmp_path, identity).updater.updates == 1


def test_lost_metrics_are_noticed(cache, tmp_path):
    with pytest.raises(Preempted):
        make(cache, tmp_path, stop=miniature.StopAfter(4)).run()
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl: holds 0 bytes"):
        make(cache, tmp_path)


def test_a_nonfinite_update_stops_the_run_and_leaves_its_state(cache, tmp_path, monkeypatch):
    with pytest.raises(Preempted):
        make(cache, tmp_path, stop=miniature.StopAfter(2)).run()
    before = {path: path.read_bytes() for path in tmp_path.glob("state-*/*")}
    session = make(cache, tmp_path)
    with torch.no_grad():
        session.updater.model.embedding.weight[0] = float("nan")
    with pytest.raises(NonFinite, match=f"update {session.updater.updates + 1}: loss"):
        session.run()
    assert {path: path.read_bytes() for path in tmp_path.glob("state-*/*")} == before


def test_other_data_and_too_small_vocabularies_are_refused(cache, tmp_path):
    with pytest.raises(UserError, match=r"^recipe\.data: found other"):
        make(cache, tmp_path, recipe=recipe_on(cache, data="other"))
    small = recipe_on(cache).model.plain() | {"vocab_size": 32}
    with pytest.raises(UserError, match=r"^recipe\.model\.vocab_size: 32"):
        make(cache, tmp_path, recipe=recipe_on(cache, model=small))


def test_the_end_of_the_job_stops_in_time():
    stop = Stop(end_time=1000.0, now=lambda: 900.0)
    assert stop.reason(margin_s=99) is None
    assert stop.reason(margin_s=100) == "the job ends in 100 s"


def test_the_end_time_comes_from_slurm(tmp_path, monkeypatch):
    assert job_end_time({}) is None
    assert job_end_time({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000000"}) == 1_700_000_000
    scontrol = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TZ", "UTC")
    for answer, expected in (("2023-11-14T22:13:20", 1_700_000_000), ("Unknown", None)):
        scontrol.write_text(f'#!/bin/sh\n[ "$*" = "show job 7" ] && echo "   EndTime={answer} Deadline=N/A"\n')
        scontrol.chmod(0o755)
        assert job_end_time({"SLURM_JOB_ID": "7"}) == expected
    shutil.rmtree(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_end_time({"SLURM_JOB_ID": "7"}) is None
