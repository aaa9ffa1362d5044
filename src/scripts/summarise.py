"""Write the summary of an experiment: JSON, Markdown, CSV tables and figures; print the verdicts."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import UserError, run

PUBLISHED = Path(__file__).resolve().parents[2] / "config" / "published.yaml"


def main(
    experiment: Annotated[str, typer.Option(help="name of the experiment")],
    results: Annotated[Path, typer.Option(help="its results folder")],
    output: Annotated[Path, typer.Option(help="summary.json to write")],
    markdown: Annotated[Path, typer.Option(help="summary.md to write")],
    tables: Annotated[Path, typer.Option(help="folder for the CSV tables")],
    figures: Annotated[Path, typer.Option(help="folder for the figures, SVG and PNG")],
    preset: Annotated[list[str] | None, typer.Option(help="a preset to include; without it all in the folder")] = None,
    extra: Annotated[list[str] | None, typer.Option(help="name=path of a further JSON result")] = None,
    published: Annotated[Path, typer.Option(help="the figures published by others")] = PUBLISHED,
) -> None:
    """Write the summary of an experiment: JSON, Markdown, CSV tables and figures; print the verdicts."""
    from speedproof.evidence import plots, programme_tables
    from speedproof.evidence import tables as rendering
    from speedproof.evidence.published import read_published
    from speedproof.evidence.summary import learning_curves, summarise

    further = {}
    for entry in extra or []:
        name, separator, path = entry.partition("=")
        if not (name and separator and path):
            raise UserError(f"--extra: found {entry!r}; expected name=path")
        further[name] = files.read_json(Path(path))
    summary = summarise(experiment, results, preset, read_published(published), further)
    files.write_json(output, summary)
    files.write_text(markdown, rendering.markdown(summary))
    for name, frame in rendering.frames(summary).items():
        files.write_text(tables / f"{name}.csv", frame.to_csv(index=False))
    device = summary["device"]["name"]
    for name, tuning in summary["tuning"].items():
        chart = plots.ladder(rendering.ladder_rows(tuning), f"Throughput ladder, {name}", device)
        plots.save(chart, figures / f"ladder-{name}")
    for name, bars in programme_tables.ladders(summary).items():
        plots.save(plots.ladder(bars, f"Update ladder, {name}", device), figures / f"programme-ladder-{name}")
    for name, matched in summary["matched"].items():
        points = learning_curves(results, name, matched)
        chart = plots.learning_curves(
            points, matched["reference"], f"Learning curves of the matched arms, {name}", device
        )
        plots.save(chart, figures / f"learning-curves-{name}")
        sessions = [{"arm": arm, "phases": matched["arms"][arm]["phases_s"]} for arm in matched["order"]]
        plots.save(plots.waterfall(sessions, f"Session waterfall, {name}", device), figures / f"waterfall-{name}")
    print(rendering.verdict_table(summary))
    print(*(f"\n- {line}" for line in rendering.notes(summary)), sep="")
    print(f"\nsummary: {markdown}\nfigures: {figures}")


if __name__ == "__main__":
    run(main)
