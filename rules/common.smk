# Names and resources that every rule file shares; checks the config before anything runs.
import os
import sys
from pathlib import Path
from shlex import quote

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT / "src"))

from speedproof.core.errors import UserError
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
