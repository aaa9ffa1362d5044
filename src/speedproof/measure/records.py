"""Records: one measurement of one recipe, execution and protocol in one fresh process, reused while it is true."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.identity import PACKAGE, digest, source_digest, source_files
from speedproof.core.store import Store
from speedproof.measure.device_lock import device_lock
from speedproof.measure.environment import environment
from speedproof.measure.once import LOG_FILE, SCHEMA, TELEMETRY_FILE, check_data, empty_record, measure_once
from speedproof.measure.trace import OPERATORS_FILE, TRACE_FILE
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import Protocol
from speedproof.settings.recipe import Recipe

KIND = "records"
RECORD_FILE = "record.json"

STATUSES = (
    "ok",
    "memory_limit",
    "device_oom",
    "host_oom",
    "timeout",
    "compile_error",
    "unsupported_kernel",
    "nonfinite",
    "recompile_in_window",
    "tainted",
    "skipped",
    "error",
)
PASSING = ("timeout", "tainted", "error")
"""Findings that another try may change; the others are as true the next time."""

KILLED_ATTEMPTS = 2
"""After so many attempts that were killed without a word, the next one records that instead of being killed too."""


def measure(
    recipe: Recipe,
    execution: Execution,
    protocol: Protocol | dict[str, Any],
    *,
    store: Store,
    cache_manifest: Path | None,
    mode: str = "real",
    cold: bool = False,
    reuse: bool = True,
    remeasure: bool = False,
) -> dict[str, Any]:
    """The record of an execution: from the store while it is true, else measured now in a fresh process.

    `cache_manifest` is the token cache's manifest, needed in `real` mode; `synthetic` mode keeps one batch on the
    device. `cold` gives the worker empty compiler caches. `remeasure` measures again what timed out, was tainted or
    failed by an unknown error. What the worker left (log, telemetry, trace) lies in `attachments`.

    Raises: UserError where the input is wrong; a finding about the execution is no error but a status.
    """
    execution.check(recipe)
    check_data(recipe, mode, cache_manifest)
    measuring = measuring_part(protocol)
    identity = identity_of(recipe, execution, measuring, mode, cold)
    with contextlib.ExitStack() as held:
        if reuse and (found := _stored(store, identity, remeasure)):
            return found | {"protocol": measuring}
        held.enter_context(store.lock(KIND, identity))
        if reuse and (found := _stored(store, identity, remeasure)):
            return found | {"protocol": measuring}
        keep_sources(store)
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="speedproof-record-")))
        with _attempt(store, identity) as killed:
            if killed >= KILLED_ATTEMPTS:
                record = _killed_record(recipe, execution, measuring, mode, cold, killed)
            else:
                waited = held.enter_context(device_lock(execution.device))
                record = measure_once(
                    recipe,
                    execution,
                    measuring,
                    store=store,
                    cache_manifest=cache_manifest,
                    mode=mode,
                    cold=cold,
                    folder=folder,
                )
                record["waited_for_device_s"] = waited
                if killed:
                    record["flags"].append("an earlier attempt was killed")
        record["identity"] = digest(identity)
        files.write_json(folder / RECORD_FILE, record)
        store.replace(KIND, identity)
        with store.publish(KIND, identity) as entry:
            for path in sorted(folder.iterdir()):
                if path.name in (RECORD_FILE, LOG_FILE, TELEMETRY_FILE, TRACE_FILE, OPERATORS_FILE):
                    shutil.copyfile(path, entry / path.name)
    return record


def measuring_part(protocol: Protocol | dict[str, Any]) -> dict[str, Any]:
    """The part of a protocol that decides what a record holds. Raises UserError naming a wrong key."""
    if isinstance(protocol, Protocol):
        return protocol.measuring()
    # The deciding part has no bearing here, but a whole protocol checks every key and type.
    decisions = {"stage_blocks": 0, "blocks": 3, "retention": 1.05, "no_regression": 0.98}
    whole = decisions | protocol if isinstance(protocol, dict) else protocol
    return Protocol.parse(whole, "protocol").measuring()


def identity_of(
    recipe: Recipe, execution: Execution, measuring: dict[str, Any], mode: str, cold: bool
) -> dict[str, Any]:
    """What must agree for a record to be used again. The deadline is not in it: no finished record depends on it."""
    return {
        "source": source_digest("measure"),
        "recipe": recipe.plain(),
        "execution": execution.plain(),
        "protocol": {key: value for key, value in measuring.items() if key != "deadline_s"},
        "mode": mode,
        "cold": cold,
        "class": environment(execution.device)["class"],
    }


def attachments(store: Store, record: dict[str, Any]) -> Path:
    """Folder of the log, the telemetry table, the trace and the operator table of a record from `measure`."""
    return store.root / KIND / record["identity"][:2] / record["identity"]


def keep_sources(store: Store, kind: str = "measure") -> None:
    """Keep one copy of the source behind this digest, so that an old record can still be understood."""
    identity = {"kind": kind, "digest": source_digest(kind)}
    if store.find("sources", identity) is None:
        with store.publish("sources", identity) as entry:
            for path in source_files(kind):
                target = entry / path.relative_to(PACKAGE)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)  # a link would change with the file


def _stored(store: Store, identity: dict[str, Any], remeasure: bool) -> dict[str, Any] | None:
    entry = store.find(KIND, identity)
    if entry is None:
        return None
    record = files.read_json(entry / RECORD_FILE)
    passing = record["status"] in PASSING or record["presumed"]
    return None if remeasure and passing else record


@contextlib.contextmanager
def _attempt(store: Store, identity: dict[str, Any]) -> Iterator[int]:
    """Yield how many attempts before this one were killed hard: each leaves its mark only when it had no end."""
    mark = store.scratch(KIND, identity) / "attempts.json"
    killed = files.read_json(mark)["begun"] if mark.is_file() else 0
    files.write_json(mark, {"begun": killed + 1})
    try:
        yield killed
    finally:
        mark.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            mark.parent.rmdir()


def _killed_record(
    recipe: Recipe, execution: Execution, measuring: dict[str, Any], mode: str, cold: bool, killed: int
) -> dict[str, Any]:
    return empty_record(recipe, execution, measuring, mode, cold) | {
        "status": "host_oom",
        "reason": f"{killed} attempts were killed with their job and left no word, as a memory limit does; "
        "give the job more memory and run the rule again",
        "presumed": True,
        "environment": environment(execution.device),
    }


def skipped(reason: str) -> dict[str, Any]:
    """The record of a place that no candidate fills."""
    return {"schema": SCHEMA, "status": "skipped", "reason": reason, "targets_per_s": None, "flags": []}


def nearest(store: Store, identity: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]] | None:
    """The stored record that differs in the fewest fields of its identity, with those fields (theirs, wanted)."""
    found = store.nearest(KIND, identity)
    return (files.read_json(found[0] / RECORD_FILE), found[1]) if found else None
