"""The fast CPU sampler: forward pass, sampling and log-probabilities of a small Llama policy.

For a policy of half a million parameters, Transformers spends its time on overhead, not on
arithmetic. Here projections are fused, each distinct prompt is computed once, and finished rows
leave the batch. Greedy output equals that of `generate`.

Shapes: R rows, n tokens of each in flight, D hidden, E entries of the vocabulary. Sampling: B
completions, U distinct prompts. Log-probabilities: N completions, T prompt and C completion
positions as TRL pads them, R packed rows of width S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

from gdpo_tune.training.decoding import list_distinct, pad_left
from gdpo_tune.training.shared_prompts import build_row

MOST_PARAMETERS = 50_000_000
"""In a larger policy arithmetic dominates, and copies of the weights are expensive."""
FIXED_ROPE = ("default", "linear", "llama3")
"""Rotary embeddings whose angles do not depend on the length of the sequence."""


def is_small_llama(model: PreTrainedModel) -> bool:
    """Return whether `LlamaDecoder` computes what this model computes, and is faster."""
    if not isinstance(model, LlamaForCausalLM) or model.device.type != "cpu":
        return False
    if torch.is_autocast_enabled("cpu"):
        return False  # `LlamaDecoder` computes in the precision of the weights
    config: Any = model.config
    return (
        model.dtype == torch.float32
        and model.num_parameters() <= MOST_PARAMETERS
        and config.hidden_act == "silu"
        and not config.attention_bias
        and not config.mlp_bias
        and not config.attention_dropout
        and config.rope_parameters["rope_type"] in FIXED_ROPE
    )


class LlamaDecoder:
    """Llama policy that has read prompts, equal ones once, and reads B completions of them.

    Projections of the same input are fused into one.
    """

    @torch.no_grad()
    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Read B prompts, none of them empty; see `Decoder`.

        `model` is a policy that `is_small_llama` accepts.
        """
        self._config, self._model, self._head = model.config, model.model, model.lm_head.weight
        self._layers = [_Layer(layer) for layer in model.model.layers]
        distinct, indices = list_distinct(prompts)
        tokens, present = pad_left(distinct, 0)
        (count, width), rows = tokens.shape, torch.tensor(indices)
        positions = torch.arange(width + max_new_tokens)
        embedding = self._model.embed_tokens.weight
        self._angles = [each[0] for each in self._model.rotary_emb(embedding, positions[None])]
        sizes = (self._config.num_key_value_heads, len(positions), self._config.head_dim)
        self._cache = [tuple(torch.zeros(count, *sizes) for _ in "kv") for _ in self._layers]
        self._used = 0
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        # Padding attends to itself, because a row of the mask without any entry gives NaN.
        mask = (causal & present[:, None]) | torch.eye(width, dtype=torch.bool)
        hidden = self._forward(tokens, (present.cumsum(dim=1) - 1).clamp(min=0), mask[:, None])
        self._lengths = present.sum(dim=1)
        self._visible = positions >= (width - self._lengths)[:, None]
        self.keep(rows)
        self.logits = functional.linear(hidden[rows], self._head)

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these, which may be repeated."""
        self._lengths, self._visible = self._lengths[rows], self._visible[rows]
        self._cache = [(keys[rows], values[rows]) for keys, values in self._cache]

    def read(self, tokens: Tensor) -> Tensor:
        """Read a token of each row, [b], and return the logits of the next, [b, E]."""
        mask = self._visible[:, None, None, : self._used + 1]
        hidden = self._forward(tokens[:, None], self._lengths[:, None], mask)
        self._lengths = self._lengths + 1
        return functional.linear(hidden, self._head)

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return hidden states [R, D] of the last of `tokens` [R, n]; keep keys and values."""
        rows, count = tokens.shape
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        inner, end = self._config.intermediate_size, self._used + count
        cos, sin = (angle[positions][:, None] for angle in self._angles)
        hidden = self._model.embed_tokens.weight[tokens].view(rows * count, -1)
        for layer, (keys, values) in zip(self._layers, self._cache, strict=True):
            mixed = functional.linear(self._normalize(hidden, layer.norm_in), layer.qkv)
            mixed = mixed.view(rows, count, heads + 2 * kv_heads, -1).transpose(1, 2)
            turned = _rotate(mixed[:, : heads + kv_heads], cos, sin)
            keys[:, :, self._used : end] = turned[:, heads:]
            values[:, :, self._used : end] = mixed[:, heads + kv_heads :]
            attended = functional.scaled_dot_product_attention(
                turned[:, :heads],
                keys[:, :, :end],
                values[:, :, :end],
                attn_mask=mask,
                enable_gqa=heads != kv_heads,
            )
            attended = attended.transpose(1, 2).reshape(rows * count, -1)
            hidden = torch.addmm(hidden, attended, layer.out.t())
            gate = functional.linear(self._normalize(hidden, layer.norm_mid), layer.gate_up)
            gated = functional.silu(gate[:, :inner]) * gate[:, inner:]
            hidden = torch.addmm(hidden, gated, layer.down.t())
        self._used = end
        return self._normalize(hidden.view(rows, count, -1)[:, -1], self._model.norm.weight)

    def _normalize(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, (hidden.shape[-1],), weight, self._config.rms_norm_eps)


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


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos + turned * sin


_WIDTH = 640
"""Tokens in a row. The cost of attention grows with its square, so large groups take more rows."""


def can_pack(model: PreTrainedModel) -> bool:
    """Return whether `compute_log_probs` accepts this model."""
    config: Any = model.config
    return is_small_llama(model) and config._attn_implementation == "sdpa"


def compute_log_probs(
    model: Any, input_ids: Tensor, attention_mask: Tensor, completion_width: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute what `compute_group_log_probs` does, of a model that `can_pack` accepts.

    `temperature` divides the logits. The entropies have no gradient.
    """
    row = build_row(input_ids, attention_mask, completion_width, _WIDTH)
    shape = (len(row.groups), -1)
    segments = row.segments.view(shape)  # [R, S]
    own = segments[:, :, None] == segments[:, None, :]
    # [R, S, S]: a token sees what precedes it in its prompt and completion.
    mask = (own | (segments[:, None, :] == 0)).tril()
    rows = model.model(
        input_ids=row.tokens.view(shape),
        position_ids=row.positions.view(shape),
        attention_mask=mask[:, None],
        use_cache=False,
    ).last_hidden_state
    logits = model.lm_head(rows.flatten(0, 1)[row.sources]) / temperature
    log_probs = logits.log_softmax(dim=-1)
    chosen = log_probs.gather(1, row.targets[:, None])[:, 0]
    with torch.no_grad():
        entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
    whole = (len(input_ids), completion_width)
    return row.scatter(chosen, whole), row.scatter(entropies, whole)
