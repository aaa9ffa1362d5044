# One summary: every figure beside the published one.


rule summarise:
    input:
        recipes=per_preset("recipe.yaml"),
        tuning=per_preset("tuning/tuning.json"),
        finalists=per_preset("tuning/finalist_parity.json"),
        records=expand(records_of(STAGES), preset=EXPERIMENT.presets),
        matched=per_matched_preset("matched/matched.json"),
        parity=parity_results(),
        programme=joined_programme(),
        caches=token_caches(),
        published="config/published.yaml",
        results=expand(runs_of("result.json"), preset=EXPERIMENT.matched.presets),
        metrics=expand(runs_of("metrics.jsonl"), preset=EXPERIMENT.matched.presets),
    output:
        summary=report(f"{RESULTS}/summary.json", category="Summary"),
        markdown=report(f"{RESULTS}/summary.md", category="Summary"),
        tables=directory(f"{RESULTS}/tables"),
        figures=report(
            directory(f"{RESULTS}/figures"),
            patterns=["{figure}.svg"],
            category="Figures",
            labels={"figure": "{figure}"},
        ),
    log:
        f"{LOGS}/summarise.log",
    localrule: True
    conda:
        "../envs/speedproof.yaml"
    params:
        experiment=EXPERIMENT.experiment,
        results=results_folder,
        presets=" ".join(f"--preset {preset}" for preset in EXPERIMENT.presets),
        peers=measured_peers,
        source=source_digest("summary"),
    message:
        "Write the summary of {params.experiment}"
    shell:
        "python src/scripts/summarise.py --experiment {params.experiment} --results {params.results} {params.presets}"
        " --output {output.summary} --markdown {output.markdown} --tables {output.tables}"
        " --figures {output.figures} --published {input.published} > {log} 2>&1"
