"""Say why an execution would be measured again: what differs from the nearest record in the store."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.core.store import Store
from speedproof.measure import records
from speedproof.settings.experiment import read_execution, read_recipe


def main(
    recipe: Annotated[Path, typer.Option(help="what is trained: a resolved recipe.yaml")],
    execution: Annotated[Path, typer.Option(help="how it is run: a complete execution")],
    protocol: Annotated[Path, typer.Option(help="how it is measured")],
    store: Annotated[Path, typer.Option(help="the content-addressed store")] = Path("store"),
    data_mode: Annotated[str, typer.Option(help="real or synthetic")] = "real",
    cold: Annotated[bool, typer.Option("--cold", help="with empty compiler caches")] = False,
) -> None:
    """Say why an execution would be measured again: what differs from the nearest record in the store."""
    measuring = records.measuring_part(files.read_yaml(protocol))
    identity = records.identity_of(read_recipe(recipe), read_execution(execution), measuring, data_mode, cold)
    found = records.nearest(Store(store), identity)
    if found is None:
        print("the store holds no record at all, so it would be measured")
        return
    record, fields = found
    if not fields and (record["status"] in records.PASSING or record["presumed"]):
        print(f"its record says {record['status']} ({record['reason']}): measured again when its rule is run again")
    elif not fields:
        print(f"nothing differs: its record ({record['status']}) would be used")
    for key, (theirs, wanted) in fields.items():
        if key == "source":
            theirs, wanted = f"{str(theirs)[:12]}…", f"{str(wanted)[:12]}… (code that can change a record was edited)"
        print(f"{key}: the nearest record has {theirs}, wanted is {wanted}")


if __name__ == "__main__":
    run(main)
