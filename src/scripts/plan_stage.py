"""Name the candidates of a tuning stage, or the finalists, from the records of the stages before."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import run
from speedproof.evidence.stages import stage_named
from speedproof.evidence.tuner import Tuner, finalists, stage_pair
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import Tuning, read_recipe


def main(
    stage: Annotated[str, typer.Option(help="name of the stage, or `finalists` after the last one")],
    default: Annotated[Path, typer.Option(help="the default execution")],
    tuning: Annotated[Path, typer.Option(help="the config's tuning section")],
    deciding: Annotated[Path, typer.Option(help="the protocol's retention and stage_blocks")],
    recipe: Annotated[Path, typer.Option(help="the resolved recipe that the records were measured on")],
    output: Annotated[Path, typer.Option(help="the plan to write")],
    records: Annotated[list[Path] | None, typer.Argument(help="records of all slots of the stages before")] = None,
    comparison: Annotated[list[Path] | None, typer.Option(help="blocks of an earlier stage's pair; repeatable")] = None,
    pair: Annotated[bool, typer.Option(help="write the two executions that this stage's blocks compare")] = False,
) -> None:
    """Plan a stage. The same records always give the same bytes."""
    protocol = files.read_yaml(deciding)
    tuner = Tuner(
        Execution.parse(files.read_yaml(default), "execution"),
        Tuning.parse(files.read_yaml(tuning), "tuning"),
        read_recipe(recipe),
        [files.read_json(path) for path in records or []],
        retention=protocol["retention"],
        stage_blocks=protocol["stage_blocks"],
        comparisons=[files.read_json(path) for path in comparison or []],
    )
    if stage == "finalists":
        value = finalists(tuner)
        print(f"{len(value['selected'])} executions ran; to confirm: {value['recommended_name']}; {value['why']}")
    elif pair:
        value = stage_pair(tuner, stage)
        print(f"{stage}: {value['default_name']} against {value['recommended_name']}")
    else:
        value = tuner.run(until=stage_named(stage).name).plan(stage).plain()
        for slot in value["slots"]:
            print(f"{stage}: {slot.get('name') or 'empty, ' + slot['skipped']}")
    files.write_json(output, value)


if __name__ == "__main__":
    run(main)
