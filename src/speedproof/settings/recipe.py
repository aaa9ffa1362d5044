"""Recipe: what is trained. Two runs are comparable only if their recipes are equal."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from speedproof.settings.strict import Strict

Precision = Literal["auto", "bf16", "fp32"]


class ModelShape(Strict):
    """Sizes of a Llama-style decoder with tied embeddings and no biases."""

    vocab_size: int = Field(ge=2, le=65536, description="entries; token ids are stored as uint16")
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    ffn_width: PositiveInt
    context_length: PositiveInt = Field(description="targets a block")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "ModelShape":
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"width {self.width} over {self.heads} heads is no even head size; choose heads that divide the width"
            )
        return self

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """Trainable parameters, the tied embedding counted once: V·d + L(4d² + 3df) + (2L + 1)d."""
        d, f = self.width, self.ffn_width
        return self.vocab_size * d + self.layers * (4 * d * d + 3 * d * f) + (2 * self.layers + 1) * d

    @property
    def forward_flops_per_target(self) -> float:
        """Model FLOPs of a forward pass per target with causal attention: 2L(4d² + 3df) + 2LTd + 2Vd."""
        d, f, layers = self.width, self.ffn_width, self.layers
        body = 2 * layers * (4 * d * d + 3 * d * f)
        return body + 2 * layers * self.context_length * d + 2 * self.vocab_size * d

    @property
    def training_flops_per_target(self) -> float:
        """Three times the forward pass: one for it, two for the backward pass."""
        return 3 * self.forward_flops_per_target


class RecipeSettings(Strict):
    """The part of a recipe that config's `recipe:` holds; a preset may override any of it."""

    targets_per_update: PositiveInt = Field(description="targets of one optimizer update; a multiple of the context")
    budget_targets: PositiveInt = Field(description="targets to train on; rounded up to whole blocks")
    virtual_epochs: PositiveInt = Field(description="equal parts of the budget, each ended by a subset validation")
    subset_blocks: PositiveInt = Field(description="validation blocks of an epoch boundary, drawn once by subset_seed")
    subset_seed: int = Field(description="draws the blocks of the subset")
    seed: int = Field(ge=0, description="weights and order of the data")
    precision: Precision = Field(description="bf16: autocast over FP32 weights; auto: bf16 where the hardware has it")
    lr: PositiveFloat = Field(description="peak learning rate, reached after the warm-up")
    final_lr_fraction: float = Field(ge=0, le=1, description="share of the peak at which the cosine ends")
    warmup_fraction: float = Field(ge=0, lt=1, description="share of the budget with a linearly rising rate")
    beta1: float = Field(ge=0, lt=1, description="of AdamW")
    beta2: float = Field(ge=0, lt=1, description="of AdamW")
    eps: PositiveFloat = Field(description="of AdamW")
    weight_decay: float = Field(ge=0, description="on matrices, the tied embedding included; not on norm scales")
    grad_clip: PositiveFloat = Field(description="global norm")
    rope_theta: PositiveFloat = Field(description="base of the rotary angles")
    norm_eps: PositiveFloat = Field(description="under the root of RMSNorm")
    init_std: PositiveFloat = Field(description="residual projections are scaled down by sqrt(2 layers)")
    shuffle_buffer_mib: PositiveInt = Field(description="tokens that are shuffled together; decides the order")


class Recipe(RecipeSettings):
    """A whole recipe: model, data and training. Written beside every result."""

    preset: str
    model: ModelShape
    data: str | None = Field(description="identity of the token cache; null for synthetic tokens")

    @model_validator(mode="after")
    def _whole_blocks(self) -> "Recipe":
        context = self.model.context_length
        if self.targets_per_update % context:
            raise ValueError(
                f"targets_per_update is {self.targets_per_update}, no multiple of the context length {context}; "
                f"use {max(1, round(self.targets_per_update / context)) * context}"
            )
        if self.virtual_epochs > self.blocks:
            raise ValueError(
                f"virtual_epochs is {self.virtual_epochs}, more than the budget's {self.blocks} blocks; use fewer"
            )
        return self

    @property
    def blocks_per_update(self) -> int:
        return self.targets_per_update // self.model.context_length

    @property
    def blocks(self) -> int:
        """The budget in blocks, rounded up to whole ones."""
        return -(-self.budget_targets // self.model.context_length)

    @property
    def total_targets(self) -> int:
        """The budget rounded up to whole blocks: 100 million targets at context 1024 are 100,000,768."""
        return self.blocks * self.model.context_length

    def epoch_ends(self) -> list[int]:
        """Blocks consumed at the end of each virtual epoch; the last is the whole budget."""
        return [self.blocks * (k + 1) // self.virtual_epochs for k in range(self.virtual_epochs)]
