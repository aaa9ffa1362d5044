"""The model as transformers knows it: the keys of its config and the names of its weights.

Layouts are the same, the rotary halves included: only names differ.
"""

import re
from typing import Any

from speedproof.settings.recipe import Recipe

OUTER = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
INNER = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
TIED = "lm_head.weight"
"""The head's second name of the embedding there; a checkpoint with tied embeddings leaves it out."""

BACK = {theirs: ours for names in (OUTER, INNER) for ours, theirs in names.items()}


def theirs(name: str) -> str:
    """`blocks.3.ffn.up.weight` -> `model.layers.3.mlp.up_proj.weight`. Raises KeyError for a name that is unknown."""
    if found := re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name):
        return f"model.layers.{found[1]}.{INNER[found[2]]}.weight"
    return OUTER[name]


def ours(name: str) -> str:
    """The canonical name of one of theirs. Raises KeyError for a name that is unknown."""
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name):
        return f"blocks.{found[1]}.{BACK[found[2]]}.weight"
    return BACK[name]


def llama_config(recipe: Recipe) -> dict[str, Any]:
    """The recipe's model in the keys of transformers' LlamaConfig."""
    shape = recipe.model
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context_length,
        "hidden_act": "silu",
        "rms_norm_eps": recipe.norm_eps,
        "rope_theta": recipe.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        "initializer_range": recipe.init_std,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }
