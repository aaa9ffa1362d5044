"""The state a training run resumes from: one folder, whole or absent, that holds everything the rest depends on.

`state-<n>/` holds `tensors.safetensors` (weights, moments and random state under canonical names, so that it does not
depend on the execution) and `state.json` (counters, the identity of the run, checksums). A new
folder is written beside the old one and takes its place by a rename; a save that fails leaves the old one as it was.
"""

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.identity import differences, digest

TENSORS, COUNTERS = "tensors.safetensors", "state.json"


@dataclass(frozen=True)
class State:
    """What a checkpoint holds: tensors by canonical name, and JSON-ready counters."""

    tensors: dict[str, torch.Tensor]
    counters: dict[str, Any]


def save(folder: Path, identity: dict[str, Any], state: State) -> None:
    """Write `state` of the run with `identity` below `folder` and drop the state that lay there.

    Raises: UserError when it cannot be written (a full disk); the state that lay there is then intact.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for abandoned in folder.glob("*.partial"):
        shutil.rmtree(abandoned, ignore_errors=True)
    older = _states(folder)
    target = folder / f"state-{_number(older[-1]) + 1 if older else 0}"
    new = Path(tempfile.mkdtemp(dir=folder, suffix=".partial"))
    try:
        _write(new / TENSORS, state.tensors)
        counters = state.counters | {"identity": identity, "sha256": files.sha256(new / TENSORS)}
        files.write_json(new / COUNTERS, counters | {"digest": digest(counters)})
        os.rename(new, target)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        left = f"the state before it is whole ({older[-1].name})" if older else "there is no earlier state"
        raise UserError(f"{target}: cannot be written ({error}); {left}; make room and run again") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    for path in older:
        shutil.rmtree(path, ignore_errors=True)


def load(folder: Path, identity: dict[str, Any]) -> State | None:
    """The newest state below `folder`, None when there is none.

    Raises: UserError when it is damaged, or when it was made by another run: then naming the fields that differ.
    """
    found = _states(folder)
    if not found:
        return None
    path = found[-1]
    advice = f"delete {folder} to start this run again from its beginning"
    try:
        counters = files.read_json(path / COUNTERS)
        if counters.pop("digest") != digest(counters):
            raise ValueError("it does not hold what was written")
        made_by, sha256 = counters.pop("identity"), counters.pop("sha256")
    except (UserError, KeyError, AttributeError, TypeError, ValueError):
        raise UserError(f"{path / COUNTERS}: this resume state is damaged; {advice}") from None
    if wrong := differences(made_by, identity):
        fields = "; ".join(f"{key} is {theirs!r} there and {ours!r} here" for key, (theirs, ours) in wrong.items())
        raise UserError(f"{path}: this resume state belongs to another run: {fields}; {advice}")
    try:
        if files.sha256(path / TENSORS) != sha256:
            raise ValueError("it does not hold what was written")
        return State(load_file(path / TENSORS), counters)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path / TENSORS}: this resume state is damaged ({error}); {advice}") from None


def save_weights(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors as safetensors, whole or not at all.

    Raises: UserError when they cannot be written; an older file is then intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        _write(temporary, tensors)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written ({error}); make room and run again") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    # Each is copied: the format refuses tensors that share memory, as views of fused weights do.
    save_file({name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}, path)
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)  # safetensors makes it private; results are meant to be shared
    _flush(path)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """State of the random generators that training may draw from, by device."""
    state = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    """Set the generators as `random_state` found them."""
    torch.set_rng_state(tensors["random.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random.cuda"], device)


def _states(folder: Path) -> list[Path]:
    """Finished states, oldest first; more than one only where a process died between the rename and the clean-up."""
    return sorted((p for p in folder.glob("state-*") if p.name[6:].isdigit()), key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("state-"))


def _flush(path: Path) -> None:
    """Have the file or folder on the disk and not in the page cache: a rename must not overtake what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
