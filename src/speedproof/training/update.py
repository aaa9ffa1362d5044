"""The optimizer update: accumulate, check, clip, step."""

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedproof.core.errors import UserError
from speedproof.data.loader import to_device
from speedproof.model.attention import check_backend
from speedproof.model.fused import by_name
from speedproof.model.llama import build
from speedproof.settings.execution import GRAPH_MODES, Execution
from speedproof.settings.recipe import Recipe
from speedproof.training.allocator import tune_allocator
from speedproof.training.compile import CompiledLoss, compile_errors
from speedproof.training.latch import CapturedUpdate, Latch
from speedproof.training.optimizer import MOMENTS, OPTIMIZERS, allocate
from speedproof.training.precision import autocast, compute_dtype, require_resolved
from speedproof.training.schedule import learning_rate


class NonFinite(UserError):
    """An update whose loss or gradient is not finite. It was not applied: everything is as after the one before.

    `blocks` were taken for it and for updates after it.
    """

    def __init__(self, update: int, tensor: str, blocks: int = 0):
        self.update, self.tensor, self.blocks = update, tensor, blocks
        super().__init__(
            f"update {update}: {tensor} is not finite; weights, moments and schedule are as after update {update - 1}. "
            "Lower recipe.lr or recipe.grad_clip, or set recipe.precision to fp32, and train again"
        )


@dataclass(frozen=True)
class UpdateResult:
    """One update: summed loss in nats before it, targets consumed, global gradient norm before clipping."""

    loss_sum: float
    targets: int
    grad_norm: float


