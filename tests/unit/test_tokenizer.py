"""The tokenizer: trained, from a file; its vocabulary against the recipe's; its end of document."""

import random
from pathlib import Path

import pytest

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.store import Store
from speedproof.data import tokenizer as tokenizers
from speedproof.settings.experiment import Tokenizer

CONFIG = Path(__file__).parents[2] / "config" / "default.yaml"


def settings(**changes) -> Tokenizer:
    return Tokenizer.parse(files.read_yaml(CONFIG)["tokenizer"] | changes, "tokenizer")


def texts(count: int = 300) -> list[str]:
    generator = random.Random(5)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 7))) for _ in range(400)]
    return [" ".join(generator.choices(words, k=30)) for _ in range(count)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    files.write_text(path, tokenizers.train(texts(), 400, "</s>").to_str())
    return path


def test_training_is_exact_and_deterministic(trained):
    again = tokenizers.train(texts(), 400, "</s>")
    assert again.get_vocab_size() == 400
    assert again.to_str() == trained.read_text()


STRANGE = [
    "NUL \0",
    "🙂 👩‍👩‍👧",
    "שלום مرحبا",
    " two  spaces ",
    "a\r\n\tb",
    "</s> spelled out",
    "\ufeff",
    "x" * 1_000_000,
]


@pytest.mark.parametrize("text", STRANGE)
def test_every_text_comes_back(trained, text):
    loaded = tokenizers.load(trained)
    ids = loaded.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert loaded.decode(ids, skip_special_tokens=False) == text
    assert loaded.token_to_id("</s>") not in ids  # only the end of a document is one


def test_cutting_and_padding_of_a_file_are_switched_off(trained, tmp_path):
    loaded = tokenizers.load(trained)
    loaded.enable_truncation(3)
    loaded.enable_padding(length=50)
    loaded.save(str(tmp_path / "cut.json"))
    encoded = tokenizers.load(tmp_path / "cut.json").encode_batch_fast(
        ["a b c d e f g h", "a"], add_special_tokens=False
    )
    assert len(encoded[0].ids) > 3
    assert len(encoded[1].ids) == 1


def test_manifest_says_what_it_is(trained):
    value = tokenizers.describe(trained, 400, None)
    assert value["vocab_size"] == 400
    assert value["end_of_document"] == {"token": "</s>", "id": 0}
    assert value["sha256"] == files.sha256(trained)
    assert str(trained.parent) not in str(value)


@pytest.mark.parametrize("wanted", [399, 401, 32000])
def test_another_vocabulary_names_both_sizes(trained, wanted):
    with pytest.raises(UserError, match=rf"vocab_size: the recipe has {wanted} entries.*has 400; set vocab_size"):
        tokenizers.describe(trained, wanted, None)


def test_missing_end_of_document_names_the_key(trained):
    with pytest.raises(UserError, match=r"tokenizer\.end_of_document: .* has no token <end>"):
        tokenizers.describe(trained, 400, "<end>")


def test_a_corpus_too_small_says_how_many_entries_it_supports():
    with pytest.raises(UserError, match=r"vocab_size: 5000 entries asked for, but the corpus supports only \d+"):
        tokenizers.train(["ab ab abc"], 5000, "</s>")


def test_a_vocabulary_without_room_for_bytes():
    with pytest.raises(UserError, match="vocab_size: 256 entries cannot hold the 256 bytes"):
        tokenizers.train(["ab"], 256, "</s>")


def test_file_that_is_missing_or_no_tokenizer(tmp_path):
    manifest, store = {"files": []}, Store(tmp_path / "store")
    with pytest.raises(UserError, match=r"tokenizer\.file: found null"):
        tokenizers.make(settings(source="file"), 400, manifest, store)
    with pytest.raises(UserError, match="no such tokenizer file"):
        tokenizers.make(settings(source="file", file=str(tmp_path / "none.json")), 400, manifest, store)
    (tmp_path / "bad.json").write_text('{"version": 1}')
    with pytest.raises(UserError, match=r"bad\.json: is no tokenizer\.json"):
        tokenizers.make(settings(source="file", file=str(tmp_path / "bad.json")), 400, manifest, store)


def test_hub_tokenizer_that_was_never_fetched_says_how(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.repository: .*is not in the store; run `snakemake fetch_data`"):
        tokenizers.make(settings(source="hub"), 32000, {"files": []}, Store(tmp_path))
