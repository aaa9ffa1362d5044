# Names and wiring that every rule file shares; checks the config before anything runs.
import json
import os
import sys
from pathlib import Path
from shlex import quote

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT / "src"))

from speedproof.core.errors import UserError
from speedproof.core.files import sha256
from speedproof.core.identity import source_digest
from speedproof.evidence import arms, stages
from speedproof.settings.experiment import Experiment, load_preset, recipe_for, typed
from snakemake.exceptions import WorkflowError
from snakemake.utils import update_config

# The interpreter that runs this very process runs the scripts too, on whichever node that is, and the package is
# the one beside this Snakefile, wherever an older install may point.
SEARCH_PATHS = {
    "PATH": [os.path.dirname(sys.executable), os.environ.get("PATH", "")],
    "PYTHONPATH": [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")],
}
EXPORTS = " ".join(f"{name}={quote(':'.join(filter(None, parts)))}" for name, parts in SEARCH_PATHS.items())
shell.prefix(f"set -euo pipefail; export {EXPORTS} PYTHONUNBUFFERED=1; ".replace("{", "{{").replace("}", "}}"))


def check_programme(experiment):
    """Every execution of the programme runs its preset's recipe."""
    executions = experiment.programme.executions(experiment.execution)
    for name, execution in executions.items():
        kind, key, *_ = name.split("/")
        preset = getattr(experiment.programme, kind)[key].preset
        try:
            execution.check(recipe_for(preset, experiment, ROOT / "config/presets", None))
        except UserError as error:
            raise UserError(f"programme.{kind}.{key}: {error}") from None


def checked_experiment():
    """The validated config, with every preset read and every execution checked against it."""
    try:
        update_config(config, typed(workflow.config_settings.config))
        experiment = Experiment.parse(config)
        for preset in experiment.presets:
            recipe = recipe_for(preset, experiment, ROOT / "config/presets", None)
            experiment.execution.check(recipe)
            stages.check(experiment.tuning, recipe)
            if preset in experiment.matched.presets:
                arms.check_settings(experiment.matched.arms, experiment.execution, recipe)
        check_programme(experiment)
        return experiment
    except UserError as error:
        raise WorkflowError(str(error)) from None


EXPERIMENT = checked_experiment()
STORE = os.path.expanduser(EXPERIMENT.store)
RESULTS = f"results/{EXPERIMENT.experiment}"
LOGS = f"logs/{EXPERIMENT.experiment}"
SETTINGS = f"{RESULTS}/settings"
PRESET = f"{RESULTS}/{{preset}}"
STAGES = stages.stage_names(EXPERIMENT.tuning, EXPERIMENT.execution)
SLOTS = {stage: stages.slots(stage, EXPERIMENT.tuning, EXPERIMENT.execution) for stage in STAGES}
PROGRAMME = f"{RESULTS}/programme"
RECORD = f"{PRESET}/tuning/{{stage}}/slot{{slot}}.json"
RUN = f"{PRESET}/matched/runs/{{arm}}-seed{{seed}}-repeat{{repeat}}"
VOCABULARIES = {
    preset: load_preset(preset, EXPERIMENT, ROOT / "config/presets")[0].vocab_size for preset in EXPERIMENT.presets
}

SECTIONS = {
    "data": EXPERIMENT.data.plain(),
    "tokenizer": EXPERIMENT.tokenizer.plain(),
    "execution": EXPERIMENT.execution.plain(),
    "measuring": EXPERIMENT.protocol.measuring(),
    "deciding": EXPERIMENT.protocol.deciding(),
    "tuning": EXPERIMENT.tuning.plain(),
    "arms": {name: arm.plain() for name, arm in EXPERIMENT.matched.arms.items()},
    "parity": EXPERIMENT.parity.plain(),
    "programme": EXPERIMENT.programme.plain(),
}


wildcard_constraints:
    preset="|".join(EXPERIMENT.presets),
    section="|".join(SECTIONS),
    tokenizer=r"[A-Za-z0-9._-]+",
    split="train|validation",
    index=r"\d+",
    stage="|".join(STAGES),
    slot=r"\d+",
    arm="|".join(EXPERIMENT.matched.arms),
    seed=r"\d+",
    repeat=r"\d+",
    state="fresh|trained",
    row="|".join(EXPERIMENT.programme.rows) or "none",
    pair="|".join(EXPERIMENT.programme.pairs) or "none",


def section(wildcards):
    """The slice of the config that a settings file holds."""
    return SECTIONS[wildcards.section]


def recipe_settings(wildcards):
    """The preset's recipe before it is resolved: model sizes and settings, as plain values."""
    return recipe_for(wildcards.preset, EXPERIMENT, ROOT / "config/presets", None).plain()


def tokenizer_name(preset):
    """Folder of the preset's token cache: one a vocabulary when the tokenizer is trained, else one for all."""
    source = EXPERIMENT.tokenizer.source
    return f"bpe-{VOCABULARIES[preset]}" if source == "train" else source


def token_cache(wildcards):
    """Manifest of the preset's token cache."""
    return f"{RESULTS}/data/{tokenizer_name(wildcards.preset)}/token_cache.json"


def token_caches():
    """Manifests of all token caches of the experiment."""
    return sorted({f"{RESULTS}/data/{tokenizer_name(preset)}/token_cache.json" for preset in EXPERIMENT.presets})


def vocabulary(wildcards):
    """Entries of the tokenizer that is made or fetched under this name."""
    return next(VOCABULARIES[p] for p in EXPERIMENT.presets if tokenizer_name(p) == wildcards.tokenizer)


def per_preset(path):
    """`path` below each preset's results."""
    return expand(f"{PRESET}/{path}", preset=EXPERIMENT.presets)


def per_matched_preset(path):
    """`path` below the results of each preset that is trained."""
    return expand(f"{PRESET}/{path}", preset=EXPERIMENT.matched.presets)


def job(minutes, mem_mb, partition=None, **device):
    """Resources of a job, from config; what is null is left out and becomes no flag of sbatch.

    QOS and reservation belong to `slurm.partition`; a job sent to another `partition` goes without.
    """
    slurm = EXPERIMENT.slurm
    wanted = {
        "runtime": minutes,
        "mem_mb": mem_mb,
        "slurm_account": slurm.account,
        "slurm_partition": partition or slurm.partition,
        "qos": None if partition else slurm.qos,
        "slurm_extra": f"--reservation={slurm.reservation}" if slurm.reservation and not partition else None,
        **device,
    }
    return {key: value for key, value in wanted.items() if value is not None}


def measuring_job(minutes):
    """Resources of a job that holds the device."""
    slurm = EXPERIMENT.slurm
    return job(
        minutes,
        slurm.mem_mb,
        constraint=slurm.constraint,
        gpu=slurm.gpus or None,
        gpu_model=slurm.gpu_type if slurm.gpus else None,
    )


def data_job():
    """Resources of a job that needs no device; killed for memory, its next attempt gets more."""
    slurm = EXPERIMENT.slurm
    return job(slurm.data_minutes, data_memory, slurm.data_partition)


def data_memory(wildcards, attempt):
    """Memory in MB of a job that prepares data."""
    return attempt * EXPERIMENT.slurm.data_mem_mb


def fetch_job():
    """Resources of the job that needs the network, where a partition has one; else it is no job of the scheduler."""
    slurm = EXPERIMENT.slurm
    return job(slurm.data_minutes, slurm.data_mem_mb, slurm.fetch_partition)


def shard_manifests(wildcards):
    """One shard a C4 file, training files first."""
    counts = {
        "train": EXPERIMENT.data.train_files,
        "validation": EXPERIMENT.data.validation_files,
    }
    return [
        f"{RESULTS}/data/{wildcards.tokenizer}/shards/{split}-{index:05d}.json"
        for split, count in counts.items()
        for index in range(count)
    ]


def records_of(stage_names):
    """Records of these stages' slots."""
    return [f"{PRESET}/tuning/{stage}/slot{slot}.json" for stage in stage_names for slot in range(SLOTS[stage])]


def comparisons_of(stage_names):
    """Blocks of these stages' challengers against their incumbents; none where single records decide."""
    names = stage_names if EXPERIMENT.protocol.stage_blocks else []
    return [f"{PRESET}/tuning/{stage}/comparison.json" for stage in names]


def earlier_stages(wildcards):
    """The stages before this one."""
    return STAGES[: STAGES.index(wildcards.stage)]


def earlier_records(wildcards):
    """Records of the stages before this one, on which its candidates depend."""
    return expand(records_of(earlier_stages(wildcards)), preset=wildcards.preset)


def records_so_far(wildcards):
    """Records of the stages up to this one, on which its challenger depends."""
    return expand(records_of([*earlier_stages(wildcards), wildcards.stage]), preset=wildcards.preset)


def earlier_comparisons(wildcards):
    """Comparisons of the stages before this one, on which its incumbent depends."""
    return expand(comparisons_of(earlier_stages(wildcards)), preset=wildcards.preset)


def comparison_options(wildcards, input):
    """The options that name those comparisons."""
    return " ".join(f"--comparison {path}" for path in input.get("comparisons", []))


def runs_of(path):
    """`path` below every matched run of a preset."""
    matched = EXPERIMENT.matched
    return expand(
        f"{RUN}/{path}",
        arm=list(matched.arms),
        seed=matched.seeds,
        repeat=range(matched.repeats),
        allow_missing=True,
    )


def arm_bases(wildcards):
    """The tuner's executions that arms start from; arms that start from the default need no tuning."""
    bases = sorted({arm.base for arm in EXPERIMENT.matched.arms.values()} - {"default"})
    return {base: f"{RESULTS}/{wildcards.preset}/tuning/{base}.yaml" for base in bases}


def base_options(wildcards, input):
    """The options that name those executions."""
    return " ".join(f"--{base} {input[base]}" for base in ("selected", "recommended") if input.get(base))


def parity_results():
    """Every parity check of the experiment."""
    return [
        *per_preset("parity/fresh.json"),
        *per_matched_preset("parity/trained.json"),
        f"{RESULTS}/parity/derivatives.json",
    ]


def parity_inputs(wildcards):
    """Fresh weights are checked in the recommended execution, trained ones in the execution of their arm."""
    folder = f"{RESULTS}/{wildcards.preset}"
    if wildcards.state == "fresh":
        return {"execution": f"{folder}/tuning/recommended.yaml"}
    arm = EXPERIMENT.parity.arm
    run = f"{folder}/matched/runs/{arm}-seed{EXPERIMENT.matched.seeds[0]}-repeat0"
    return {
        "execution": f"{folder}/matched/arms/{arm}.yaml",
        "weights": f"{run}/weights.safetensors",
    }


def measured_peers(wildcards):
    """Content of the comparisons with peers that there are: `all` makes none, but the summary shows them."""
    found = [Path(path) for path in per_preset("peers/peers.json")]
    return {path.parts[-3]: sha256(path) for path in found if path.is_file()}


def export_inputs(wildcards):
    """The trained weights that parity checks, with the recipe and the tokenizer of their run."""
    folder = f"{RESULTS}/{wildcards.preset}"
    run = f"{folder}/matched/runs/{EXPERIMENT.parity.arm}-seed{EXPERIMENT.matched.seeds[0]}-repeat0"
    tokenizer = Path(token_cache(wildcards)).parent
    return {
        "recipe": f"{run}/recipe.yaml",
        "weights": f"{run}/weights.safetensors",
        "tokenizer": tokenizer / "tokenizer.json",
        "manifest": tokenizer / "tokenizer_manifest.json",
    }


def weights_option(wildcards, input):
    """The option that names trained weights; none for a fresh model."""
    return f"--weights {input.weights}" if input.get("weights") else ""


def results_folder(wildcards, output):
    """The experiment's folder, where the summary lies."""
    return Path(output.summary).parent


def recipe_of_row(wildcards):
    """Recipe of the preset that a row of the programme measures."""
    return f"{RESULTS}/{EXPERIMENT.programme.rows[wildcards.row].preset}/recipe.yaml"


def cache_of_row(wildcards):
    """Manifest of that preset's token cache."""
    preset = EXPERIMENT.programme.rows[wildcards.row].preset
    return f"{RESULTS}/data/{tokenizer_name(preset)}/token_cache.json"


def settings_of_row(wildcards):
    """What a row changes of the experiment's execution."""
    return json.dumps(EXPERIMENT.programme.rows[wildcards.row].set)


def row_options(wildcards):
    """Options of a row that is measured otherwise than a candidate of the tuner."""
    row = EXPERIMENT.programme.rows[wildcards.row]
    options = {
        "--data-mode synthetic": row.synthetic,
        "--cold": row.cold,
        "--profile": row.profile,
    }
    return " ".join(option for option, wanted in options.items() if wanted)


def recipe_of_pair(wildcards):
    """Recipe of the preset that a pair of the programme compares on."""
    return f"{RESULTS}/{EXPERIMENT.programme.pairs[wildcards.pair].preset}/recipe.yaml"


def cache_of_pair(wildcards):
    """Manifest of that preset's token cache."""
    preset = EXPERIMENT.programme.pairs[wildcards.pair].preset
    return f"{RESULTS}/data/{tokenizer_name(preset)}/token_cache.json"


def incumbent_of_pair(wildcards):
    """What a pair's A changes of the experiment's execution."""
    return json.dumps(EXPERIMENT.programme.pairs[wildcards.pair].a)


def challenger_of_pair(wildcards):
    """What a pair's B changes of the experiment's execution."""
    return json.dumps(EXPERIMENT.programme.pairs[wildcards.pair].b)


def programme_results():
    """Every row and pair of the programme."""
    programme = EXPERIMENT.programme
    return [
        *expand(f"{PROGRAMME}/rows/{{row}}.json", row=programme.rows),
        *expand(f"{PROGRAMME}/pairs/{{pair}}.json", pair=programme.pairs),
    ]


def joined_programme():
    """The programme's results joined; none where the config has no programme."""
    return [f"{PROGRAMME}/programme.json"] if programme_results() else []


def programme_part(part):
    """The input function of the target that collects a part of the programme."""

    def results(wildcards):
        names = EXPERIMENT.programme.of_part(part)
        if not names:
            raise WorkflowError(
                f"programme: this config has no row or pair of {part}; use --configfile config/gh200.yaml for one"
            )
        return [f"{PROGRAMME}/{name}.json" for name in names]

    return results
