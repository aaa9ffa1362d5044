"""Resume states are whole or absent, and a damaged one is refused in a sentence."""

import json
import resource
from pathlib import Path

import pytest
import torch

from speedproof.core.errors import UserError
from speedproof.training import checkpoint
from speedproof.training.checkpoint import COUNTERS, TENSORS, State, load, save, save_weights

RUN = {"recipe": {"seed": 1}, "repeat": 0}


def state(value: float) -> State:
    return State({"model.a": torch.full((1000,), value), "moments.a.exp_avg": torch.ones(3)}, {"cursor": int(value)})


def value_in(folder: Path) -> float:
    found = load(folder, RUN)
    assert found is not None
    assert found.counters["cursor"] == found.tensors["model.a"][0]
    return found.counters["cursor"]


def test_nothing_saved_is_none(tmp_path):
    assert load(tmp_path / "absent", RUN) is None


def test_the_newest_state_counts_and_the_older_goes(tmp_path):
    for value in range(12):
        save(tmp_path, RUN, state(value))
    assert value_in(tmp_path) == 11
    assert [path.name for path in tmp_path.iterdir()] == ["state-11"]


def test_floats_and_bits_come_back(tmp_path):
    tensors = {"model.a": torch.tensor([float("nan"), -0.0, 1e-45]), "random.cpu": torch.get_rng_state()}
    save(tmp_path, RUN, State(tensors, {"seconds": 0.1 + 0.2}))
    found = load(tmp_path, RUN)
    assert found.counters == {"seconds": 0.1 + 0.2}
    assert all(torch.equal(found.tensors[k].view(torch.uint8), t.view(torch.uint8)) for k, t in tensors.items())


def test_tensors_that_share_memory_are_saved_as_their_own(tmp_path):
    whole = torch.arange(6.0)
    save(tmp_path, RUN, State({"a": whole[:3], "b": whole[3:], "c": whole.view(2, 3).T}, {}))
    found = load(tmp_path, RUN).tensors
    assert found["b"].tolist() == [3, 4, 5]
    assert found["c"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("limit", [0, 1, 100, 3000])
def test_a_full_disk_leaves_the_state_before(tmp_path, limit):
    """The kernel refuses to write past byte `limit` of a file, as a quota does."""
    save(tmp_path, RUN, state(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(UserError, match=r"state-1: cannot be written .*the state before it is whole \(state-0\)"):
            save(tmp_path, RUN, state(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["state-0"]
    assert value_in(tmp_path) == 1
    save(tmp_path, RUN, state(3))
    assert value_in(tmp_path) == 3


def test_weights_are_as_readable_as_any_new_file(tmp_path):
    save_weights(tmp_path / "weights.safetensors", state(1).tensors)
    (tmp_path / "plain").touch()
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_full_disk_leaves_no_weights(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(UserError, match=r"weights\.safetensors: cannot be written"):
            save_weights(tmp_path / "weights.safetensors", state(1).tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["_write", "os.rename", "shutil.rmtree"])
def test_a_death_at_any_step_leaves_a_whole_state(tmp_path, monkeypatch, step):
    save(tmp_path, RUN, state(1))

    def die(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # Nothing is cleaned up by a process that is killed.
        patch.setattr(checkpoint.shutil, "rmtree", die if step == "shutil.rmtree" else lambda *a, **k: None)
        if step != "shutil.rmtree":
            patch.setattr(f"speedproof.training.checkpoint.{step}", die)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, RUN, state(2))
    assert value_in(tmp_path) == (2 if step == "shutil.rmtree" else 1)
    save(tmp_path, RUN, state(3))
    assert value_in(tmp_path) == 3
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", [TENSORS, COUNTERS])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_damaged_state_is_refused(tmp_path, name, damage):
    save(tmp_path, RUN, state(1))
    path = tmp_path / "state-0" / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[data.index(b'"cursor": ') + 10 if name == COUNTERS else len(data) // 2] ^= 1  # cursor 1 becomes 0
    path.write_bytes({"cut": data[:-7], "flip": data}.get(damage, b""))
    if damage == "gone":
        path.unlink()
    with pytest.raises(UserError, match=rf"{name}: this resume state is damaged.* delete .* to start this run again"):
        load(tmp_path, RUN)


def test_another_run_is_refused_by_field(tmp_path):
    save(tmp_path, RUN, state(1))
    with pytest.raises(UserError, match=r"recipe\.seed is 1 there and 2 here; repeat is 0 there and 5 here; delete"):
        load(tmp_path, {"recipe": {"seed": 2}, "repeat": 5})


def test_the_random_state_comes_back(tmp_path):
    cpu = torch.device("cpu")
    saved = checkpoint.random_state(cpu)
    drawn = torch.rand(4)
    checkpoint.set_random_state(saved, cpu)
    assert torch.equal(torch.rand(4), drawn)


def test_counters_are_plain_json(tmp_path):
    save(tmp_path, RUN, state(1))
    assert json.loads((tmp_path / "state-0" / COUNTERS).read_text())["identity"] == RUN
