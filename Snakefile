# The experiment as a graph: C4 text -> token cache -> tuning grid -> selected.yaml -> matched runs -> parity -> summary.
# `snakemake -n all` lists every job; README.md says what comes out.


configfile: "config/default.yaml"


include: "rules/common.smk"
include: "rules/data.smk"
include: "rules/tuning.smk"
include: "rules/matched.smk"
include: "rules/parity.smk"
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
