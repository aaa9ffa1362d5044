"""Parity: whether a fast execution still computes what the plain model computes.

The fast path is the update's own forward and backward pass, with its compilation, microbatch, SDPA backend and
autocast. The reference is explicit attention with uncached angles in FP32. Both get the same weights and the same
validation blocks at full context; compared are the loss and the gradient of the mean loss.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.core.identity import digest, source_digest
from speedproof.core.store import Store
from speedproof.data.loader import to_device, validation_batches, validation_targets
from speedproof.data.token_cache import TokenCache
from speedproof.measure.compiler_cache import compiler_cache
from speedproof.measure.device_lock import device_lock
from speedproof.measure.environment import environment
from speedproof.model.attention import UnsupportedBackend
from speedproof.model.fused import by_name
from speedproof.model.llama import Llama, build
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import Parity
from speedproof.settings.recipe import Recipe
from speedproof.training.compile import CompileError
from speedproof.training.precision import resolve_precision
from speedproof.training.update import Updater

KIND = "parity"
RESULT = "parity.json"


def gradient_errors(fast: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, dict[str, float]]:
    """Aggregate relative error ‖fast − reference‖ / ‖reference‖ over all tensors, and that of each tensor.

    A tensor whose reference gradient is zero is measured against the norm over all tensors.
    """
    differences = {name: _norm(fast[name].double() - value.double()) for name, value in reference.items()}
    norms = {name: _norm(value.double()) for name, value in reference.items()}
    whole = math.hypot(*norms.values())
    if not whole:
        return (0.0 if not any(differences.values()) else math.inf), dict(differences)
    each = {name: difference / (norms[name] or whole) for name, difference in differences.items()}
    return math.hypot(*differences.values()) / whole, each


def judge(
    fast_loss: float,
    reference_loss: float,
    fast: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    settings: Parity,
) -> dict[str, Any]:
    """The verdict on losses (nats a target) and gradients by name: `holds`, why, the figures and the worst tensor."""
    error, each = gradient_errors(fast, reference)
    difference = fast_loss - reference_loss
    # An error that is no number is the worst there can be, and no comparison with it is ever true.
    worst = max(each, key=lambda name: each[name] if math.isfinite(each[name]) else math.inf)
    faults = []
    if not abs(difference) <= settings.loss_tolerance_nats:
        faults.append(f"loss differs by {difference:+.2e} nats, tolerance {settings.loss_tolerance_nats:g}")
    if not error <= settings.gradient_tolerance:
        faults.append(
            f"aggregate gradient error {100 * error:.2f} %, tolerance {100 * settings.gradient_tolerance:g} %, "
            f"worst tensor {worst} ({100 * each[worst]:.2f} %)"
        )
    return {
        "holds": not faults,
        "reason": "; ".join(faults) or "losses and gradients agree within the tolerances",
        "fast_loss_nats": _finite(fast_loss),
        "reference_loss_nats": _finite(reference_loss),
        "loss_difference_nats": _finite(difference),
        "loss_tolerance_nats": settings.loss_tolerance_nats,
        "gradient_error": _finite(error),
        "gradient_tolerance": settings.gradient_tolerance,
        "worst_tensor": {"name": worst, "gradient_error": _finite(each[worst])},
    }


def check_parity(
    recipe: Recipe, execution: Execution, weights: Path | None, cache: TokenCache, settings: Parity
) -> dict[str, Any]:
    """Compare `execution` with the reference on `weights` (safetensors; None: fresh ones from recipe.seed).

    `settings.blocks` is rounded up to whole microbatches, so that the compiled shape is what is checked; the blocks
    lie evenly over the validation split.
    Raises: UserError for weights that do not fit or too little data, CompileError, UnsupportedBackend.
    """
    torch._dynamo.reset()
    updater = Updater(recipe, execution, execution.device)
    if weights is not None:
        load_weights(updater.model, weights)
    rows = _rows(cache, recipe, execution, settings)
    fast_loss, fast = _fast(updater, rows)
    reference_model = build(recipe, None, execution.device)
    reference_model.load_state_dict(updater.model.state_dict(), strict=True)
    shapes = sorted(updater.compiled.shapes) if updater.compiled else []
    del updater
    reference_loss, reference = _reference(reference_model, rows)
    return judge(fast_loss, reference_loss, fast, reference, settings) | {
        "kind": "fresh" if weights is None else "trained",
        "preset": recipe.preset,
        "precision": recipe.precision,
        "blocks": len(rows),
        "blocks_asked": settings.blocks,
        "context_length": recipe.model.context_length,
        "targets": len(rows) * recipe.model.context_length,
        "compiled_shapes": [list(shape) for shape in shapes],
        "execution": execution.plain(),
        "data": cache.identity,
        "weights_sha256": None if weights is None else files.sha256(weights),
    }


def stored_parity(
    recipe: Recipe, execution: Execution, weights: Path | None, cache: TokenCache, settings: Parity, store: Store
) -> dict[str, Any]:
    """`check_parity` from the store where the same check has been made, else made now, alone on the device.

    Weights count by their content; a check is made again after a change of the code that could change its figures.
    """
    machine = environment(execution.device)
    identity = {
        "kind": KIND,
        "source": source_digest(KIND),
        "recipe": recipe.plain(),
        "execution": execution.plain(),
        "weights": None if weights is None else files.sha256(weights),
        "data": cache.identity,
        "settings": settings.model_dump(exclude={"arm"}),
        "class": machine["class"],
    }
    with store.lock(KIND, identity):
        entry = store.find(KIND, identity)
        if entry is None:
            with device_lock(execution.device), compiler_cache() as caches:
                os.environ.update(caches)
                value = check_parity(recipe, execution, weights, cache, settings) | {"environment": machine}
            with store.publish(KIND, identity) as folder:
                files.write_json(folder / RESULT, value)
            entry = store.path(KIND, identity)
    return files.read_json(entry / RESULT)


def check_finalists(
    finalists: dict[str, Any], recipe: Recipe, cache: TokenCache, settings: Parity, store: Store
) -> dict[str, Any]:
    """Fresh weights in the tuner's executions: `checks` of the ranking from the fastest down until one holds, then of
    the default; and the check of the `recommended` one.

    An execution whose check fails to run does not hold, with what stopped it as the reason.
    """
    made: dict[str, dict[str, Any]] = {}

    def check(name: str, value: dict[str, Any]) -> dict[str, Any]:
        key = digest(value)
        if key not in made:
            execution = Execution.parse(value, f"finalists: {name}")
            try:
                resolved, _ = resolve_precision(recipe, execution.device)
                made[key] = stored_parity(resolved, execution, None, cache, settings, store)
            except (CompileError, UnsupportedBackend, RuntimeError) as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
                made[key] = {"holds": False, "reason": reason, "execution": value}
        return made[key] | {"name": name}

    checks = []
    for entry in finalists["selected"]:
        checks.append(check(entry["name"], entry["execution"]))
        if checks[-1]["holds"]:
            break
    recommended = check(finalists["recommended_name"], finalists["recommended"])
    if digest(finalists["default"]) not in made:  # what is recommended where the finalist is not confirmed
        checks.append(check(finalists["default_name"], finalists["default"]))
    return {"checks": checks, "recommended": recommended}


def describe(check: dict[str, Any]) -> str:
    """A check in one line."""
    if check.get("gradient_error") is None:
        return f"{'holds' if check['holds'] else 'does not hold'} ({check['reason']})"
    verdict = "holds" if check["holds"] else f"does not hold ({check['reason']})"
    return (
        f"parity {verdict}; loss {check['fast_loss_nats']:.6f} against {check['reference_loss_nats']:.6f} nats, "
        f"gradient error {100 * check['gradient_error']:.3g} %, worst tensor {check['worst_tensor']['name']}"
    )


def load_weights(model: Llama, path: Path) -> None:
    """Load a safetensors file into `model`, every tensor and no other. Raises UserError naming file and tensor."""
    try:
        found = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the weights.safetensors of a training run") from None
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: is no whole safetensors file ({error}); train again") from None
    wanted = model.state_dict()
    for name in sorted(wanted.keys() ^ found.keys()):
        raise UserError(f"{path}: tensor {name} is {'missing' if name in wanted else 'unknown to the model'}")
    for name, value in wanted.items():
        if found[name].shape != value.shape:
            raise UserError(f"{path}: {name} is {tuple(found[name].shape)}, the recipe's is {tuple(value.shape)}")
    model.load_state_dict(found, strict=True)


def _rows(cache: TokenCache, recipe: Recipe, execution: Execution, settings: Parity) -> np.ndarray:
    """Whole validation blocks, uint16 (n, context + 1), n a multiple of the microbatch."""
    context, microbatch = recipe.model.context_length, execution.microbatch
    count = -(-settings.blocks // microbatch) * microbatch
    whole = validation_targets(cache.validation) // context
    if count > whole:
        raise UserError(
            f"parity.blocks: {settings.blocks} in whole microbatches of {microbatch} are {count}, more than the "
            f"{whole} whole blocks of the validation data; raise data.validation_files or lower it"
        )
    blocks = np.arange(count) * whole // count
    return np.concatenate([rows for rows, _ in validation_batches(cache.validation, context, count, blocks)])


def _fast(updater: Updater, rows: np.ndarray) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and gradient on the host, microbatch by microbatch, as an update computes them before its step."""
    targets = len(rows) * (rows.shape[1] - 1)
    total = 0.0
    for start in range(0, len(rows), updater.execution.microbatch):
        total += updater.backward(rows[start : start + updater.execution.microbatch], targets).item()
    return total / targets, _gradients(updater.model)


def _reference(model: Llama, rows: np.ndarray) -> tuple[float, dict[str, Tensor]]:
    """The same in FP32, one block at a time, since the explicit form holds every logit and attention score."""
    targets = len(rows) * (rows.shape[1] - 1)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 would make the reference as coarse as what it judges
    total = 0.0
    try:
        for row in range(len(rows)):
            nll = model.nll_sum(*to_device(rows[row : row + 1], None, model.embedding.weight.device))
            (nll / targets).backward()
            total += nll.item()
    finally:
        torch.set_float32_matmul_precision(precision)
    return total / targets, _gradients(model)


def _gradients(model: Llama) -> dict[str, Tensor]:
    gradients = by_name(model, lambda weight: weight.grad)
    return {name: gradient.detach().to("cpu", copy=True) for name, gradient in gradients.items()}


def _norm(value: Tensor) -> float:
    return torch.linalg.vector_norm(value).item()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
