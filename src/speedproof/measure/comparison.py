"""A comparison: blocks of four fresh processes, A B B A and B A A B in turn, on one device in one go.

Linear drift of the machine cancels within a block. Here the blocks are run and kept; what they prove is decided from
the rates, elsewhere.
"""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.identity import digest, source_digest
from speedproof.core.store import Store
from speedproof.measure.device_lock import device_lock
from speedproof.measure.environment import environment
from speedproof.measure.once import check_data, measure_once
from speedproof.measure.records import keep_sources, measuring_part
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import Protocol
from speedproof.settings.recipe import Recipe

KIND = "comparisons"
SCHEMA = 1
COMPARISON_FILE = "comparison.json"

ORDERS = ("ABBA", "BAAB")
"""Odd blocks and even blocks."""

ATTEMPTS = 2
"""A block with a failed or tainted process is repeated once."""

KEPT = ("status", "reason", "targets_per_s", "flags", "startup_s", "warmup", "memory", "compiler_cache", "log_tail")


def compare(
    a: Execution,
    b: Execution,
    recipe: Recipe,
    protocol: Protocol | dict[str, Any],
    blocks: int,
    *,
    store: Store,
    cache_manifest: Path | None,
    mode: str = "real",
    reuse: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Run `blocks` blocks of A (the incumbent) and B (the challenger) with fresh workers, and keep their rates.

    The number of blocks is fixed before the first one. Single records are never used. A comparison that was run before
    on this class of machine comes from the store; one that did not end well is run again. A equal to B is a control:
    its ratio is the noise of the node, so the node belongs to its identity. `progress` is told processes done, of how
    many, and what the last one gave.

    Returns: see `settled`. Raises: UserError where the input is wrong.
    """
    for execution in (a, b):
        execution.check(recipe)
    check_data(recipe, mode, cache_manifest)
    # A profiler changes what is timed after it in the same node's caches, and nobody reads it here.
    measuring = measuring_part(protocol) | {"profile_updates": 0}
    machine = environment(a.device)
    identity = {
        "source": source_digest("measure"),
        "recipe": recipe.plain(),
        "a": a.plain(),
        "b": b.plain(),
        "protocol": {key: value for key, value in measuring.items() if key != "deadline_s"},
        "blocks": blocks,
        "mode": mode,
        "class": machine["class"],
        "node": machine["facts"]["hostname"] if a == b else None,
    }
    with store.lock(KIND, identity), contextlib.ExitStack() as held:
        if reuse and (entry := store.find(KIND, identity)):
            found = files.read_json(entry / COMPARISON_FILE)
            if found["status"] == "ok":
                return found
        keep_sources(store)
        waited = held.enter_context(device_lock(a.device))

        def run_one(execution: Execution) -> dict[str, Any]:
            with tempfile.TemporaryDirectory(prefix="speedproof-compare-") as folder:
                return measure_once(
                    recipe,
                    execution,
                    measuring,
                    store=store,
                    cache_manifest=cache_manifest,
                    mode=mode,
                    cold=False,
                    folder=Path(folder),
                )

        details = run_blocks(a, b, blocks, run_one, progress)
        value = settled(details, blocks) | {
            "schema": SCHEMA,
            "identity": digest(identity),
            "a": a.plain(),
            "b": b.plain(),
            "control": a == b,
            "recipe": recipe.plain(),
            "protocol": measuring,
            "mode": mode,
            "source": identity["source"],
            "environment": machine,
            "waited_for_device_s": waited,
        }
        store.replace(KIND, identity)
        with store.publish(KIND, identity) as entry:
            files.write_json(entry / COMPARISON_FILE, value)
    return value


def run_blocks(
    a: Execution,
    b: Execution,
    blocks: int,
    run_one: Callable[[Execution], dict[str, Any]],
    progress: Callable[[int, int, str], None] | None = None,
) -> list[dict[str, Any]]:
    """Run the blocks in order, each with its processes in the order they ran; a spoilt one once more."""
    details: list[dict[str, Any]] = []
    done = 0
    for number in range(1, blocks + 1):
        order = ORDERS[(number - 1) % 2]
        for attempt in range(1, ATTEMPTS + 1):
            processes = []
            for arm in order:
                record = run_one(a if arm == "A" else b)
                processes.append({"arm": arm} | {key: record[key] for key in KEPT})
                done += 1
                if progress:
                    rate = record["targets_per_s"]
                    said = f"{rate:,.0f} targets/s" if rate else f"{record['status']}, {record['reason']}"
                    progress(done, 4 * blocks, f"block {number} {arm}: {said}")
                if record["status"] != "ok":
                    break  # the block is spoilt, so what is left of it would be wasted
            valid = len(processes) == len(order) and all(p["status"] == "ok" for p in processes)
            details.append(
                {"block": number, "attempt": attempt, "order": order, "valid": valid, "processes": processes}
            )
            if valid:
                break
    return details


def settled(details: list[dict[str, Any]], blocks: int) -> dict[str, Any]:
    """`blocks`: rates [a1, b1, b2, a2] in targets/s of each valid block, `orders` theirs, `details` all processes.

    `status` is `ok` when every block has a valid attempt, else `incomplete` with the reason.
    """
    valid = [block for block in details if block["valid"]]
    rates = []
    for block in valid:
        by_arm = {arm: [p["targets_per_s"] for p in block["processes"] if p["arm"] == arm] for arm in "AB"}
        (a1, a2), (b1, b2) = by_arm["A"], by_arm["B"]
        rates.append([a1, b1, b2, a2])
    spoilt = sorted({p["status"] for block in details if not block["valid"] for p in block["processes"]} - {"ok"})
    complete = len(valid) == blocks
    return {
        "status": "ok" if complete else "incomplete",
        "reason": None if complete else f"{len(valid)} of {blocks} blocks are valid ({', '.join(spoilt)})",
        "blocks": rates,
        "orders": [block["order"] for block in valid],
        "asked_blocks": blocks,
        "repeated_blocks": sum(block["attempt"] > 1 for block in details),
        "details": details,
    }


def controls(store: Store) -> list[dict[str, Any]]:
    """The ledger of noise: every control in the store, whose environment names node and driver."""
    found = [files.read_json(path) for path in sorted((store.root / KIND).glob(f"*/*/{COMPARISON_FILE}"))]
    return [comparison for comparison in found if comparison["control"]]
