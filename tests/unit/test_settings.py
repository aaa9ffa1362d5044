import copy
from pathlib import Path

import pytest
import yaml

from speedproof.core.errors import UserError
from speedproof.settings import describe
from speedproof.settings.experiment import (
    Experiment,
    changed,
    load_preset,
    read_config,
    read_execution,
    recipe_for,
    typed,
)
from speedproof.settings.recipe import ModelShape

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ROOT / "config/presets"
CONFIGS = sorted(set((ROOT / "config").glob("*.yaml")) - {ROOT / "config/published.yaml"})
DEFAULT = yaml.safe_load((ROOT / "config/default.yaml").read_text())


@pytest.fixture
def config():
    return copy.deepcopy(DEFAULT)


@pytest.fixture
def experiment():
    return Experiment.parse(DEFAULT)


def put(config, dotted, value):
    *groups, key = dotted.split(".")
    for group in groups:
        config = config[group]
    if value is None:
        del config[key]
    else:
        config[key] = value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("execution.microbach", 4, r"execution\.microbach: unknown key; did you mean 'microbatch'\?"),
        ("recpe", {}, r"recpe: unknown key; did you mean 'recipe'\?"),
        ("matched.arms.original.sett", {}, r"matched\.arms\.original\.sett: unknown key; did you mean 'set'\?"),
        ("execution.microbatch", "four", r"execution\.microbatch: found 'four'; input should be a valid integer"),
        ("execution.microbatch", 0, r"execution\.microbatch: found 0; .*greater than 0"),
        ("execution.microbatch", True, r"execution\.microbatch: found True; .*integer"),
        ("execution.sdpa_backend", "flsh", r"execution\.sdpa_backend: found 'flsh'; input should be 'auto', 'flash'"),
        ("execution.cpu_threads", 100_000, r"execution\.cpu_threads: found 100000; .*less than or equal to 1024"),
        ("recipe.lr", "1e-3", r"recipe\.lr: found '1e-3'; .*1\.0e-3"),
        ("recipe.lr", float("nan"), r"recipe\.lr: found nan"),
        ("recipe.lr", float("inf"), r"recipe\.lr: found inf"),
        ("recipe.beta1", 1.0, r"recipe\.beta1: found 1\.0; .*less than 1"),
        ("recipe.seed", None, r"recipe\.seed: this key is required and missing"),
        ("experiment", "../outside", r"experiment: found '../outside'"),
        ("presets", [], r"presets: found \[\]"),
        ("matched.presets", ["90m"], r"matched\.presets names '90m'"),
        ("presets", ["nano", "nano"], r"^presets names 'nano' twice"),
        ("presets", ["nano", "my model"], r"^presets: 'my model' becomes a file's name"),
        ("presets", ["nano", "../nano"], r"^presets: '\.\./nano' becomes a file's name"),
        ("matched.seeds", [42, 42], r"^matched\.seeds names 42 twice"),
        ("matched.arms.original arm", {"base": "default"}, r"^matched\.arms: 'original arm' becomes a file's name"),
        ("store", "", r"store: found ''"),
        ("matched.reference", "first", r"matched: reference 'first' is no arm"),
        ("parity.arm", "first", r"parity\.arm 'first' is no arm"),
        ("slurm.measure_minutes", 1, r"slurm\.measure_minutes .* protocol\.deadline_s"),
        ("tuning", [], r"tuning: found \[\]"),
        ("slurm", 3, r"^slurm: found 3; give keys below it \(account, .*\), or leave it out"),
        ("slurm.account", 12345, r"slurm\.account: found 12345; .*put it in quotes, '12345'"),
    ],
)
def test_a_wrong_key_or_value_is_one_sentence_that_names_it(config, key, value, message):
    put(config, key, value)
    with pytest.raises(UserError, match=message) as caught:
        Experiment.parse(config)
    assert "\n" not in str(caught.value)


def test_an_empty_config_file_is_named(tmp_path):
    (tmp_path / "site.yaml").touch()
    with pytest.raises(UserError, match=r"site\.yaml: found None; give keys .*leave the file out"):
        read_config(tmp_path / "site.yaml")


def test_what_the_command_line_leaves_as_text_inside_a_group_gets_its_type():
    # Snakemake reads `--config 'recipe={lr: 0.1, seed: 3}'` without types, and its jobs are given the same text again.
    given = {"recipe": {"lr": "0.1", "seed": "3"}, "presets": ["20m", "1e3x"], "experiment": "mine", "n": 4}
    assert typed(given) == {"recipe": {"lr": 0.1, "seed": 3}, "presets": ["20m", "1e3x"], "experiment": "mine", "n": 4}
    assert typed({"a": ["false", "null", "", "a: b", "[1]", "{"]}) == {"a": [False, None, "", "a: b", "[1]", "{"]}


