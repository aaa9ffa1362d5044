"""Beside other implementations: each settled execution against its peer in fresh blocks, with the peer's parity."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedproof.core.store import Store
from speedproof.data.token_cache import TokenCache
from speedproof.evidence import statistics
from speedproof.evidence.parity import stored_parity
from speedproof.measure.comparison import compare
from speedproof.model.attention import UnsupportedBackend
from speedproof.model.peers import TRANSFORMERS, require_transformers
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import Parity, Protocol
from speedproof.settings.recipe import Recipe
from speedproof.training.compile import CompileError

WORDS = {"retain": "faster", "reject": "slower", "inconclusive": "inconclusive"}
"""What a verdict on the threshold 1 says of the native execution."""

Progress = Callable[[int, int, str], None]


def compare_peers(
    executions: dict[str, Execution],
    recipe: Recipe,
    protocol: Protocol | dict[str, Any],
    parity: Parity,
    blocks: int,
    *,
    store: Store,
    cache_manifest: Path,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """A row for each of `executions` by name: its rate, its peer's, their ratio, and the peer's parity.

    A is the peer and B the native execution, so a ratio above 1 says that the native one is faster. Executions that
    are equal share a row. Raises: UserError where transformers is missing or the input is wrong.
    """
    require_transformers()
    rows = []
    for execution in dict.fromkeys(executions.values()):
        execution.check(recipe)
        peer = execution.peer("transformers")
        comparison = compare(
            peer, execution, recipe, protocol, blocks, store=store, cache_manifest=cache_manifest, progress=progress
        )
        names = [name for name, value in executions.items() if value == execution]
        check = _parity(peer, recipe, parity, store, cache_manifest)
        rows.append({"name": " and ".join(names), **row(comparison), "parity": check})
    return {"implementation": "transformers", "version": TRANSFORMERS, "preset": recipe.preset, "rows": rows}


def row(comparison: dict[str, Any]) -> dict[str, Any]:
    """Rates of both in targets/s, ratio with interval, and whether the native execution is faster."""
    peer_rate, rate = statistics.mean_rates(comparison)
    found = statistics.judge(comparison, 1.0)
    return {
        "targets_per_s": rate,
        "peer_targets_per_s": peer_rate,
        "ratio": found["ratio"],
        "low": found["low"],
        "high": found["high"],
        "blocks": found["blocks"],
        "smallest_effect": found["smallest_effect"],
        "verdict": WORDS[found["verdict"]],
        "reason": comparison["reason"],
        "execution": comparison["b"],
        "peer_execution": comparison["a"],
        "environment": comparison["environment"],
    }


def _parity(peer: Execution, recipe: Recipe, settings: Parity, store: Store, cache_manifest: Path) -> dict[str, Any]:
    """The peer's check on fresh weights; one that cannot run does not hold, with what stopped it as the reason."""
    try:
        return stored_parity(recipe, peer, None, TokenCache.open(cache_manifest, store), settings, store)
    except (CompileError, UnsupportedBackend, RuntimeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        return {"holds": False, "reason": reason, "execution": peer.plain()}


def describe(entry: dict[str, Any]) -> str:
    """A row in one line."""
    if entry["ratio"] is None:
        return f"{entry['name']}: not compared ({entry['reason']})"
    interval = f" [{entry['low']:.2f}, {entry['high']:.2f}]" if entry["low"] is not None else " (one block)"
    holds = "parity of the peer holds" if entry["parity"]["holds"] else f"the peer fails: {entry['parity']['reason']}"
    return (
        f"{entry['name']}: {entry['targets_per_s']:,.0f} against {entry['peer_targets_per_s']:,.0f} targets/s, "
        f"{entry['ratio']:.2f}x{interval}, {entry['verdict']}; {holds}"
    )
