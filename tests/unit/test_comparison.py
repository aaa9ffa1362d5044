"""Blocks are A B B A and B A A B in turn, a spoilt one is repeated once, and rates keep their places."""

import itertools

import pytest
from test_records import EXECUTION, PROTOCOL, RECIPE

from speedproof.core.store import Store
from speedproof.measure import comparison, device_lock
from speedproof.measure.comparison import compare, run_blocks, settled
from speedproof.settings.execution import Execution

A = EXECUTION
B = Execution.parse(EXECUTION.plain() | {"microbatch": 4})


def record(rate, status="ok"):
    return dict.fromkeys(comparison.KEPT) | {"status": status, "targets_per_s": rate if status == "ok" else None}


def counting(spoilt=()):
    """Processes numbered from 1, which is also their rate; those in `spoilt` are tainted."""
    numbers = itertools.count(1)
    ran = []

    def run_one(execution):
        number = next(numbers)
        ran.append("A" if execution == A else "B")
        return record(float(number), "tainted" if number in spoilt else "ok")

    return run_one, ran


def test_order_alternates_and_rates_keep_their_places():
    run_one, ran = counting()
    found = settled(run_blocks(A, B, 3, run_one), 3)
    assert "".join(ran) == "ABBABAABABBA"
    assert found["blocks"] == [[1, 2, 3, 4], [6, 5, 8, 7], [9, 10, 11, 12]]
    assert found["orders"] == ["ABBA", "BAAB", "ABBA"]
    assert found["status"] == "ok"


def test_linear_drift_cancels_in_every_order():
    clock = itertools.count()

    def drifting(execution):
        return record((1.0 if execution == A else 1.1) * 1000 - next(clock))

    for (a1, b1, b2, a2), order in zip(
        settled(run_blocks(A, A, 2, drifting), 2)["blocks"], comparison.ORDERS, strict=True
    ):
        assert a1 + a2 == b1 + b2, order


def test_spoilt_block_is_repeated_once_and_both_are_reported():
    run_one, ran = counting(spoilt={2})
    details = run_blocks(A, B, 2, run_one)
    assert "".join(ran) == "ABABBABAAB"
    assert [(d["block"], d["attempt"], d["valid"]) for d in details] == [(1, 1, False), (1, 2, True), (2, 1, True)]
    found = settled(details, 2)
    assert found["status"] == "ok"
    assert found["repeated_blocks"] == 1
    assert found["details"][0]["processes"][1]["status"] == "tainted"


def test_block_spoilt_twice_leaves_the_comparison_incomplete():
    run_one, _ = counting(spoilt={1, 2})
    found = settled(run_blocks(A, B, 2, run_one), 2)
    assert found["status"] == "incomplete"
    assert found["reason"] == "1 of 2 blocks are valid (tainted)"
    assert found["blocks"] == [[4, 3, 6, 5]]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """`compare` with fake processes; the list of those that ran."""
    monkeypatch.setattr(device_lock, "FOLDER", tmp_path / "locks")
    ran = []

    def measure_once(recipe, execution, measuring, **options):
        assert measuring["profile_updates"] == 0
        ran.append(execution)
        return record(1000.0 + len(ran))

    monkeypatch.setattr(comparison, "measure_once", measure_once)
    return ran


def test_comparison_never_uses_records_but_is_kept_itself(tmp_path, measured):
    options = {"store": Store(tmp_path / "store"), "cache_manifest": None, "mode": "synthetic"}
    first = compare(A, B, RECIPE, PROTOCOL | {"profile_updates": 3}, 2, **options)
    assert len(measured) == 8
    assert (first["a"], first["b"]) == (A.plain(), B.plain())
    assert not first["control"]
    assert compare(A, B, RECIPE, PROTOCOL, 2, **options) == first
    assert len(measured) == 8
    compare(A, B, RECIPE, PROTOCOL, 3, **options)
    assert len(measured) == 20


def test_control_is_marked_and_belongs_to_its_node(tmp_path, measured, monkeypatch):
    options = {"store": Store(tmp_path / "store"), "cache_manifest": None, "mode": "synthetic"}
    assert compare(A, A, RECIPE, PROTOCOL, 1, **options)["control"]
    monkeypatch.setattr("speedproof.measure.environment.socket.gethostname", lambda: "another-node")
    compare(A, A, RECIPE, PROTOCOL, 1, **options)
    assert len(measured) == 8
    compare(A, B, RECIPE, PROTOCOL, 1, **options)
    ledger = comparison.controls(options["store"])
    assert sorted(c["environment"]["facts"]["hostname"] for c in ledger)[0] == "another-node"
    assert len(ledger) == 2