@pytest.mark.parametrize("value", [None, "text", 3])
def test_a_config_that_is_no_dictionary_is_refused(value):
    with pytest.raises(UserError, match="experiment"):
        Experiment.parse(value)


@pytest.mark.parametrize(
    ("preset", "parameters"), [("20m", 20_403_520), ("50m", 48_507_392), ("90m", 91_605_120), ("nano", 688_768)]
)
def test_presets_count_the_published_parameters(experiment, preset, parameters):
    assert recipe_for(preset, experiment, PRESETS, None).model.parameters == parameters


def test_model_flops_are_those_of_the_roofline(experiment):
    flops = [
        recipe_for(p, experiment, PRESETS, None).model.training_flops_per_target / 1e6 for p in ("20m", "50m", "90m")
    ]
    assert flops == pytest.approx([138.1, 322.4, 604.6], abs=0.05)


def test_a_preset_overrides_recipe_keys(experiment):
    assert recipe_for("20m", experiment, PRESETS, None).beta2 == 0.95
    assert recipe_for("50m", experiment, PRESETS, None).beta2 == 0.99


def test_budget_is_rounded_up_to_whole_blocks(config):
    config["recipe"]["budget_targets"] = 100_000_000
    recipe = recipe_for("20m", Experiment.parse(config), PRESETS, None)
    assert recipe.total_targets == 100_000_768
    assert recipe.epoch_ends()[-1] == recipe.blocks == 97_657


def test_microbatch_that_does_not_divide_the_update_names_the_ones_that_do(experiment):
    recipe = recipe_for("nano", experiment, PRESETS, None)
    execution = changed(experiment.execution, {"microbatch": 3}, "execution")
    with pytest.raises(UserError, match=r"execution\.microbatch: 3 .*\[1, 2, 4, 8, 16\]"):
        execution.check(recipe)


def test_targets_per_update_must_be_whole_blocks(config):
    config["recipe"]["targets_per_update"] = 1000
    with pytest.raises(UserError, match=r"targets_per_update is 1000.*use 1024"):
        recipe_for("nano", Experiment.parse(config), PRESETS, None)


def test_vocabulary_must_fit_uint16():
    with pytest.raises(UserError, match=r"vocab_size.*65536"):
        ModelShape.parse(
            {"vocab_size": 65537, "layers": 1, "width": 8, "heads": 2, "ffn_width": 8, "context_length": 8}
        )


def test_unknown_preset_names_the_known_ones(experiment):
    with pytest.raises(UserError, match=r"'30m'.*known presets are 20m, 50m, 90m, micro, nano"):
        load_preset("30m", experiment, PRESETS)


def test_a_misspelt_key_in_a_preset_names_file_and_key(experiment, tmp_path):
    text = (PRESETS / "nano.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text + "beta3: 0.9\n")
    with pytest.raises(UserError, match=r"mine\.yaml\.beta3: unknown key; did you mean 'beta\d'"):
        load_preset("mine", experiment, tmp_path)
    (tmp_path / "less.yaml").write_text(text.replace("layers: 2\n", ""))
    with pytest.raises(UserError, match=r"less\.yaml\.layers: this key is required"):
        load_preset("less", experiment, tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "config/executions").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_executions_are_complete(path):
    assert read_execution(path)


def test_measuring_and_deciding_share_the_protocol_without_overlap(experiment):
    measuring, deciding = experiment.protocol.measuring(), experiment.protocol.deciding()
    assert not set(measuring) & set(deciding)
    assert measuring | deciding == experiment.protocol.plain()


@pytest.mark.parametrize(
    "path", sorted(set((ROOT / "config").glob("*.yaml")) - {ROOT / "config/published.yaml"}), ids=lambda p: p.stem
)
def test_every_shipped_config_is_sound_over_the_default(path):
    import snakemake.utils

    config = copy.deepcopy(DEFAULT)
    below = [ROOT / "config/gh200.yaml"] if path.stem in ("h200", "rtx") else []
    for layer in [*below, path]:
        snakemake.utils.update_config(config, yaml.safe_load(layer.read_text()))
    experiment = Experiment.parse(config)
    for preset in experiment.presets:
        experiment.execution.check(recipe_for(preset, experiment, PRESETS, None))


def test_the_page_of_keys_says_what_the_settings_say():
    page = (ROOT / "config/README.md").read_text()
    assert describe.page(ROOT / "config/default.yaml") == page, "run python -m speedproof.settings.describe"
