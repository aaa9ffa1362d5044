"""Compiled validation in BF16 against the reference in FP64, on real text: the C4 sample and the embedded corpus."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from speedproof.core import files
from speedproof.core.store import Store
from speedproof.data import shards, sources, tokenizer
from speedproof.data.loader import TrainingBatches, validation_targets
from speedproof.data.token_cache import TokenCache, gather
from speedproof.model.llama import build
from speedproof.settings.experiment import Data, Tokenizer
from speedproof.settings.recipe import Recipe
from speedproof.training.evaluate import evaluate
from speedproof.training.update import Updater

ROOT = Path(__file__).resolve().parents[2]
C4 = ROOT / "../shared/data/c4-sample"
DEFAULT = files.read_yaml(ROOT / "config/default.yaml")
VOCABULARY = 384
"""Entries; the sample's 38 kB of training text support as many."""

MODEL = files.read_yaml(ROOT / "config/presets/micro.yaml") | {"vocab_size": VOCABULARY}
UPDATES, BLOCKS = 12, 8
TOLERANCE = 1e-3
"""Nats a target."""


@dataclass
class Trained:
    """A micro model after some updates on a corpus, and the reference's loss of the corpus's validation split."""

    cache: TokenCache
    recipe: Recipe
    weights: dict[str, torch.Tensor]
    loss: float


def tokens_of(data: Data, folder: Path) -> TokenCache:
    store = Store(folder)
    manifest = sources.find(data, None, store)
    settings = Tokenizer.parse(DEFAULT["tokenizer"], "tokenizer")
    path, described = tokenizer.make(settings, VOCABULARY, manifest, store)
    rows = [shards.make_shard(manifest, split, 0, path, described, 42, store) for split in ("train", "validation")]
    return TokenCache(gather(rows, described), store)


@pytest.fixture(scope="module", params=["embedded", "c4"])
def trained(request, tmp_path_factory, miniature_recipe, miniature_execution) -> Trained:
    data = DEFAULT["data"]
    if request.param == "c4":
        if not C4.is_dir():
            pytest.skip("no C4 sample beside the checkout")
        data = data | {"source": "files", "directory": str(C4), "train_files": 1}
    cache = tokens_of(Data.parse(data, "data"), tmp_path_factory.mktemp(request.param))
    context = MODEL["context_length"]
    recipe = miniature_recipe(
        model=MODEL,
        data=cache.identity,
        targets_per_update=BLOCKS * context,
        budget_targets=UPDATES * BLOCKS * context,
        warmup_fraction=0.1,
    )
    updater = Updater(recipe, miniature_execution(microbatch=4), "cpu")
    with TrainingBatches(cache.train, recipe) as batches:
        losses = [updater.step(batches.take(BLOCKS)).loss_sum for _ in range(UPDATES)]
    assert losses[-1] < 0.95 * losses[0], "it must have learned something of this text"
    weights = updater.model.state_dict()
    reference = build(recipe, None, "cpu").double()
    reference.load_state_dict(weights)
    return Trained(cache, recipe, weights, evaluate(reference, cache.validation, recipe, None, "cpu").loss)


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_compiled_validation_in_bf16_agrees_with_the_reference(loss, trained, miniature_execution):
    torch._dynamo.reset()
    execution = miniature_execution(evaluation_compile=True, evaluation_batch=24, loss=loss)
    recipe = Recipe.parse(trained.recipe.plain() | {"precision": "bf16"}, "recipe")
    model = build(recipe, execution, "cpu")
    model.load_state_dict(trained.weights)
    found = evaluate(model, trained.cache.validation, recipe, execution, "cpu")
    assert found.targets == validation_targets(trained.cache.validation)
    assert abs(found.loss - trained.loss) < TOLERANCE
    assert found.loss != trained.loss, "the reference must be another computation"
