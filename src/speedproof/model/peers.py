"""The same model by another implementation: what a recipe trains at without this project's model.

A peer stands in the place of `Llama`: the same weights under the same canonical names, the same `nll_sum`. Everything
around it (tokens, autocast, update, optimizer, protocol) is what the native model has.
"""

import contextlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from speedproof.core.errors import UserError
from speedproof.model.attention import FORCED, Backend
from speedproof.model.names import TIED, llama_config, ours, theirs
from speedproof.settings.recipe import Recipe

TRANSFORMERS = "5.24.0"
"""The one version that is compared with, as envs/peers.txt pins it: with the code it decides what a record holds."""


def require_transformers() -> None:
    """Raise UserError in one sentence where transformers is missing, or is another version than the pinned one."""
    try:
        found = f"version {metadata.version('transformers')}"
    except metadata.PackageNotFoundError:
        found = "no such package"
    if found != f"version {TRANSFORMERS}":
        raise UserError(
            f"execution.implementation: 'transformers' needs its version {TRANSFORMERS}, found {found}; "
            "pip install -r envs/peers.txt"
        )


class TransformersLlama(nn.Module):
    """transformers' LlamaForCausalLM on a recipe, its parameters and state dict under the canonical names."""

    def __init__(self, recipe: Recipe, *, sdpa_backend: Backend = "auto"):
        require_transformers()
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.backend = FORCED.get(sdpa_backend)
        self.llama = LlamaForCausalLM(LlamaConfig(**llama_config(recipe), attn_implementation="sdpa"))
        self.register_state_dict_post_hook(_canonical)
        self.register_load_state_dict_pre_hook(_translated)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Canonical names and weights, the tied one once."""
        for name, weight in super().named_parameters("", recurse, remove_duplicate):
            yield f"{prefix}{'.' if prefix else ''}{ours(name.removeprefix('llama.'))}", weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (B, T, V) of token ids `inputs` (B, T) int64."""
        with self._attention():
            return self.llama(input_ids=inputs, use_cache=False).logits

    def nll_sum(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed loss in nats of `targets` (B, T), by the loss that transformers' own trainer uses.

        `shift_labels` are targets as they are, and the sum is divided by `num_items_in_batch`.
        """
        with self._attention():
            return self.llama(
                input_ids=inputs, labels=targets, shift_labels=targets, num_items_in_batch=1, use_cache=False
            ).loss

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        return sdpa_kernel(self.backend) if self.backend else contextlib.nullcontext()


def _canonical(peer: nn.Module, state: dict[str, Tensor], prefix: str, metadata: dict[str, Any]) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}llama.")]:
        value, name = state.pop(key), key.removeprefix(f"{prefix}llama.")
        if name != TIED:
            state[prefix + ours(name)] = value


def _translated(peer: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    names = [ours(name.removeprefix("llama.")) for name, _ in nn.Module.named_parameters(peer)]
    for name in [name for name in names if prefix + name in state]:
        state[f"{prefix}llama.{theirs(name)}"] = state.pop(prefix + name)
    embedding = f"{prefix}llama.{theirs('embedding.weight')}"
    if embedding in state:
        state[f"{prefix}llama.{TIED}"] = state[embedding]
