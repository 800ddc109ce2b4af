"""Forward pass of a small Llama policy on a CPU, with as few calls of torch as possible.

Shapes: R rows, n tokens of each in flight, D hidden, E entries of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

_MOST_PARAMETERS = 50_000_000
"""In a larger policy arithmetic dominates, and copies of the weights are expensive."""
FIXED_ROPE = ("default", "linear", "llama3")
"""Rotary embeddings whose angles do not depend on the length of the sequence."""


def is_small_llama(model: PreTrainedModel) -> bool:
    """Return whether `Llama` computes what this model computes, and is faster."""
    if not isinstance(model, LlamaForCausalLM) or model.device.type != "cpu":
        return False
    if torch.is_autocast_enabled("cpu"):
        return False  # `Llama` computes in the precision of the weights
    config: Any = model.config
    return (
        model.dtype == torch.float32
        and model.num_parameters() <= _MOST_PARAMETERS
        and config.hidden_act == "silu"
        and not config.attention_bias
        and not config.mlp_bias
        and not config.attention_dropout
        and config.rope_parameters["rope_type"] in FIXED_ROPE
    )


class Llama:
    """Llama model whose projections of the same input are fused into one."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_size: int = config.head_dim
        self.inner: int = config.intermediate_size
        self.eps: float = config.rms_norm_eps
        self.rotary = model.model.rotary_emb
        self.embedding: Tensor = model.model.embed_tokens.weight
        self.head: Tensor = model.lm_head.weight
        self.norm: Tensor = model.model.norm.weight
        self.layers = [_Layer(layer) for layer in model.model.layers]

    def compute_angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [positions, head size] each."""
        cos, sin = self.rotary(self.embedding, torch.arange(positions)[None])
        return cos[0], sin[0]

    def forward(
        self, tokens: Tensor, angles: tuple[Tensor, Tensor], cache: KeyValueCache
    ) -> Tensor:
        """Return hidden states [R, D] of the last of `tokens` [R, n].

        `angles` are [R, n, head size] each; `cache` takes keys and values.
        """
        rows, count = tokens.shape
        cos, sin = (angle[:, None] for angle in angles)
        hidden = self.embedding[tokens].view(rows * count, -1)
        split = self.heads + self.kv_heads
        for index, layer in enumerate(self.layers):
            mixed = functional.linear(self._normalize(hidden, layer.norm_in), layer.qkv)
            mixed = mixed.view(rows, count, split + self.kv_heads, self.head_size).transpose(1, 2)
            turned = _rotate(mixed[:, :split], cos, sin)
            keys, values = cache.extend(index, turned[:, self.heads :], mixed[:, split:])
            attended = functional.scaled_dot_product_attention(
                turned[:, : self.heads],
                keys,
                values,
                attn_mask=cache.mask,
                enable_gqa=self.heads != self.kv_heads,
            )
            attended = attended.transpose(1, 2).reshape(rows * count, -1)
            hidden = torch.addmm(hidden, attended, layer.out.t())
            gate = functional.linear(self._normalize(hidden, layer.norm_mid), layer.gate_up)
            gated = functional.silu(gate[:, : self.inner]) * gate[:, self.inner :]
            hidden = torch.addmm(hidden, gated, layer.down.t())
        return self._normalize(hidden.view(rows, count, -1)[:, -1], self.norm)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map [R, D] to [R, E]."""
        return functional.linear(hidden, self.head)

    def _normalize(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, (hidden.shape[-1],), weight, self.eps)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = torch.cat([projection.weight for projection in projections])
        self.out: Tensor = attention.o_proj.weight
        self.gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.down: Tensor = mlp.down_proj.weight
        self.norm_in: Tensor = layer.input_layernorm.weight
        self.norm_mid: Tensor = layer.post_attention_layernorm.weight


class KeyValueCache:
    """Keys and values of every layer, and the mask of the tokens in flight."""

    def __init__(self, llama: Llama, rows: int, positions: int) -> None:
        shape = (rows, llama.kv_heads, positions, llama.head_size)
        self.keys = [torch.zeros(shape) for _ in llama.layers]
        self.values = [torch.zeros(shape) for _ in llama.layers]
        self.used = 0
        self.mask = torch.empty(0)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; return all that are stored."""
        end = self.used + keys.shape[2]
        self.keys[layer][:, :, self.used : end] = keys
        self.values[layer][:, :, self.used : end] = values
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows."""
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos + turned * sin
