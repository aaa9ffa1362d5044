# Matched runs: one recipe, several executions, trained over the whole budget.


rule seed_recipe:
    input:
        f"{PRESET}/recipe.yaml",
    output:
        f"{PRESET}/matched/recipes/seed{{seed}}.yaml",
    log:
        f"{LOGS}/{{preset}}/matched/recipes/seed{{seed}}.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    message:
        "The recipe of {wildcards.preset} with seed {wildcards.seed}"
    shell:
        "python src/scripts/seed_recipe.py --recipe {input} --seed {wildcards.seed} --output {output} > {log} 2>&1"


rule prove_recipes:
    input:
        unpack(arm_bases),
        recipe=f"{PRESET}/recipe.yaml",
        default=f"{SETTINGS}/execution.yaml",
        arms=f"{SETTINGS}/arms.yaml",
    output:
        table=f"{PRESET}/matched/arms.json",
        executions=expand(
            f"{PRESET}/matched/arms/{{arm}}.yaml",
            arm=list(EXPERIMENT.matched.arms),
            allow_missing=True,
        ),
    log:
        f"{LOGS}/{{preset}}/matched/arms.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        folder=f"{PRESET}/matched/arms",
        bases=base_options,
        source=source_digest("matched"),
    message:
        "Prove that the arms of {wildcards.preset} differ in execution only"
    shell:
        "python src/scripts/prove_recipes.py --recipe {input.recipe} --default {input.default}"
        " {params.bases} --arms {input.arms}"
        " --output {output.table} --folder {params.folder} > {log} 2>&1"


rule train_arm:
    input:
        arms=f"{PRESET}/matched/arms.json",
        recipe=f"{PRESET}/matched/recipes/seed{{seed}}.yaml",
        execution=f"{PRESET}/matched/arms/{{arm}}.yaml",
        cache=token_cache,
    output:
        result=f"{RUN}/result.json",
        metrics=f"{RUN}/metrics.jsonl",
        weights=f"{RUN}/weights.safetensors",
        recipe=f"{RUN}/recipe.yaml",
        execution=f"{RUN}/execution.yaml",
    log:
        f"{LOGS}/{{preset}}/matched/{{arm}}-seed{{seed}}-repeat{{repeat}}.log",
    benchmark:
        f"{LOGS}/{{preset}}/matched/{{arm}}-seed{{seed}}-repeat{{repeat}}.benchmark.tsv"
    conda:
        "../envs/speedproof.yaml"
    threads: EXPERIMENT.slurm.cpus
    resources:
        **measuring_job(EXPERIMENT.slurm.train_minutes),
    params:
        folder=RUN,
        checkpoint=EXPERIMENT.matched.checkpoint_minutes,
        source=source_digest("training"),
        store=STORE,
    message:
        "Train {wildcards.preset} in arm {wildcards.arm}, seed {wildcards.seed}, repeat {wildcards.repeat}"
    shell:
        "python src/scripts/train.py --recipe {input.recipe} --execution {input.execution} --cache {input.cache}"
        " --repeat {wildcards.repeat} --checkpoint-minutes {params.checkpoint} --store {params.store:q}"
        " --record-compile-error --output {params.folder} > {log} 2>&1"


rule compare_matched:
    input:
        arms=f"{PRESET}/matched/arms.json",
        results=runs_of("result.json"),
    output:
        f"{PRESET}/matched/matched.json",
    log:
        f"{LOGS}/{{preset}}/matched/matched.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        reference=EXPERIMENT.matched.reference,
        source=source_digest("matched"),
    message:
        "Compare the matched runs of {wildcards.preset}"
    shell:
        "python src/scripts/compare_matched.py --arms {input.arms} --reference {params.reference}"
        " --output {output} {input.results} > {log} 2>&1"
