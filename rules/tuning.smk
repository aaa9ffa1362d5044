# The tuner: fixed stages with a known number of slots, then the finalists, their parity and their confirmation.


rule plan_stage:
    input:
        records=earlier_records,
        comparisons=earlier_comparisons,
        recipe=f"{PRESET}/recipe.yaml",
        execution=f"{SETTINGS}/execution.yaml",
        deciding=f"{SETTINGS}/deciding.yaml",
        tuning=f"{SETTINGS}/tuning.yaml",
    output:
        f"{PRESET}/tuning/{{stage}}/plan.json",
    log:
        f"{LOGS}/{{preset}}/tuning/{{stage}}/plan.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        comparisons=comparison_options,
        source=source_digest("stages"),
    message:
        "Name the candidates of stage {wildcards.stage} for {wildcards.preset}"
    shell:
        "python src/scripts/plan_stage.py --stage {wildcards.stage} --default {input.execution}"
        " --tuning {input.tuning} --deciding {input.deciding} --recipe {input.recipe} {params.comparisons}"
        " --output {output} {input.records} > {log} 2>&1"


rule plan_pair:
    input:
        records=records_so_far,
        comparisons=earlier_comparisons,
        recipe=f"{PRESET}/recipe.yaml",
        execution=f"{SETTINGS}/execution.yaml",
        deciding=f"{SETTINGS}/deciding.yaml",
        tuning=f"{SETTINGS}/tuning.yaml",
    output:
        f"{PRESET}/tuning/{{stage}}/pair.json",
    log:
        f"{LOGS}/{{preset}}/tuning/{{stage}}/pair.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        comparisons=comparison_options,
        source=source_digest("stages"),
    message:
        "Name the challenger of stage {wildcards.stage} for {wildcards.preset}"
    shell:
        "python src/scripts/plan_stage.py --stage {wildcards.stage} --pair --default {input.execution}"
        " --tuning {input.tuning} --deciding {input.deciding} --recipe {input.recipe} {params.comparisons}"
        " --output {output} {input.records} > {log} 2>&1"


rule compare_stage:
    input:
        pair=f"{PRESET}/tuning/{{stage}}/pair.json",
        recipe=f"{PRESET}/recipe.yaml",
        protocol=f"{SETTINGS}/measuring.yaml",
        cache=token_cache,
    output:
        f"{PRESET}/tuning/{{stage}}/comparison.json",
    log:
        f"{LOGS}/{{preset}}/tuning/{{stage}}/comparison.log",
    benchmark:
        f"{LOGS}/{{preset}}/tuning/{{stage}}/comparison.benchmark.tsv"
    conda:
        "../envs/speedproof.yaml"
    threads: EXPERIMENT.slurm.cpus
    resources:
        **measuring_job(EXPERIMENT.slurm.compare_minutes),
    params:
        blocks=EXPERIMENT.protocol.stage_blocks,
        source=source_digest("measure"),
        store=STORE,
    message:
        "Measure the challenger of stage {wildcards.stage} for {wildcards.preset} in {params.blocks} A B B A blocks"
    shell:
        "python src/scripts/compare.py --finalists {input.pair} --recipe {input.recipe}"
        " --protocol {input.protocol} --blocks {params.blocks} --cache {input.cache}"
        " --store {params.store:q} --output {output} > {log} 2>&1"


rule measure_candidate:
    input:
        plan=f"{PRESET}/tuning/{{stage}}/plan.json",
        recipe=f"{PRESET}/recipe.yaml",
        protocol=f"{SETTINGS}/measuring.yaml",
        cache=token_cache,
    output:
        record=RECORD,
        telemetry=RECORD.replace(".json", ".telemetry.csv"),
    log:
        f"{LOGS}/{{preset}}/tuning/{{stage}}/slot{{slot}}.log",
    benchmark:
        f"{LOGS}/{{preset}}/tuning/{{stage}}/slot{{slot}}.benchmark.tsv"
    conda:
        "../envs/speedproof.yaml"
    threads: EXPERIMENT.slurm.cpus
    resources:
        **measuring_job(EXPERIMENT.slurm.measure_minutes),
    params:
        source=source_digest("measure"),
        store=STORE,
    message:
        "Measure candidate {wildcards.slot} of stage {wildcards.stage} for {wildcards.preset}"
    shell:
        "python src/scripts/benchmark.py --plan {input.plan} --slot {wildcards.slot} --recipe {input.recipe}"
        " --protocol {input.protocol} --cache {input.cache} --store {params.store:q}"
        " --telemetry {output.telemetry} --output {output.record} > {log} 2>&1"


