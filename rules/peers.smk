# Beside others: the same recipe by another implementation, and the trained model in the form that others load.


rule compare_peers:
    input:
        recipe=f"{PRESET}/recipe.yaml",
        default=f"{SETTINGS}/execution.yaml",
        recommended=f"{PRESET}/tuning/recommended.yaml",
        protocol=f"{SETTINGS}/measuring.yaml",
        parity=f"{SETTINGS}/parity.yaml",
        cache=token_cache,
    output:
        f"{PRESET}/peers/peers.json",
    log:
        f"{LOGS}/{{preset}}/peers.log",
    conda:
        "../envs/speedproof.yaml"
    threads: EXPERIMENT.slurm.cpus
    resources:
        **measuring_job(2 * EXPERIMENT.slurm.compare_minutes),
    params:
        blocks=EXPERIMENT.protocol.blocks,
        source=source_digest("peers"),
        store=STORE,
    message:
        "Measure {wildcards.preset} beside transformers in {params.blocks} A B B A blocks an execution"
    shell:
        "python src/scripts/compare_peers.py --recipe {input.recipe} --default {input.default}"
        " --recommended {input.recommended} --protocol {input.protocol} --parity {input.parity}"
        " --blocks {params.blocks} --cache {input.cache} --store {params.store:q} --output {output} > {log} 2>&1"


rule export_model:
    input:
        unpack(export_inputs),
    output:
        multiext(
            f"{PRESET}/export/",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "config.json",
        ),
    log:
        f"{LOGS}/{{preset}}/export.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        folder=f"{PRESET}/export",
        source=source_digest("export"),
    message:
        "Write the trained {wildcards.preset} as a folder that transformers loads"
    shell:
        "python src/scripts/export.py --recipe {input.recipe} --weights {input.weights}"
        " --tokenizer {input.tokenizer} --manifest {input.manifest} --output {params.folder} > {log} 2>&1"
