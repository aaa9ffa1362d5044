"""Execution: how a recipe is run. It must never change what is learned."""

from typing import Literal

from pydantic import Field, PositiveInt

from speedproof.core.errors import UserError
from speedproof.settings.recipe import Recipe
from speedproof.settings.strict import Strict

Device = Literal["cpu", "cuda"]
Implementation = Literal["native", "transformers"]
SdpaBackend = Literal["auto", "flash", "cudnn", "math"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

NATIVE_ONLY = {"rope": "uncached", "projections": "separate", "loss": "plain"}
"""Settings that only the native model has, with the value that says what a peer does."""


class Execution(Strict):
    """A complete execution; every field present wherever one is written down."""

    device: Device
    implementation: Implementation = Field(
        description="native: this project's model; transformers: its Llama as a peer (envs/peers.txt)"
    )
    microbatch: PositiveInt = Field(description="blocks of one forward and backward pass")
    compile: bool
    compile_mode: CompileMode = Field(description="torch.compile's mode; without effect when compile is false")
    sdpa_backend: SdpaBackend
    cpu_threads: PositiveInt = Field(description="PyTorch's intra-op threads")
    allocator: Literal["default", "tuned"] = Field(
        description="tuned: freed memory is kept and used again, so that a CPU need not map and clear it anew"
    )
    rope: Literal["cached", "uncached"] = Field(description="FP32 tables kept outside the graph, or angles each time")
    projections: Literal["separate", "fused"] = Field(
        description="fused: q, k, v and gate, up are stored and multiplied as one matrix each"
    )
    loss: Literal["plain", "chunked"] = Field(
        description="chunked: head and cross-entropy some targets at a time, their gradient in the forward pass"
    )
    optimizer: Literal["fused", "arena"] = Field(
        description="AdamW over each weight, or over flat buffers that hold weights, gradients and moments"
    )
    partial: Literal["eager", "compiled"] = Field(description="how a shorter last microbatch runs")
    finite_checks: Literal["separate", "merged"] = Field(
        description="separate: each microbatch loss and the gradients read by the host; merged: one read an update"
    )
    evaluation_batch: PositiveInt = Field(description="blocks of one validation pass")
    evaluation_compile: bool

    def check(self, recipe: Recipe) -> None:
        """Raise UserError where this execution cannot run `recipe`."""
        if recipe.blocks_per_update % self.microbatch:
            raise UserError(
                f"execution.microbatch: {self.microbatch} does not divide the {recipe.blocks_per_update} blocks of an "
                f"update (recipe.targets_per_update {recipe.targets_per_update}); "
                f"use one of {[m for m in range(1, recipe.blocks_per_update + 1) if recipe.blocks_per_update % m == 0]}"
            )
        for key, value in NATIVE_ONLY.items():
            if self.implementation != "native" and getattr(self, key) != value:
                raise UserError(
                    f"execution.{key}: {getattr(self, key)!r} is the native model's alone; "
                    f"use {value!r} with implementation {self.implementation!r}"
                )

    def peer(self, implementation: Implementation) -> "Execution":
        """The same way to run a recipe, as far as `implementation` goes along."""
        return self.model_copy(update={"implementation": implementation} | NATIVE_ONLY)
