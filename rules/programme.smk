# The programme: single measurements and compared pairs that the config names, and what follows from them.


rule measure_row:
    input:
        recipe=recipe_of_row,
        execution=f"{SETTINGS}/execution.yaml",
        protocol=f"{SETTINGS}/measuring.yaml",
        cache=cache_of_row,
    output:
        record=f"{PROGRAMME}/rows/{{row}}.json",
        telemetry=f"{PROGRAMME}/rows/{{row}}.telemetry.csv",
    log:
        f"{LOGS}/programme/rows/{{row}}.log",
    benchmark:
        f"{LOGS}/programme/rows/{{row}}.benchmark.tsv"
    conda:
        "../envs/speedproof.yaml"
    threads: EXPERIMENT.slurm.cpus
    resources:
        **measuring_job(EXPERIMENT.slurm.measure_minutes),
    params:
        settings=settings_of_row,
        options=row_options,
        source=source_digest("measure"),
        store=STORE,
    message:
        "Measure row {wildcards.row} of the programme"
    shell:
        "python src/scripts/benchmark.py --recipe {input.recipe} --execution {input.execution}"
        " --set {params.settings:q} {params.options} --protocol {input.protocol} --cache {input.cache}"
        " --store {params.store:q} --telemetry {output.telemetry} --output {output.record} > {log} 2>&1"


rule compare_pair:
    input:
        recipe=recipe_of_pair,
        execution=f"{SETTINGS}/execution.yaml",
        protocol=f"{SETTINGS}/measuring.yaml",
        cache=cache_of_pair,
    output:
        f"{PROGRAMME}/pairs/{{pair}}.json",
    log:
        f"{LOGS}/programme/pairs/{{pair}}.log",
    benchmark:
        f"{LOGS}/programme/pairs/{{pair}}.benchmark.tsv"
    conda:
        "../envs/speedproof.yaml"
    threads: EXPERIMENT.slurm.cpus
    resources:
        **measuring_job(EXPERIMENT.slurm.compare_minutes),
    params:
        a=incumbent_of_pair,
        b=challenger_of_pair,
        blocks=EXPERIMENT.protocol.blocks,
        source=source_digest("measure"),
        store=STORE,
    message:
        "Compare pair {wildcards.pair} of the programme in {params.blocks} A B B A blocks"
    shell:
        "python src/scripts/compare.py --a {input.execution} --set-a {params.a:q}"
        " --b {input.execution} --set-b {params.b:q} --recipe {input.recipe}"
        " --protocol {input.protocol} --blocks {params.blocks} --cache {input.cache} --store {params.store:q}"
        " --output {output} > {log} 2>&1"


rule join_programme:
    input:
        results=programme_results(),
        programme=f"{SETTINGS}/programme.yaml",
        execution=f"{SETTINGS}/execution.yaml",
        deciding=f"{SETTINGS}/deciding.yaml",
    output:
        f"{PROGRAMME}/programme.json",
    log:
        f"{LOGS}/programme/programme.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        source=source_digest("programme"),
    message:
        "Set the programme's rows against each other and judge its pairs"
    shell:
        "python src/scripts/join_programme.py --programme {input.programme} --execution {input.execution}"
        " --deciding {input.deciding} --output {output} {input.results} > {log} 2>&1"
