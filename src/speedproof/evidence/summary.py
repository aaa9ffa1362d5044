"""One summary of an experiment: every verdict with its figures, and every published figure beside the measured one."""

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.identity import SOURCES, canonical, differences, source_digest
from speedproof.evidence import published
from speedproof.evidence.allocation import allocation
from speedproof.settings.recipe import Recipe

SCHEMA_VERSION = 1
SCHEMA = Path(__file__).with_name("summary.schema.json")

VERDICTS = {"retain": "retained", "reject": "rejected", "inconclusive": "inconclusive"}


def summarise(
    experiment: str,
    results: Path,
    presets: list[str] | None,
    figures: dict[str, Any],
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The summary of what lies under `results`, checked against its schema.

    `presets` None means every folder with a recipe.yaml; `figures` are the published ones; `extra` are further results
    by name, kept as they are. Parts that an experiment leaves out are absent; a file that is there must be whole.
    Raises UserError naming the folder or file that is missing, malformed or of another preset.
    """
    names = presets or sorted(path.parent.name for path in results.glob("*/recipe.yaml"))
    if not names:
        raise UserError(f"{results}: holds no preset's recipe.yaml; run `snakemake all` first")
    recipes = {name: _recipe(results / name / "recipe.yaml", name) for name in names}
    machines = _machines(results, names)
    derivatives, programme = results / "parity" / "derivatives.json", results / "programme" / "programme.json"
    summary: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "experiment": experiment,
        "device": _device(machines),
        "environment": {
            "class": machines[0]["class"],
            "facts": machines[0]["facts"],
            "hosts": sorted({m["facts"].get("hostname") or "unknown" for m in machines}),
            "differing": sorted({key for m in machines for key in differences(machines[0]["class"], m["class"])}),
        },
        "presets": {name: _preset(recipe) for name, recipe in recipes.items()},
        "tuning": _each(results, names, "tuning/tuning.json"),
        "matched": _each(results, names, "matched/matched.json"),
        "parity": {name: _parity(results / name / "parity") for name in names},
        "finalist_parity": _each(results, names, "tuning/finalist_parity.json"),
        "derivatives": files.read_json(derivatives) if derivatives.is_file() else None,
        "programme": files.read_json(programme) if programme.is_file() else None,
        "allocation": allocation({job for m in machines for job in m["jobs"]}),
        "peers": _each(results, names, "peers/peers.json"),
        "extra": extra or {},
        "provenance": _provenance(results),
    }
    summary["published"] = published.compare(figures, summary)
    summary["published_source"] = " ".join(figures["source"].split())
    summary["verdicts"] = [row for name in names for row in _verdicts(name, summary)]
    validate(summary)
    return summary


def validate(summary: dict[str, Any]) -> None:
    """Raise UserError naming the first key of `summary` that does not fit summary.schema.json."""
    import jsonschema

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    first = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(summary))
    if first is not None:
        key = ".".join(map(str, first.absolute_path)) or "summary"
        raise UserError(f"summary: {key} does not fit {SCHEMA.name} ({first.message[:300]}); mend what wrote it")


def learning_curves(results: Path, preset: str, matched: dict[str, Any]) -> list[dict[str, Any]]:
    """Loss over targets of each arm's first run: {"arm", "targets", "loss_nats", "kind"} a point of its metrics."""
    points, seen = [], set()
    for row in matched["runs"]:
        if row["arm"] in seen:
            continue
        seen.add(row["arm"])
        path = results / preset / "matched" / "runs" / f"{row['arm']}-seed{row['seed']}-repeat{row['repeat']}"
        for line in _lines(path / "metrics.jsonl"):
            kind, key = ("validation", "validation_loss") if "validation_loss" in line else ("training", "loss")
            points.append({"arm": row["arm"], "targets": line["targets"], "loss_nats": line[key], "kind": kind})
    return points


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; train the run again") from None
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            raise UserError(f"{path}: line {number} is not valid JSON; train the run again") from None


def _recipe(path: Path, preset: str) -> Recipe:
    recipe = Recipe.parse(files.read_yaml(path), str(path))
    if recipe.preset != preset:
        raise UserError(
            f"{path}: is the recipe of preset {recipe.preset}, its folder says {preset}; run its rule again"
        )
    return recipe


def _preset(recipe: Recipe) -> dict[str, Any]:
    return {
        "parameters": recipe.model.parameters,
        "total_targets": recipe.total_targets,
        "training_flops_per_target": recipe.model.training_flops_per_target,
        "recipe": recipe.plain(),
    }


def _each(results: Path, names: list[str], path: str) -> dict[str, Any]:
    return {name: files.read_json(results / name / path) for name in names if (results / name / path).is_file()}


def _parity(folder: Path) -> dict[str, Any]:
    kinds = ("trained", "fresh")
    return {kind: files.read_json(folder / f"{kind}.json") for kind in kinds if (folder / f"{kind}.json").is_file()}


def _machines(results: Path, names: list[str]) -> list[dict[str, Any]]:
    """Every distinct machine that a result was made on, the one with most results first, with the jobs that ran there.

    A machine is its class and its host; `facts` are those of its first result.
    """
    patterns = [f"{n}/{p}" for n in names for p in ("matched/runs/*/result.json", "parity/*.json", "tuning/**/*.json")]
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for path in sorted(p for pattern in (*patterns, "programme/*/*.json") for p in results.glob(pattern)):
        value = files.read_json(path)
        machine = value.get("environment") if isinstance(value, dict) else None
        if machine:
            facts = machine.get("facts") or {}
            new = {"class": machine["class"], "facts": facts, "jobs": set()}
            key = canonical([machine["class"], facts.get("hostname")])
            count, kept = found.get(key, (0, new))
            kept["jobs"] |= {facts["job"]} if facts.get("job") else set()
            found[key] = (count + 1, kept)
    if not found:
        raise UserError(f"{results}: no result says what machine it was made on; run `snakemake all` first")
    return [machine for _, machine in sorted(found.values(), key=lambda entry: -entry[0])]


def _device(machines: list[dict[str, Any]]) -> dict[str, Any]:
    machine = machines[0]["class"]
    return {"kind": machine["device"], "name": published.device_name(machine)}


def _provenance(results: Path) -> dict[str, Any]:
    caches = {}
    for path in sorted(results.glob("data/*/token_cache.json")):
        value = files.read_json(path)
        caches[path.parent.name] = {
            "identity": value["identity"],
            "vocab_size": value["vocab_size"],
            "train_tokens": value["train"]["tokens"],
            "validation_tokens": value["validation"]["tokens"],
        }
    return {
        "token_caches": caches,
        "source_digests": {kind: source_digest(kind) for kind in SOURCES},
        "versions": {"speedproof": _version("speedproof"), "torch": _version("torch"), "numpy": _version("numpy")},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _verdicts(preset: str, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """A row an arm; where nothing was trained, a row for the default and one for the recommended execution."""
    tuning, matched = summary["tuning"].get(preset), summary["matched"].get(preset)
    finalists = summary["finalist_parity"].get(preset)
    checks = [*summary["parity"][preset].values()]
    checks += [*finalists["checks"], finalists["recommended"]] if finalists else []
    rows = []
    for name in matched["order"] if matched else []:
        arm = matched["arms"][name]
        rows.append(
            _verdict(preset, name, arm["execution"], tuning, checks)
            | {
                "source": "matched run",
                "targets_per_s": arm["targets_per_s"],
                "speedup_steady": arm["speedup_steady"],
                "speedup_session": arm["speedup_session"],
                "loss_difference_nats": arm["loss_difference_nats"],
                "reference": name == matched["reference"],
            }
        )
    if tuning and not matched:
        default = tuning["default"]["targets_per_s"]
        for name in ("default", "recommended"):
            entry = tuning[name]
            rate = entry["targets_per_s"]
            rows.append(
                _verdict(preset, name, entry["execution"], tuning, checks)
                | {
                    "source": "single records",
                    "targets_per_s": rate,
                    "speedup_steady": rate / default if rate and default else None,
                    "speedup_session": None,
                    "loss_difference_nats": None,
                    "reference": name == "default",
                }
            )
    return rows


def _verdict(
    preset: str, arm: str, execution: dict[str, Any], tuning: dict[str, Any] | None, checks: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the confirmation and the parity checks say of exactly this execution; None where they say nothing."""
    row: dict[str, Any] = {"preset": preset, "arm": arm, "verdict": None, "ratio": None, "low": None, "high": None}
    if tuning:
        confirmed = tuning["confirmation"]
        challenger = next((r["execution"] for r in tuning["rows"] if r["name"] == confirmed["name"]), None)
        if execution == challenger and not confirmed["control"]:
            row |= {key: confirmed.get(key) for key in ("ratio", "low", "high")}
            row["verdict"] = VERDICTS[confirmed["verdict"]]
        elif execution == tuning["default"]["execution"]:
            row["verdict"] = "default"
    check = next((check for check in checks if check["execution"] == execution), None)
    row["parity_holds"] = None if check is None else check["holds"]
    row["gradient_error"] = None if check is None else check.get("gradient_error")
    return row
