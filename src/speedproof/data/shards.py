"""One C4 file into one shard: its documents in a seeded order, each with its end-of-document token.

Documents are tokenised in the order of the file into a temporary file and copied from there in the seeded order, so
memory depends neither on the file nor on the corpus. The shard enters the store when it is whole; a job that is
killed leaves only a folder that nobody reads, which the next attempt clears away.
"""

import array
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.identity import source_digest
from speedproof.core.progress import Progress
from speedproof.core.store import Store
from speedproof.data import sources
from speedproof.data import tokenizer as tokenizers
from speedproof.data.corpus import documents
from speedproof.data.token_cache import DTYPE, KIND, MANIFEST_FILE, TOKENS_FILE

CHUNK_CHARACTERS = 2 * 2**20
"""Text encoded at a time: large enough to keep every thread busy, small enough that its encodings take ~150 MB."""

COMPRESSED = 0.4
"""Share of its characters that English text keeps as gzip; for the progress bar alone."""


def make_shard(
    manifest: dict[str, Any],
    split: str,
    index: int,
    tokenizer: Path,
    tokenizer_manifest: dict[str, Any],
    order_seed: int,
    store: Store,
) -> dict[str, Any]:
    """Tokenise file `index` of `split` unless the store has its shard; returns the shard's manifest.

    {"split", "index", "identity", "tokens", "documents", "empty_documents", "characters", "sha256"}. Training
    documents are ordered by PCG64([order_seed, index]), validation keeps the order of the file. Empty documents are
    counted and left out.

    Raises: UserError naming file and line of bad text, or the key of a file without any text.
    """
    row = sources.row_of(manifest, split, index)
    identity = {
        "file": row["sha256"],
        "order": [order_seed, index] if split == "train" else None,
        "tokenizer": tokenizer_manifest["sha256"],
        "end_of_document": tokenizer_manifest["end_of_document"]["id"],
        "code": source_digest("shards"),
    }
    if store.find(KIND, identity) is None:
        with store.lock(KIND, identity):
            if store.find(KIND, identity) is None:
                path = sources.checked(row, manifest, store)
                _clear_unfinished(store.path(KIND, identity))
                with store.publish(KIND, identity) as folder:
                    facts = _write(path, tokenizer, tokenizer_manifest, identity["order"], folder)
                    files.write_json(folder / MANIFEST_FILE, facts)
    facts = files.read_json(store.path(KIND, identity) / MANIFEST_FILE)
    return {"split": split, "index": index, "identity": identity} | facts


def _clear_unfinished(entry: Path) -> None:
    """Remove what killed attempts at this entry left; safe while its lock is held."""
    for folder in entry.parent.glob(f".{entry.name[:12]}.*.partial"):
        shutil.rmtree(folder, ignore_errors=True)


def _write(
    path: Path, tokenizer: Path, tokenizer_manifest: dict[str, Any], order: list[int] | None, folder: Path
) -> dict[str, Any]:
    unordered = folder / "unordered.bin" if order is not None else folder / TOKENS_FILE
    lengths, facts = _tokenise(path, tokenizer, tokenizer_manifest, unordered)
    if not len(lengths):
        raise UserError(f"{path}: holds no text at all; use another file or lower data.train_files or validation_files")
    if order is not None:
        seed = [order[0] % 2**64, order[1]]
        shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(len(lengths))
        _reorder(unordered, lengths, shuffled, folder / TOKENS_FILE)
        unordered.unlink()
    return facts | {"tokens": int(lengths.sum()), "sha256": files.sha256(folder / TOKENS_FILE)}


def _tokenise(
    path: Path, tokenizer: Path, tokenizer_manifest: dict[str, Any], target: Path
) -> tuple[np.ndarray, dict[str, int]]:
    """Write the documents of `path` to `target` in their order; their lengths in tokens (n,), and counts."""
    encoder = tokenizers.load(tokenizer)
    end, vocab_size = tokenizer_manifest["end_of_document"]["id"], tokenizer_manifest["vocab_size"]
    lengths, facts = array.array("q"), {"documents": 0, "empty_documents": 0, "characters": 0}
    with (
        open(target, "wb") as stream,
        # This thread reads and writes while the other one waits for the encoder's own threads.
        ThreadPoolExecutor(1) as pool,
        Progress(f"tokenise {path.name}", path.stat().st_size / COMPRESSED, "characters") as progress,
    ):
        waiting = None
        for texts in _chunks(_nonempty(documents(path), facts)):
            encoding = pool.submit(encoder.encode_batch_fast, texts, add_special_tokens=False)
            if waiting is not None:
                _append(waiting.result(), end, vocab_size, lengths, stream)
            waiting = encoding
            progress.total = max(progress.total, facts["characters"])  # an estimate until the end
            progress.update(facts["characters"], f"{facts['documents']:,} documents")
        if waiting is not None:
            _append(waiting.result(), end, vocab_size, lengths, stream)
        progress.update(facts["characters"])
    return np.frombuffer(lengths, dtype=np.int64), facts


def _nonempty(texts: Iterable[str], facts: dict[str, int]) -> Iterator[str]:
    for text in texts:
        facts["documents" if text else "empty_documents"] += 1
        facts["characters"] += len(text)
        if text:
            yield text


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk, characters = [], 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _append(encodings: list[Any], end: int, vocab_size: int, lengths: array.array, stream: Any) -> None:
    for encoding in encodings:
        ids = encoding.ids
        ids.append(end)
        lengths.append(len(ids))
        tokens = np.array(ids, dtype=np.uint32)
        if tokens.max() >= vocab_size:
            raise UserError(f"tokenizer: gave id {tokens.max()} of {vocab_size} entries; use a tokenizer without gaps")
        stream.write(tokens.astype(DTYPE).tobytes())


def _reorder(source: Path, lengths: np.ndarray, order: np.ndarray, target: Path) -> None:
    """Copy the documents of `source`, `lengths` tokens each, to `target` in `order`."""
    starts = (np.cumsum(lengths) - lengths) * DTYPE.itemsize
    sizes = lengths * DTYPE.itemsize
    with open(source, "rb") as stream, open(target, "wb", buffering=2**20) as out:
        for document in order.tolist():
            out.write(os.pread(stream.fileno(), int(sizes[document]), int(starts[document])))
