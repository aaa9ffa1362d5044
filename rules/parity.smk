# Parity: the fast path against the twice-differentiable reference, with trained and with fresh weights.


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
    return {"execution": f"{folder}/matched/arms/{arm}.yaml", "weights": f"{run}/weights.safetensors"}


def weights_option(wildcards, input):
    """The option that names trained weights; none for a fresh model."""
    return f"--weights {input.weights}" if input.get("weights") else ""


rule check_parity:
    input:
        unpack(parity_inputs),
        recipe=f"{PRESET}/recipe.yaml",
        parity=f"{SETTINGS}/parity.yaml",
        cache=token_cache,
    output:
        f"{PRESET}/parity/{{state}}.json",
    log:
        f"{LOGS}/{{preset}}/parity/{{state}}.log",
    benchmark:
        f"{LOGS}/{{preset}}/parity/{{state}}.benchmark.tsv"
    threads: EXPERIMENT.slurm.cpus
    resources:
        **measuring_job(EXPERIMENT.slurm.measure_minutes),
    params:
        weights=weights_option,
        source=source_digest("parity"),
        store=STORE,
    message:
        "Check parity of {wildcards.preset} with {wildcards.state} weights"
    shell:
        "python src/scripts/check_parity.py --recipe {input.recipe} --execution {input.execution} {params.weights}"
        " --parity {input.parity} --cache {input.cache} --store {params.store} --output {output} > {log} 2>&1"


rule check_derivatives:
    output:
        f"{RESULTS}/parity/derivatives.json",
    log:
        f"{LOGS}/derivatives.log",
    resources:
        **data_job(),
    params:
        source=source_digest("parity"),
    message:
        "Check the reference's first and second derivatives in FP64"
    shell:
        "python src/scripts/check_derivatives.py --output {output} > {log} 2>&1"
