"""A compiled run whose epochs end unevenly, stopped and taken up again: the same bits, one compiled shape."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from miniature import StopAfter
from safetensors.torch import load_file

from speedproof.core.errors import Preempted
from speedproof.data.token_cache import TokenCache
from speedproof.training.session import Session

CONTEXT = 16


FAST = {
    "projections": "fused",
    "loss": "chunked",
    "optimizer": "arena",
    "finite_checks": "latched",
    "tokens": "device",
}


@pytest.fixture(params=[{}, FAST], ids=["plain", "fast"])
def session(request, tmp_path, miniature_recipe, miniature_execution, monkeypatch):
    """Makes the session of a compiled run with epochs of 7, 8 and 8 blocks: the first ends with 2 + 1.

    Graphs are traced and not turned into C++, which would take most of a minute.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    cache = TokenCache.synthetic(tmp_path, 61, 24 * CONTEXT, 10 * CONTEXT, 0)
    recipe = miniature_recipe(data=cache.identity, budget_targets=23 * CONTEXT, virtual_epochs=3)
    execution = miniature_execution(compile=True, microbatch=2, **request.param)

    def make(name: str, stop: StopAfter | None = None) -> Session:
        torch._dynamo.reset()  # as a new process would begin
        return Session(recipe, execution, cache, {"repeat": 0}, tmp_path / name, stop=stop)

    return make


def finished(session: Session, folder: Path) -> tuple[dict, list[dict], dict[str, torch.Tensor]]:
    session.run()
    session.write(folder, {})
    timed = ("seconds", "targets_per_s", "data_wait_s")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [{key: value for key, value in line.items() if key not in timed} for line in lines]
    return json.loads((folder / "result.json").read_text()), lines, load_file(folder / "weights.safetensors")


def test_a_stopped_run_ends_in_the_same_bits(session, tmp_path):
    result, lines, weights = finished(session("whole"), tmp_path / "whole-run")
    assert result["partial_shapes"] == [[1, CONTEXT]]
    assert [targets // CONTEXT for targets, _ in result["epoch_losses"]] == [7, 15, 23]
    # The first epoch's uneven last update comes second, so that this stop lies right behind it.
    stopped = session("stopped", StopAfter(4))
    with pytest.raises(Preempted):
        stopped.run()
    assert 0 < stopped.updater.updates < result["updates"]
    again = session("stopped")
    other, other_lines, other_weights = finished(again, tmp_path / "stopped-run")
    assert (other["resumed"], result["resumed"]) == (True, False)
    assert set(again.updater.compiled.shapes) == {(2, CONTEXT)}
    assert other_lines == lines
    assert other["full_validation_loss"] == result["full_validation_loss"]
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
