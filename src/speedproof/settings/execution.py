"""Execution: how a recipe is run. It must never change what is learned."""

import os
from typing import Literal

from pydantic import Field, PositiveInt

from speedproof.core.errors import UserError
from speedproof.settings.recipe import Recipe
from speedproof.settings.strict import Strict

Device = Literal["cpu", "cuda"]
Implementation = Literal["native", "transformers"]
SdpaBackend = Literal["auto", "flash", "cudnn", "math"]
Projections = Literal["separate", "fused"]
Loss = Literal["plain", "chunked", "triton"]
Optimizer = Literal["fused", "arena"]
FiniteChecks = Literal["separate", "merged", "latched"]
Capture = Literal["none", "graph"]
Allocator = Literal["default", "tuned"]
Tokens = Literal["host", "device"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

NATIVE_ONLY = {
    "rope": "uncached",
    "projections": "separate",
    "loss": "plain",
    "optimizer": "fused",
    "capture": "none",
}
"""Settings of the native implementation alone, with the value that says what a peer has as it comes."""

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Compile modes that replay CUDA graphs, whose outputs live only until the next replay."""


class Execution(Strict):
    """A complete execution; every field present wherever one is written down."""

    device: Device = Field(description="cpu, or cuda for the first GPU that is visible")
    implementation: Implementation = Field(
        description="native: this project's model; transformers: its Llama as a peer (envs/peers.txt)"
    )
    microbatch: PositiveInt = Field(description="blocks of one forward and backward pass")
    compile: bool = Field(description="whether updates go through torch.compile")
    compile_mode: CompileMode = Field(description="torch.compile's mode; without effect when compile is false")
    sdpa_backend: SdpaBackend = Field(
        description="kernel of the causal attention: flash, cudnn or math; auto: PyTorch's choice"
    )
    cpu_threads: int = Field(ge=1, le=1024, description="PyTorch's intra-op threads")
    allocator: Allocator = Field(
        description="tuned: freed memory is kept and used again, so that a CPU need not map and clear it anew"
    )
    tokens: Tokens = Field(
        description="training tokens read by a thread and copied, or all of the budget's kept on the device"
    )
    rope: Literal["cached", "uncached"] = Field(description="FP32 tables kept outside the graph, or angles each time")
    projections: Projections = Field(
        description="fused: q, k, v and gate, up are stored and multiplied as one matrix each"
    )
    loss: Loss = Field(
        description="chunked: head and cross-entropy some targets at a time, their gradient in the forward pass; "
        "triton: the same with one kernel that reads the logits once and leaves their gradient in place"
    )
    optimizer: Optimizer = Field(
        description="AdamW over each weight, or over flat buffers that hold weights, gradients and moments"
    )
    partial: Literal["eager", "compiled"] = Field(description="how a shorter last microbatch runs")
    finite_checks: FiniteChecks = Field(
        description="separate: each microbatch loss and the gradients read by the host; merged: one read an update; "
        "latched: the device refuses by itself, one read for several updates"
    )
    capture: Capture = Field(
        description="graph: a whole update is one CUDA graph; needs optimizer arena and finite_checks latched"
    )
    evaluation_batch: PositiveInt = Field(description="blocks of one validation pass")
    evaluation_compile: bool = Field(description="whether validation goes through torch.compile")

    def check(self, recipe: Recipe) -> None:
        """Raise UserError where this execution cannot run `recipe`."""
        if recipe.blocks_per_update % self.microbatch:
            raise UserError(
                f"execution.microbatch: {self.microbatch} does not divide the {recipe.blocks_per_update} blocks of an "
                f"update (recipe.targets_per_update {recipe.targets_per_update}); "
                f"use one of {[m for m in range(1, recipe.blocks_per_update + 1) if recipe.blocks_per_update % m == 0]}"
            )
        if contradiction := self.contradiction():
            raise UserError(f"execution.{contradiction}")
        for key, value in NATIVE_ONLY.items():
            if self.implementation != "native" and getattr(self, key) != value:
                raise UserError(
                    f"execution.{key}: {getattr(self, key)!r} is the native model's alone; "
                    f"use {value!r} with implementation {self.implementation!r}"
                )

    def contradiction(self) -> str | None:
        """What in this execution excludes something else in it, and what to do; None where all goes together."""
        if self.loss == "triton" and self.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return (
                f"loss: 'triton' is a kernel for GPUs; use chunked on {self.device} "
                "(Triton's interpreter, TRITON_INTERPRET=1, is there to test it)"
            )
        if self.capture == "none":
            return None
        if self.device != "cuda":
            return f"capture: 'graph' does not exist on {self.device}; use none"
        for key, value in {"optimizer": "arena", "finite_checks": "latched"}.items():
            if getattr(self, key) != value:
                return f"{key}: found {getattr(self, key)!r} with capture 'graph', which needs {value!r}; set it"
        if self.compile and self.compile_mode in GRAPH_MODES:
            return f"compile_mode: {self.compile_mode!r} makes CUDA graphs of its own; use default with capture 'graph'"
        return None

    @property
    def replays(self) -> bool:
        """Whether its updates replay CUDA graphs: the compiler's, or one of the whole update."""
        graphs = self.compile and self.compile_mode in GRAPH_MODES
        return self.device == "cuda" and (graphs or self.capture == "graph")

    def peer(self, implementation: Implementation) -> "Execution":
        """The same way to run a recipe, as far as `implementation` goes along."""
        return self.model_copy(update={"implementation": implementation} | NATIVE_ONLY)
