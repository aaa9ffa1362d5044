# Inputs that depend on wildcards or on the config, and the options that name them.
import json

from speedproof.core.files import sha256


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


def checked_run(wildcards):
    """The run whose trained weights are checked for parity and exported: the first of its arm."""
    arm, seed = EXPERIMENT.parity.arm, EXPERIMENT.matched.seeds[0]
    return f"{RESULTS}/{wildcards.preset}/matched/runs/{arm}-seed{seed}-repeat0"


def parity_inputs(wildcards):
    """Fresh weights are checked in the recommended execution, trained ones in the execution of their arm."""
    folder = f"{RESULTS}/{wildcards.preset}"
    if wildcards.state == "fresh":
        return {"execution": f"{folder}/tuning/recommended.yaml"}
    return {
        "execution": f"{folder}/matched/arms/{EXPERIMENT.parity.arm}.yaml",
        "weights": f"{checked_run(wildcards)}/weights.safetensors",
    }


def measured_peers(wildcards):
    """Content of the comparisons with peers that there are: `all` makes none, but the summary shows them."""
    found = [Path(path) for path in per_preset("peers/peers.json")]
    return {path.parts[-3]: sha256(path) for path in found if path.is_file()}


def export_inputs(wildcards):
    """The trained weights that parity checks, with the recipe and the tokenizer of their run."""
    run = checked_run(wildcards)
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