rule plan_finalists:
    input:
        records=records_of(STAGES),
        comparisons=comparisons_of(STAGES),
        recipe=f"{PRESET}/recipe.yaml",
        execution=f"{SETTINGS}/execution.yaml",
        deciding=f"{SETTINGS}/deciding.yaml",
        tuning=f"{SETTINGS}/tuning.yaml",
    output:
        f"{PRESET}/tuning/finalists.json",
    log:
        f"{LOGS}/{{preset}}/tuning/finalists.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        comparisons=comparison_options,
        source=source_digest("stages"),
    message:
        "Rank the candidates of {wildcards.preset} and name the one to confirm"
    shell:
        "python src/scripts/plan_stage.py --stage finalists --default {input.execution}"
        " --tuning {input.tuning} --deciding {input.deciding} --recipe {input.recipe} {params.comparisons}"
        " --output {output} {input.records} > {log} 2>&1"


rule confirm_finalist:
    input:
        finalists=f"{PRESET}/tuning/finalists.json",
        recipe=f"{PRESET}/recipe.yaml",
        protocol=f"{SETTINGS}/measuring.yaml",
        cache=token_cache,
    output:
        f"{PRESET}/tuning/comparison.json",
    log:
        f"{LOGS}/{{preset}}/tuning/comparison.log",
    benchmark:
        f"{LOGS}/{{preset}}/tuning/comparison.benchmark.tsv"
    conda:
        "../envs/speedproof.yaml"
    threads: EXPERIMENT.slurm.cpus
    resources:
        **measuring_job(EXPERIMENT.slurm.compare_minutes),
    params:
        blocks=EXPERIMENT.protocol.blocks,
        source=source_digest("measure"),
        store=STORE,
    message:
        "Measure the finalist of {wildcards.preset} against the default in {params.blocks} A B B A blocks"
    shell:
        "python src/scripts/compare.py --finalists {input.finalists} --recipe {input.recipe}"
        " --protocol {input.protocol} --blocks {params.blocks} --cache {input.cache}"
        " --store {params.store:q} --output {output} > {log} 2>&1"


rule check_finalists:
    input:
        finalists=f"{PRESET}/tuning/finalists.json",
        recipe=f"{PRESET}/recipe.yaml",
        parity=f"{SETTINGS}/parity.yaml",
        cache=token_cache,
    output:
        f"{PRESET}/tuning/finalist_parity.json",
    log:
        f"{LOGS}/{{preset}}/tuning/finalist_parity.log",
    benchmark:
        f"{LOGS}/{{preset}}/tuning/finalist_parity.benchmark.tsv"
    conda:
        "../envs/speedproof.yaml"
    threads: EXPERIMENT.slurm.cpus
    resources:
        **measuring_job(EXPERIMENT.slurm.measure_minutes),
    params:
        source=source_digest("parity"),
        store=STORE,
    message:
        "Check that the finalists of {wildcards.preset} still compute the reference"
    shell:
        "python src/scripts/check_finalists.py --finalists {input.finalists} --recipe {input.recipe}"
        " --parity {input.parity} --cache {input.cache} --store {params.store:q} --output {output} > {log} 2>&1"


rule recommend:
    input:
        records=records_of(STAGES),
        finalists=f"{PRESET}/tuning/finalists.json",
        comparison=f"{PRESET}/tuning/comparison.json",
        parity=f"{PRESET}/tuning/finalist_parity.json",
        deciding=f"{SETTINGS}/deciding.yaml",
    output:
        selected=f"{PRESET}/tuning/selected.yaml",
        recommended=f"{PRESET}/tuning/recommended.yaml",
        table=f"{PRESET}/tuning/tuning.json",
    log:
        f"{LOGS}/{{preset}}/tuning/recommend.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        source=source_digest("stages"),
    message:
        "Write selected.yaml and recommended.yaml of {wildcards.preset}"
    shell:
        "python src/scripts/recommend.py --finalists {input.finalists} --comparison {input.comparison}"
        " --parity {input.parity} --deciding {input.deciding} --selected {output.selected}"
        " --recommended {output.recommended} --table {output.table} {input.records} > {log} 2>&1"
