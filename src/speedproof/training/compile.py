"""The compiled loss: which shapes it saw, how often it compiled and why, and its failures in a sentence."""

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from speedproof.core.errors import UserError
from speedproof.model.llama import Llama
from speedproof.model.loss import Chunked


class CompileError(UserError):
    """torch.compile could not make the function."""


@contextlib.contextmanager
def compile_errors() -> Iterator[None]:
    """Turn whatever the compiler raises into `CompileError`; errors of the run itself pass."""
    try:
        yield
    except Exception as error:
        modules = tuple(kind.__module__ for kind in type(error).__mro__)
        if not any(m.startswith(("torch._dynamo", "torch._inductor", "torch._functorch", "triton")) for m in modules):
            raise
        cause = getattr(error, "inner_exception", error)
        name, words = type(cause).__name__, " ".join(str(cause).split())[:400]
        advice = "set execution.compile to false"
        if name in ("InvalidCxxCompiler", "CppCompileError") or "compiler" in words:
            advice = f"install a C++ compiler (g++ or clang++) or {advice}"
        raise CompileError(f"execution.compile: torch.compile failed with {name}: {words}; {advice}") from error


_SEEN: dict[tuple[int, ...], int] = {}


class CompiledLoss:
    """`model.nll_sum` compiled, with the shapes of inputs that it was called with.

    It is one graph. A chunked loss takes no part in it, since its loop would be unrolled: then the graph ends before
    the head, and what the loss does between its matrix products is a second one.
    """

    def __init__(self, model: Llama, mode: str):
        # A partial batch sent through it compiles once more for each size, and epochs end in several sizes.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        self.shapes: dict[tuple[int, ...], int] = {}
        """Calls by shape of the inputs (B, T)."""
        loss = getattr(model, "loss", None)
        if isinstance(loss, Chunked):
            hidden = torch.compile(model.hidden, mode=mode, dynamic=False, fullgraph=True)
            self._function: Callable[[Tensor, Tensor], Tensor] = lambda inputs, targets: loss(
                hidden(inputs), model.embedding.weight, targets, compiled=True
            )
        else:
            self._function = torch.compile(model.nll_sum, mode=mode, dynamic=False, fullgraph=True)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        shape = tuple(inputs.shape)
        for seen in (self.shapes, _SEEN):
            seen[shape] = seen.get(shape, 0) + 1
        return self._function(inputs, targets)


def seen_shapes() -> list[list[int]]:
    """Shapes (B, T) of inputs that compiled losses of this process were called with, in order of appearance."""
    return [list(shape) for shape in _SEEN]


def _counters() -> dict[str, dict[str, int]]:
    # The compiler takes seconds to import, and a process that compiles nothing has counted nothing.
    return torch._dynamo.utils.counters if "torch._dynamo" in sys.modules else {}


def compiles() -> int:
    """Graphs compiled by this process so far, recompilations included."""
    return int(_counters().get("stats", {}).get("unique_graphs", 0))


def graph_breaks() -> int:
    """Graph breaks of this process so far."""
    return int(sum(_counters().get("graph_break", {}).values()))


def recompile_reasons() -> list[str]:
    """The guard behind each of the last recompilations of this process, in order, with the sizes it met."""
    if "torch._dynamo" not in sys.modules:
        return []
    reasons = (metrics.recompile_reason for metrics in torch._dynamo.utils.get_compilation_metrics())
    return [" ".join(reason.split(" # ")[0].split()) for reason in reasons if reason]