class Updater:
    """A model with its optimizer, and the counters that its schedule needs.

    Raises: UserError where the execution cannot run the recipe, UnsupportedBackend where an SDPA backend cannot.
    """

    def __init__(self, recipe: Recipe, execution: Execution, device: torch.device | str):
        execution.check(recipe)
        require_resolved(recipe)
        self.recipe, self.execution, self.device = recipe, execution, torch.device(device)
        if execution.allocator == "tuned":
            tune_allocator()
        torch.set_num_threads(execution.cpu_threads)
        torch.manual_seed(recipe.seed)
        shape = recipe.model
        check_backend(
            execution.sdpa_backend,
            shape.heads,
            shape.context_length,
            shape.head_size,
            compute_dtype(recipe),
            self.device,
        )
        self.model = build(recipe, execution, self.device)
        # A replayed CUDA graph overwrites the gradients it returned; kept buffers are added to and stay whole.
        self._replays = execution.compile and execution.compile_mode in GRAPH_MODES and self.device.type == "cuda"
        self.weights = OPTIMIZERS[execution.optimizer](self.model, recipe, keep=self._replays)
        self.optimizer = self.weights.adamw
        self.latch = Latch(self.optimizer, self.device) if execution.finite_checks == "latched" else None
        self._captured: CapturedUpdate | None = None
        for group in self.optimizer.param_groups:
            group["capturable"] = execution.capture == "graph"
        self.compiled = CompiledLoss(self.model, execution.compile_mode) if execution.compile else None
        self.targets_seen = 0
        self.updates = 0

    def step(self, rows: np.ndarray) -> UpdateResult:
        """One optimizer update on rows (blocks, context + 1) uint16, and its result.

        Raises: NonFinite, with nothing changed; CompileError.
        """
        return (self.submit(rows) or self.finish())[-1]

    def submit(self, rows: np.ndarray) -> list[UpdateResult]:
        """One optimizer update; returns what is known by now: its own result, or, latched, several or none.

        Raises: as `step`; latched it may be for an update some submissions ago, and none since has changed anything.
        """
        targets = len(rows) * (rows.shape[1] - 1)
        rate = learning_rate(self.recipe, self.targets_seen + targets)
        if self.latch is None:
            results = [self._checked(rows, targets, rate)]
        else:
            results = []
            self.latch.rate.fill_(rate)
            self._replayed(rows) if self._whole(rows) else self._latched(rows)
            self.latch.note(rows, targets)
        self.targets_seen += targets
        self.updates += 1
        return self.finish() if self.latch and self.latch.full else results

    def finish(self) -> list[UpdateResult]:
        """Results of the updates whose results are not known yet. Raises: NonFinite for the first that has none."""
        if not (self.latch and self.latch.pending):
            return []
        seen, pending = self.latch.read(), self.latch.pending
        self.latch.pending = []
        for done, (rows, targets, loss, norm) in enumerate(seen):
            if not math.isfinite(loss + norm):
                undone = pending[done:]
                self.updates -= len(undone)
                self.targets_seen -= sum(targets for _, targets in undone)
                if math.isfinite(loss):
                    self._accumulate(rows, targets)  # once more, to say which gradient it was
                self._reject(None if math.isfinite(loss) else "loss", sum(len(rows) for rows, _ in undone))
        return [UpdateResult(loss, targets, norm) for _, targets, loss, norm in seen]

    def _checked(self, rows: np.ndarray, targets: int, rate: float) -> UpdateResult:
        """An update that is looked at before it is applied."""
        loss_sum = self._accumulate(rows, targets)
        norm = self.weights.norm()
        loss, grad_norm = torch.stack((loss_sum, norm)).tolist()  # the host sync of an update
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._reject(None if math.isfinite(loss) else "loss", len(rows))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.weights.step(norm)
        self.weights.clear()
        return UpdateResult(loss, targets, grad_norm)

    def _latched(self, rows: np.ndarray | Tensor) -> None:
        """An update that the latch lets through or not. It never syncs, so that it can be captured."""
        loss_sum = self._accumulate(rows, len(rows) * (rows.shape[1] - 1))
        norm = self.weights.norm()
        self.latch.look(loss_sum, norm)
        self.weights.step(norm)
        self.weights.clear()

    def _whole(self, rows: np.ndarray | Tensor) -> bool:
        return self.execution.capture == "graph" and len(rows) == self.recipe.blocks_per_update

    def _replayed(self, rows: np.ndarray | Tensor) -> None:
        if self._captured is None:
            self._captured = CapturedUpdate(self._latched, self.latch, tuple(rows.shape), self.device)
        self._captured(rows)

    def _accumulate(self, rows: np.ndarray | Tensor, targets: int) -> Tensor:
        """Add up the microbatches' gradients of the mean loss; returns the summed loss, on the device."""
        loss_sum = torch.zeros((), device=self.device)
        for start in range(0, len(rows), self.execution.microbatch):
            nll = self.backward(rows[start : start + self.execution.microbatch], targets)
            if self.execution.finite_checks == "separate" and not math.isfinite(nll.item()):
                self._reject("loss", len(rows))
            loss_sum += nll
        return loss_sum

    def backward(self, rows: np.ndarray, targets: int) -> Tensor:
        """Add a microbatch's share of the update's mean gradient; returns its summed loss, on the device.

        Every target weighs 1 / targets of the update, so that unequal microbatches add up right.
        """
        inputs, labels = to_device(rows, None, self.device)
        whole = len(rows) == self.execution.microbatch or self.execution.partial == "compiled"
        if self.compiled is None or not whole:
            with autocast(self.recipe, self.device):
                nll = self.model.nll_sum(inputs, labels)
            (nll / targets).backward()
            return nll.detach()
        if self._replays:
            torch.compiler.cudagraph_mark_step_begin()
        with compile_errors():
            with autocast(self.recipe, self.device):
                nll = self.compiled(inputs, labels)
            (nll / targets).backward()
        return nll.detach()

    def _reject(self, tensor: str | None, blocks: int) -> None:
        """Drop the gradients and raise NonFinite, naming the first tensor that is to blame."""
        if tensor is None:
            gradients = by_name(self.model, lambda weight: weight.grad).items()
            bad = (name for name, gradient in gradients if not torch.isfinite(gradient).all())
            tensor = next((f"gradient of {name}" for name in bad), "gradient norm")
        self.weights.clear()
        raise NonFinite(self.updates + 1, tensor, blocks)

    def state_dict(self) -> dict[str, Any]:
        """The live tensors (no copies) under canonical names, and the counters; the same for every execution.

        What was submitted must have been finished.
        """
        return {
            "model": by_name(self.model),
            "moments": self._moments() if self.updates else {},
            "step": self.updates,
            "targets_seen": self.targets_seen,
            "updates": self.updates,
        }

    def _moments(self) -> dict[str, Tensor]:
        found = [(moment, by_name(self.model, lambda w, m=moment: self.weights.moment(w, m))) for moment in MOMENTS]
        return {f"{name}.{moment}": value for moment, values in found for name, value in values.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`. Raises UserError naming a tensor that is missing, unknown or of another shape."""
        weights = by_name(self.model)
        moments = {f"{n}.{m}": w for n, w in weights.items() for m in MOMENTS if state["step"]}
        for what, expected, found in (("model", weights, state["model"]), ("moments", moments, state["moments"])):
            for name in sorted(expected.keys() ^ found.keys()):
                raise UserError(f"{what}.{name}: {'missing' if name in expected else 'unknown'} in the saved state")
            for name, weight in expected.items():
                if weight.shape != found[name].shape:
                    raise UserError(
                        f"{what}.{name}: found shape {tuple(found[name].shape)}, expected {tuple(weight.shape)}"
                    )
        for name, weight in weights.items():
            weight.copy_(state["model"][name])
        allocate(self.optimizer, state["step"])
        self._captured = None  # it would go on with the moments that were there before
        for name, moment in (self._moments() if state["step"] else {}).items():
            moment.copy_(state["moments"][name])
        self.targets_seen, self.updates = state["targets_seen"], state["updates"]


def deterministic() -> None:
    """Make this process choose deterministic kernels, so that a resumed run ends in bitwise equal weights."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
