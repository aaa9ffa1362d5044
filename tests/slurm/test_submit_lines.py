"""Every job's exact sbatch line, under each profile: what the config's `slurm` becomes, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import Graph, Stubs

SITE = {
    "account": "lab",
    "partition": "main",
    "data_partition": "cpu",
    "fetch_partition": "web",
    "gpu_type": "gh200",
    "constraint": "nvme",
    "qos": "short",
    "reservation": "day1",
    "cpus": 2,
    "mem_mb": 64000,
}
ON_GPU = "-A lab -p main -t {} -C nvme --qos=short --mem 64000{} --cpus-per-task=2 --reservation=day1"
ON_CPU = "-A lab -p cpu -t 3 --mem 1500{} --ntasks=1 --cpus-per-task={}"
GPU = "--gpus=gh200:1"

LINES = {
    "fetch_data": ("-A lab -p web -t 3 --mem 1500{} --ntasks=1 --cpus-per-task=1", ""),
    "make_tokenizer": (ON_CPU.format("{}", 1), ""),
    "tokenize_file": (ON_CPU.format("{}", 1), ""),
    "check_derivatives": (ON_CPU.format("{}", 1), ""),
    "resolve_recipe": (ON_GPU.format(5, "{}"), GPU),
    "measure_candidate": (ON_GPU.format(2, "{}"), GPU),
    "measure_row": (ON_GPU.format(2, "{}"), GPU),
    "check_finalists": (ON_GPU.format(2, "{}"), GPU),
    "check_parity": (ON_GPU.format(2, "{}"), GPU),
    "compare_stage": (ON_GPU.format(5, "{}"), GPU),
    "confirm_finalist": (ON_GPU.format(5, "{}"), GPU),
    "compare_pair": (ON_GPU.format(5, "{}"), GPU),
    "compare_peers": (ON_GPU.format(10, "{}"), GPU),
    "train_arm": (ON_GPU.format(4, "{}"), GPU),
}
"""The line of each rule before the working directory, with a place for --requeue, and after it."""

TARGETS = [
    *["data/bpe-32000/tokenizer.json", "data/bpe-2048/shards/train-00000.json", "parity/derivatives.json"],
    *["nano/recipe.yaml", "micro/tuning/grid/slot0.json", "micro/tuning/grid/comparison.json"],
    *["micro/tuning/comparison.json", "micro/tuning/finalist_parity.json", "micro/parity/fresh.json"],
    *["micro/matched/runs/original-seed42-repeat0/result.json", "micro/peers/peers.json"],
    *["programme/rows/one.json", "programme/pairs/two.json"],
]
"""One file of each rule."""

THERE = [
    *[f"settings/{name}.yaml" for name in ("data", "tokenizer", "measuring", "parity", "execution")],
    *["data/sources.json", "data/bpe-2048/tokenizer.json", "data/bpe-2048/tokenizer_manifest.json"],
    *["data/bpe-2048/token_cache.json", "micro/recipe.yaml", "micro/tuning/grid/plan.json"],
    *["micro/tuning/grid/pair.json", "micro/tuning/finalists.json", "micro/tuning/recommended.yaml"],
    *["micro/matched/arms.json", "micro/matched/recipes/seed42.yaml", "micro/matched/arms/original.yaml"],
]
"""What they are made from."""


NEVER_START = {"*": ["FAILED"] * 9}

FAILING = ["--retries", "0", "--keep-going", "--rerun-triggers", "mtime", "--slurm-status-command", "squeue"]
"""No second attempts; squeue, since each failure makes ten calls of sacct."""


@pytest.mark.parametrize("profile", [["--executor", "slurm"], ["--workflow-profile", "profiles/slurm"]])
def test_each_rule_asks_for_what_the_config_says(stubs: Stubs, profile: list[str]) -> None:
    settings = {"ACCOUNTS": ["lab"], "PARTITIONS": ["main", "cpu", "web"], "ENDS": NEVER_START}
    programme = {
        "rows": {"one": {"parts": ["ladder"], "preset": "micro", "set": {}}},
        "pairs": {"two": {"parts": ["sdpa"], "preset": "micro", "a": {}, "b": {"microbatch": 8}}},
        "stand_ins": {},
    }
    graph = Graph(
        stubs.folder,
        stubs.settings(**settings),
        presets=["micro", "nano", "20m"],
        programme=programme,
        recipe={"targets_per_update": 8192},  # eight blocks of the longest preset, so that every microbatch divides it
        protocol={"stage_blocks": 1},
        slurm=SITE,
    )
    graph.pretend(*THERE)
    targets = [f"results/tiny/{path}" for path in TARGETS]
    rules = [rule for rule in LINES if rule != "fetch_data"]
    options = [*profile, *FAILING]
    graph.run(*options, "--allowed-rules", *rules, "--", *targets)
    (graph.results / "data/sources.json").unlink()
    graph.run(*options, "--allowed-rules", "fetch_data", "--", "results/tiny/data/sources.json")

    requeue = " --requeue" if "profiles/slurm" in profile else ""
    asked = {}
    for line in stubs.calls("sbatch"):
        rule = line[line.index("--comment") + 1].partition("_wildcards_")[0].removeprefix("rule_")
        asked.setdefault(rule, line)
    assert set(asked) == set(LINES)
    for rule, (before, after) in LINES.items():
        line = asked[rule]
        log = stubs.folder / f".snakemake/slurm_logs/rule_{rule}"
        comment = line[line.index("--comment") + 1]
        assert Path(line[line.index("--output") + 1]).is_relative_to(log)
        assert line[:-1] == [
            *["--parsable", "--job-name", line[2], "--output", line[4], "--export=ALL", "--comment", comment],
            *before.format(requeue).split(),
            *["-D", str(stubs.folder), *after.split()],
        ], rule
        assert line[-1].startswith("--wrap=")


def test_what_the_config_leaves_out_becomes_no_flag(stubs: Stubs) -> None:
    nothing = dict.fromkeys(("account", "partition", "gpu_type", "constraint", "qos", "reservation"))
    graph = Graph(stubs.folder, stubs.settings(ENDS=NEVER_START), slurm=nothing | {"gpus": 0})
    graph.pretend(*THERE)
    graph.run(
        "--executor", "slurm", "--allowed-rules", "measure_candidate", "--", "results/tiny/micro/tuning/grid/slot0.json"
    )
    [line, *_] = stubs.calls("sbatch")
    # The default partition is the executor's own doing; it would also name the account of the user's last job.
    assert " ".join(line[8:-1]) == f"-p main -t 2 --mem 2000 --ntasks=1 --cpus-per-task=2 -D {stubs.folder}"


def test_a_data_job_killed_for_memory_gets_more_the_next_time(stubs: Stubs) -> None:
    graph = Graph(stubs.folder, stubs.settings(ENDS={"*": ["OUT_OF_MEMORY", "FAILED"]}))
    graph.pretend(*THERE)
    options = ["--executor", "slurm", *FAILING, "--retries", "1", "--allowed-rules", "tokenize_file"]
    assert graph.run(*options, "--", "results/tiny/data/bpe-2048/shards/train-00000.json").returncode == 1
    assert [line[line.index("--mem") + 1] for line in stubs.calls("sbatch")] == ["1500", "3000"]
