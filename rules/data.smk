# C4 text -> tokenizer -> one shard a C4 file -> token cache -> recipe.


rule settings:
    output:
        f"{SETTINGS}/{{section}}.yaml",
    log:
        f"{LOGS}/settings/{{section}}.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        value=section,
    message:
        "Write the config's {wildcards.section} beside the results"
    shell:
        "python src/scripts/write_settings.py --value {params.value:q} --output {output} > {log} 2>&1"


rule fetch_data:
    input:
        data=f"{SETTINGS}/data.yaml",
        tokenizer=f"{SETTINGS}/tokenizer.yaml",
    output:
        f"{RESULTS}/data/sources.json",
    log:
        f"{LOGS}/fetch_data.log",
    localrule: not EXPERIMENT.slurm.fetch_partition
    conda:
        "../envs/speedproof.yaml"
    resources:
        **fetch_job(),
    params:
        source=source_digest("data"),
        store=STORE,
    message:
        "Find the C4 documents, or fetch them (the only step that may need the network)"
    shell:
        "python src/scripts/fetch_data.py --data {input.data} --tokenizer {input.tokenizer}"
        " --store {params.store:q} --output {output} > {log} 2>&1"


rule make_tokenizer:
    input:
        tokenizer=f"{SETTINGS}/tokenizer.yaml",
        sources=f"{RESULTS}/data/sources.json",
    output:
        tokenizer=f"{RESULTS}/data/{{tokenizer}}/tokenizer.json",
        manifest=f"{RESULTS}/data/{{tokenizer}}/tokenizer_manifest.json",
    log:
        f"{LOGS}/{{tokenizer}}/make_tokenizer.log",
    conda:
        "../envs/speedproof.yaml"
    threads: EXPERIMENT.slurm.data_cpus
    resources:
        **data_job(),
    params:
        vocabulary=vocabulary,
        source=source_digest("data"),
        store=STORE,
    message:
        "Make the tokenizer {wildcards.tokenizer}"
    shell:
        "python src/scripts/make_tokenizer.py --tokenizer {input.tokenizer} --vocab {params.vocabulary}"
        " --sources {input.sources} --threads {threads} --store {params.store:q}"
        " --output {output.tokenizer} --manifest {output.manifest} > {log} 2>&1"


rule tokenize_file:
    input:
        data=f"{SETTINGS}/data.yaml",
        sources=f"{RESULTS}/data/sources.json",
        tokenizer=f"{RESULTS}/data/{{tokenizer}}/tokenizer.json",
        manifest=f"{RESULTS}/data/{{tokenizer}}/tokenizer_manifest.json",
    output:
        f"{RESULTS}/data/{{tokenizer}}/shards/{{split}}-{{index}}.json",
    log:
        f"{LOGS}/{{tokenizer}}/tokenize/{{split}}-{{index}}.log",
    conda:
        "../envs/speedproof.yaml"
    threads: EXPERIMENT.slurm.data_cpus
    resources:
        **data_job(),
        tokenizing=1,
    params:
        source=source_digest("data"),
        store=STORE,
    message:
        "Tokenize C4 file {wildcards.index} of {wildcards.split}"
    shell:
        "python src/scripts/tokenize_file.py --data {input.data} --sources {input.sources}"
        " --tokenizer {input.tokenizer} --manifest {input.manifest} --split {wildcards.split}"
        " --index {wildcards.index} --threads {threads} --store {params.store:q} --output {output} > {log} 2>&1"


rule token_cache:
    input:
        manifest=f"{RESULTS}/data/{{tokenizer}}/tokenizer_manifest.json",
        shards=shard_manifests,
    output:
        f"{RESULTS}/data/{{tokenizer}}/token_cache.json",
    log:
        f"{LOGS}/{{tokenizer}}/token_cache.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        source=source_digest("data"),
        store=STORE,
    message:
        "Join the shards into the token cache {wildcards.tokenizer}"
    shell:
        "python src/scripts/make_token_cache.py --tokenizer-manifest {input.manifest}"
        " --store {params.store:q} --output {output} {input.shards} > {log} 2>&1"


rule verify_data:
    input:
        sources=f"{RESULTS}/data/sources.json",
        caches=token_caches(),
    log:
        f"{LOGS}/verify_data.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        store=STORE,
    message:
        "Check every file and shard against its checksum"
    shell:
        "python src/scripts/verify_data.py --sources {input.sources}"
        " --store {params.store:q} {input.caches} 2>&1 | tee {log}"


rule resolve_recipe:
    input:
        cache=token_cache,
    output:
        f"{PRESET}/recipe.yaml",
    log:
        f"{LOGS}/{{preset}}/resolve_recipe.log",
    conda:
        "../envs/speedproof.yaml"
    threads: EXPERIMENT.slurm.cpus
    resources:
        **measuring_job(5),
    params:
        recipe=recipe_settings,
        device=EXPERIMENT.execution.device,
        store=STORE,
    message:
        "Resolve the recipe of {wildcards.preset}: model, data, precision of this device"
    shell:
        "python src/scripts/resolve_recipe.py --recipe {params.recipe:q} --device {params.device}"
        " --cache {input.cache} --store {params.store:q} --output {output} > {log} 2>&1"
