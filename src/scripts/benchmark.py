"""Measure one execution of a recipe in a fresh process, or take its record from the store."""

from pathlib import Path
from typing import Annotated, Any

import typer

from speedproof.core import files
from speedproof.core.errors import UserError, run
from speedproof.core.store import Store
from speedproof.measure import records
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import changed, read_execution, read_recipe

PUBLISHED_PROTOCOL = {
    "warmup_updates": 20,
    "windows": 3,
    "updates_per_window": 100,
    "min_window_seconds": 0.0,
    "profile_updates": 0,
    "deadline_s": 1800,
}
"""As the GH200 report measured; --protocol replaces it."""

NO_READINGS = "seconds\n"


def main(
    recipe: Annotated[Path, typer.Option(help="what is trained: a resolved recipe.yaml")],
    output: Annotated[Path, typer.Option(help="the record to write")],
    execution: Annotated[Path | None, typer.Option(help="how it is run: a complete execution")] = None,
    changes: Annotated[str, typer.Option("--set", help="settings to change in --execution: '{microbatch: 8}'")] = "{}",
    plan: Annotated[Path | None, typer.Option(help="a tuning stage's plan, in the place of --execution")] = None,
    slot: Annotated[int | None, typer.Option(min=0, help="which of the plan's places, counted from 0")] = None,
    protocol: Annotated[
        Path | None, typer.Option(help="how it is measured; 20 warm-up updates and 3 windows of 100 when left out")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="manifest of the token cache; needed for real data")] = None,
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
    data_mode: Annotated[str, typer.Option(help="real, or synthetic: one batch kept on the device")] = "real",
    profile: Annotated[bool, typer.Option("--profile", help="trace 3 updates after the timing")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="start with empty compiler caches")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="measure even where the store holds a record")] = False,
    telemetry: Annotated[Path | None, typer.Option(help="copy the table of readings here (CSV)")] = None,
    trace: Annotated[Path | None, typer.Option(help="copy the Chrome trace here (.json.gz)")] = None,
) -> None:
    """Measure one execution of a recipe in a fresh process, or take its record from the store.

    A candidate that runs out of memory, does not compile or takes too long is a finding: it is written as a record
    with that status, and the exit code is 0. Records that timed out or were tainted are measured again.
    """
    name, chosen, empty = _choose(output, execution, changes, plan, slot)
    if chosen is None:
        files.write_json(output, records.skipped(empty) | {"name": name})
        if telemetry:
            files.write_text(telemetry, NO_READINGS)
        print(f"skipped: {empty}")
        return
    measuring = records.measuring_part(files.read_yaml(protocol) if protocol else PUBLISHED_PROTOCOL)
    if profile and not measuring["profile_updates"]:
        measuring = measuring | {"profile_updates": 3}
    place = Store(store)
    record = records.measure(
        read_recipe(recipe),
        chosen,
        measuring,
        store=place,
        cache_manifest=cache,
        mode=data_mode,
        cold=cold,
        reuse=not fresh,
        remeasure=True,
    )
    folder = records.attachments(place, record)
    for source, target in ((records.TELEMETRY_FILE, telemetry), (records.TRACE_FILE, trace)):
        if target is None:
            continue
        if (folder / source).is_file():
            files.place(folder / source, target)
        elif target is telemetry:
            files.write_text(telemetry, NO_READINGS)  # a table without rows, so that a rule can promise one
            print(f"{target}: empty, {record['energy_reason']}")
        else:
            print(f"{target}: not written, the record has no {source}")
    files.write_json(output, record | {"name": name})
    print(f"{name}: {_line(record)}")


def _choose(
    output: Path, execution: Path | None, changes: str, plan: Path | None, slot: int | None
) -> tuple[str | None, Execution | None, str]:
    """Name and execution to measure; None with the reason for an unused place of a plan."""
    if (execution is None) == (plan is None):
        raise UserError("execution: give either --execution, or --plan with --slot")
    if execution is not None:
        settings = files.parse_yaml(changes, "set")
        return (output if settings else execution).stem, changed(read_execution(execution), settings, "set"), ""
    slots = files.read_json(plan, "slots")["slots"]
    if slot is None or slot >= len(slots):
        raise UserError(f"slot: found {slot}; {plan} has the places 0 to {len(slots) - 1}")
    entry: dict[str, Any] = slots[slot]
    if "skipped" in entry:
        return None, None, entry["skipped"]
    return entry["name"], Execution.parse(entry["execution"], f"{plan}: slots.{slot}.execution"), ""


def _line(record: dict[str, Any]) -> str:
    """One line for a person."""
    if record["status"] != "ok":
        return f"{record['status']}: {record['reason']}"
    peak = record["memory"]["peak_bytes"] or record["memory"]["setup_bytes"]
    parts = [f"{record['targets_per_s']:,.0f} targets/s", f"first update {record['warmup']['first_update_s']:.1f} s"]
    parts += [f"peak {peak / 2**30:.2f} GiB"] if peak else []
    parts += [f"MFU {record['mfu']:.1%}"] if record["mfu"] else []
    return ", ".join([*parts, *record["flags"]])


if __name__ == "__main__":
    run(main)
