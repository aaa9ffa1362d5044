# Parity: the fast path against the twice-differentiable reference, with trained and with fresh weights.


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
    conda:
        "../envs/speedproof.yaml"
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
        " --parity {input.parity} --cache {input.cache} --store {params.store:q} --output {output} > {log} 2>&1"


rule check_derivatives:
    output:
        f"{RESULTS}/parity/derivatives.json",
    log:
        f"{LOGS}/derivatives.log",
    conda:
        "../envs/speedproof.yaml"
    resources:
        **data_job(),
    params:
        source=source_digest("parity"),
    message:
        "Check the reference's first and second derivatives in FP64"
    shell:
        "python src/scripts/check_derivatives.py --output {output} > {log} 2>&1"
