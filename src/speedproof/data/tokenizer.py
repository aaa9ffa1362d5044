"""The tokenizer of an experiment: trained on its corpus, a file, or the hub's; its vocabulary and end of document.

Its manifest is {"identity", "vocab_size", "end_of_document": {"token", "id"}, "sha256"}; tokenizer.json lies beside it.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.identity import digest, source_digest
from speedproof.core.store import Store
from speedproof.data import hub, sources
from speedproof.data.corpus import documents
from speedproof.settings.experiment import Tokenizer

if TYPE_CHECKING:
    import tokenizers

KIND = "tokenizers"
TRAINED_END = "<|endoftext|>"
"""End-of-document token of a trained tokenizer, unless the config names one."""

KNOWN_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "<|im_end|>")
"""End-of-document tokens looked for, in this order; TinyLlama's is the first."""

TRAINING_CHARACTERS = 64 * 2**20
"""Text that a tokenizer is trained on, at most: merges settle long before, and memory would grow with more."""


def use_threads(count: int) -> None:
    """Let `tokenizers` use `count` threads; call before its first use. Left to itself it warns after a fork."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if count > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(count)


def load(path: Path) -> "tokenizers.Tokenizer":
    """A tokenizer.json as it encodes documents here: nothing cut, padded or added, special tokens in a text only text.

    Raises: UserError naming a file that is missing or no tokenizer.
    """
    from tokenizers import Tokenizer as Loaded

    if not Path(path).is_file():
        raise UserError(f"{path}: no such tokenizer file; check tokenizer.file, or run the rule that makes it")
    try:
        tokenizer = Loaded.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: is no tokenizer.json ({error}); check tokenizer.file") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A document that speaks of "</s>" must not end there.
    tokenizer.encode_special_tokens = True
    return tokenizer


def train(texts: Iterable[str], vocab_size: int, end: str) -> "tokenizers.Tokenizer":
    """A byte-level BPE tokenizer of exactly `vocab_size` entries, `end` the first of them.

    Raises: UserError naming vocab_size when it cannot hold all bytes, or the texts do not support so many entries.
    """
    from tokenizers import Tokenizer as Empty
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 1:
        raise UserError(
            f"vocab_size: {vocab_size} entries cannot hold the {len(alphabet)} bytes and the end-of-document token; "
            f"use {len(alphabet) + 1} or more"
        )
    tokenizer = Empty(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise UserError(
            f"vocab_size: {vocab_size} entries asked for, but the corpus supports only {found}; "
            f"lower vocab_size in the preset to that, or use more text"
        )
    return tokenizer


def make(settings: Tokenizer, vocab_size: int, manifest: dict[str, Any], store: Store) -> tuple[Path, dict[str, Any]]:
    """The tokenizer.json that `settings` names and its manifest; `manifest` is the one of the sources.

    Raises: UserError naming the key whose tokenizer is missing, or fits neither `vocab_size` nor an end of document.
    """
    if settings.source == "train":
        path = _trained(settings, vocab_size, manifest, store)
    elif settings.source == "file":
        if settings.file is None:
            raise UserError("tokenizer.file: found null; give a tokenizer.json, or use another tokenizer.source")
        path = Path(settings.file)
    else:
        path = hub.stored(hub.tokenizer_request(settings), store)
    return path, describe(path, vocab_size, settings.end_of_document)


def _trained(settings: Tokenizer, vocab_size: int, manifest: dict[str, Any], store: Store) -> Path:
    rows = [row for row in manifest["files"] if row["split"] == "train"]
    end = settings.end_of_document or TRAINED_END
    identity = {
        "files": [row["sha256"] for row in rows],
        "vocab_size": vocab_size,
        "end_of_document": end,
        "code": source_digest("tokenizer"),
    }
    path = store.path(KIND, identity) / hub.TOKENIZER_FILE
    if store.find(KIND, identity) is None:
        with store.lock(KIND, identity):
            if store.find(KIND, identity) is None:
                paths = (sources.checked(row, manifest, store) for row in rows)
                tokenizer = train(_some_text(paths), vocab_size, end)
                with store.publish(KIND, identity) as folder:
                    files.write_text(folder / hub.TOKENIZER_FILE, tokenizer.to_str(pretty=True))
    return path


def _some_text(paths: Iterable[Path]) -> Iterator[str]:
    characters = 0
    for path in paths:
        for text in documents(path):
            yield text
            characters += len(text)
            if characters >= TRAINING_CHARACTERS:
                return


def describe(path: Path, vocab_size: int, end_of_document: str | None) -> dict[str, Any]:
    """The manifest of a tokenizer.json. Raises UserError when it does not fit `vocab_size` or has no end token."""
    tokenizer = load(path)
    found = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if found != vocab_size:
        raise UserError(
            f"vocab_size: the recipe has {vocab_size} entries, but the tokenizer {path} has {found}; "
            f"set vocab_size in the preset to {found}, or use another tokenizer"
        )
    candidates = KNOWN_ENDS if end_of_document is None else (end_of_document,)
    ids = {token: tokenizer.token_to_id(token) for token in candidates}
    token = next((token for token, number in ids.items() if number is not None), None)
    if token is None:
        raise UserError(
            f"tokenizer.end_of_document: the tokenizer {path} has no token {' or '.join(candidates)}; name one it has"
        )
    sha256 = files.sha256(path)
    end = {"token": token, "id": ids[token]}
    identity = digest({"sha256": sha256, "end_of_document": end})
    return {"identity": identity, "vocab_size": vocab_size, "end_of_document": end, "sha256": sha256}
