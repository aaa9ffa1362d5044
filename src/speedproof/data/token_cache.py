"""The token cache: uint16 shards in the store, read as one long row of tokens through a small manifest.

A manifest (`token_cache.json`) holds no paths, only the identities of the shards, so it stays true in a moved clone.
Shards are made in `shards.py`; here they are gathered, opened, read and verified.
"""

from pathlib import Path
from typing import Any

import numpy as np

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.identity import digest
from speedproof.core.progress import Progress
from speedproof.core.store import Store

KIND = "shards"
TOKENS_FILE = "tokens.bin"
MANIFEST_FILE = "manifest.json"
DTYPE = np.dtype("<u2")
"""Tokens on disk: little-endian 16-bit, which is why a vocabulary ends at 65,536 entries."""

SPLITS = ("train", "validation")


class Tokens:
    """The tokens of one split, several shard files read as one row."""

    def __init__(self, shards: list[tuple[Path, int]]):
        """`shards`: file and number of tokens of each, in order."""
        self._shards = [(path, count) for path, count in shards if count]
        self._starts = np.cumsum([0, *[count for _, count in self._shards]])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens `start` up to `start + count`, uint16 (count,), copied out of as many shards as that takes.

        A read and not a memory map: a shard cut short on a network file system is then an error, not a bus fault.

        Raises: IndexError outside the split; UserError naming the shard that ends too early.
        """
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        out = np.empty(count, dtype=np.uint16)
        done = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < count:
            path, size = self._shards[shard]
            offset = start + done - int(self._starts[shard])
            piece = min(count - done, size - offset)
            found = np.fromfile(path, dtype=DTYPE, count=piece, offset=offset * DTYPE.itemsize)
            if len(found) != piece:
                raise UserError(_damaged(path, f"ends after {offset + len(found):,} of {size:,} tokens"))
            out[done : done + piece] = found
            done += piece
            shard += 1
        return out


class TokenCache:
    """A complete token cache: two splits of tokens, what they were made with, and an identity."""

    def __init__(self, manifest: dict[str, Any], store: Store):
        self.manifest = manifest
        self.identity: str = manifest["identity"]
        self.vocab_size: int = manifest["vocab_size"]
        self._store = store
        self.train, self.validation = (self._open(split) for split in SPLITS)

    @classmethod
    def open(cls, manifest: Path, store: Store) -> "TokenCache":
        """Open the cache behind a `token_cache.json`; sizes are checked here, checksums by `verify`.

        Raises: UserError naming the manifest or the shard that is missing or has the wrong size.
        """
        value = files.read_json(manifest)
        try:
            return cls(value, store)
        except (KeyError, TypeError):
            raise UserError(
                f"{manifest}: is no token cache manifest; delete it and run `snakemake data` again"
            ) from None

    @classmethod
    def synthetic(
        cls, folder: Path, vocab_size: int, train_tokens: int, validation_tokens: int, seed: int
    ) -> "TokenCache":
        """A small real cache of random tokens: manifest at `<folder>/token_cache.json`, store at `<folder>/store`.

        It needs no corpus and no tokenizer; made again with the same sizes and seed it holds the same tokens.
        """
        store = Store(Path(folder) / "store")
        rows = []
        for number, (split, count) in enumerate(zip(SPLITS, (train_tokens, validation_tokens), strict=True)):
            identity = {"synthetic": split, "vocab_size": vocab_size, "tokens": count, "seed": seed}
            if store.find(KIND, identity) is None:
                with store.publish(KIND, identity) as entry:
                    generator = np.random.Generator(np.random.PCG64([seed, number]))
                    generator.integers(0, vocab_size, count, dtype=np.uint16).astype(DTYPE).tofile(entry / TOKENS_FILE)
            sha256 = files.sha256(store.path(KIND, identity) / TOKENS_FILE)
            row = {"split": split, "index": 0, "identity": identity, "tokens": count, "documents": 1, "sha256": sha256}
            rows.append(row)
        manifest = gather(rows, {"sha256": None, "vocab_size": vocab_size, "end_of_document": None})
        files.write_json(Path(folder) / "token_cache.json", manifest)
        return cls(manifest, store)

    def _open(self, split: str) -> Tokens:
        shards = []
        for row in self.manifest[split]["shards"]:
            path = self._store.path(KIND, row["identity"]) / TOKENS_FILE
            if not path.is_file():
                raise UserError(
                    f"{path}: this shard ({split}, file {row['index']}) is missing from the store; "
                    f"delete its folder if it is there, and run `snakemake data -R tokenize_file`"
                )
            if path.stat().st_size != row["tokens"] * DTYPE.itemsize:
                found = f"has {path.stat().st_size:,} bytes where {row['tokens'] * DTYPE.itemsize:,} were written"
                raise UserError(_damaged(path, found))
            shards.append((path, row["tokens"]))
        return Tokens(shards)

    def verify(self) -> int:
        """Check the SHA-256 of every shard; returns the number of shards. Raises UserError naming a wrong one."""
        rows = [(split, row) for split in SPLITS for row in self.manifest[split]["shards"]]
        total = sum(row["tokens"] for _, row in rows) * DTYPE.itemsize
        done = 0
        with Progress("verify shards", total, "bytes") as progress:
            for split, row in rows:
                path = self._store.path(KIND, row["identity"]) / TOKENS_FILE
                if files.sha256(path) != row["sha256"]:
                    raise UserError(_damaged(path, f"({split}, file {row['index']}) does not hold what was written"))
                done += row["tokens"] * DTYPE.itemsize
                progress.update(done)
        return len(rows)


def gather(shards: list[dict[str, Any]], tokenizer: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """The manifest of a cache over `shards` (their manifests) and the tokenizer's manifest; `facts` are kept with it.

    Its identity is a digest of the tokens themselves and the vocabulary, so a changed program, path or download
    that leaves the tokens as they were leaves every result made from them valid.
    """
    splits = {}
    for split in SPLITS:
        rows = sorted((row for row in shards if row["split"] == split), key=lambda row: row["index"])
        keep = ("index", "identity", "tokens", "documents", "sha256")
        splits[split] = {
            "tokens": sum(row["tokens"] for row in rows),
            "documents": sum(row["documents"] for row in rows),
            "shards": [{key: row[key] for key in keep} for row in rows],
        }
    content = {split: [row["sha256"] for row in splits[split]["shards"]] for split in SPLITS}
    identity = digest(content | {"vocab_size": tokenizer["vocab_size"], "tokenizer": tokenizer["sha256"]})
    return {"identity": identity, "vocab_size": tokenizer["vocab_size"], "tokenizer": tokenizer, **facts, **splits}


def _damaged(path: Path, found: str) -> str:
    return f"{path}: this shard {found}; delete its folder and run `snakemake data -R tokenize_file`"
