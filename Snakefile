# The experiment as a graph: C4 text -> token cache -> tuning grid -> selected.yaml -> matched runs -> parity -> summary.
# `snakemake -n all` lists every job; README.md says what comes out.


configfile: "config/default.yaml"


include: "rules/common.smk"
include: "rules/wiring.smk"
include: "rules/data.smk"
include: "rules/tuning.smk"
include: "rules/matched.smk"
include: "rules/parity.smk"
include: "rules/programme.smk"
include: "rules/peers.smk"
include: "rules/summary.smk"


# The profile names `jobs`, without which the plain `snakemake --executor slurm all` is refused; but `jobs` also makes
# Snakemake 9.27 forget the number of cores in a local run, and measurements would crowd each other.
onstart:
    if workflow.local_exec:
        workflow.scheduler.resources["_cores"] = workflow.cores


localrules:
    all,
    data,
    tuning,
    matched,
    parity,
    programme,
    ladder,
    rope_ablation,
    finite_checks,
    sdpa,
    compile_modes,
    cpu_threads,
    larger_models,
    cold_start,
    synthetic,
    kernels,
    peers,
    export,
    summary,


rule all:
    default_target: True
    input:
        rules.summarise.output,


rule data:
    input:
        token_caches(),


rule tuning:
    input:
        per_preset("tuning/recommended.yaml"),


rule matched:
    input:
        per_matched_preset("matched/matched.json"),


rule parity:
    input:
        parity_results(),


rule summary:
    input:
        rules.summarise.output,


# The published programme, whole and part by part; config/gh200.yaml names its rows and pairs.
rule programme:
    input:
        rules.join_programme.output,


rule ladder:
    input:
        programme_part("ladder"),


rule rope_ablation:
    input:
        programme_part("rope_ablation"),


rule finite_checks:
    input:
        programme_part("finite_checks"),


rule sdpa:
    input:
        programme_part("sdpa"),


rule compile_modes:
    input:
        programme_part("compile_modes"),


rule cpu_threads:
    input:
        programme_part("cpu_threads"),


rule larger_models:
    input:
        programme_part("larger_models"),


rule cold_start:
    input:
        programme_part("cold_start"),


rule synthetic:
    input:
        programme_part("synthetic"),


rule kernels:
    input:
        programme_part("kernels"),


# Beside the experiment: the same recipe by transformers (envs/peers.txt), and the trained model in its form.
rule peers:
    input:
        per_preset("peers/peers.json"),


rule export:
    input:
        per_matched_preset("export/config.json"),
