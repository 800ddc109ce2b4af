"""Log-probabilities of completions with each prompt computed once, for any decoder.

A step has many completions of each prompt, and a padded batch computes the prompt with every one of
them. Here all groups of a micro-batch stand in one row without padding: a prompt, its completions,
the next prompt. Attention takes the row apart. A prompt is causal in itself. A completion sees its
prompt and itself, from the position after the prompt on. All other layers work token by token.

    enable(model)                        # before anything wraps the model
    compute_group_log_probs(model, ...)  # instead of TRL's padded forward pass

The attention function is registered in Transformers' `AttentionInterface`. Without a row that is
taken apart it computes what "sdpa" does, so that sampling and evaluation are as before. TRL's fused
head then sees only the hidden states that predict a completion's token.

Source: Liu et al. 2025, Prefix Grouper, arXiv 2506.05433; gradients are those of the padded batch,
because what the completions of a group send back to their prompt adds up.

Shapes: N completions, T prompt and C completion positions as TRL pads them; S positions of the row,
n of them predict a token; H heads, D their size; a group has g completions, the longest of c.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "gdpo_tune_shared_prompts"
"""Name under which Transformers knows the attention function."""
LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers, as a config names them, that look at other positions through attention alone."""
_taken_apart: ContextVar[bool] = ContextVar("taken_apart", default=False)
"""True while a model computes a row that is taken apart, and needs no mask."""


@dataclass(frozen=True)
class Group:
    """A prompt and its completions in a row."""

    start: int
    """First position of the prompt."""
    prompt: int
    """Tokens of the prompt."""
    places: Tensor
    """Position in the row of each completion's tokens, [g, c]; where one is shorter, any."""
    present: Tensor
    """True at the places of tokens, False at the others, [g, c]."""


@dataclass(frozen=True)
class Row:
    """All groups of a micro-batch in one row."""

    tokens: Tensor
    """[1, S]"""
    positions: Tensor
    """[1, S], counted from the start of each prompt."""
    groups: tuple[Group, ...]
    sources: Tensor
    """Position of each hidden state that predicts a completion's token, [n]."""
    targets: Tensor
    """The tokens that they predict, [1, n]."""
    slots: Tensor
    """Index of these tokens in the flattened [N, C], [n]."""


class UnknownAttentionError(Exception):
    """A layer asks for attention that is not computed here."""


def find_obstacle(model: Any) -> str:
    """Return why prompts cannot be shared in a model; empty if they can.

    `model` is a causal language model of Transformers, without adapters.
    """
    config = model.config.get_text_config()
    if memory := find_other_memory(model):
        return memory
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    if config._attn_implementation not in ("sdpa", ATTENTION):
        return f"its attention is {config._attn_implementation}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention has a soft cap"
    return ""


def find_other_memory(model: Any) -> str:
    """Return what a policy remembers of a text besides keys and values; empty if nothing."""
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())} - LAYERS
    if kinds:
        return f"it has layers of another kind than attention ({', '.join(sorted(kinds))})"
    return "it is recurrent" if getattr(model, "_is_stateful", False) else ""


def enable(model: Any) -> None:
    """Let a model that `find_obstacle` accepts take rows apart; otherwise it computes as before.

    Trials that share a process may share a model, so it may have been enabled before.
    """
    if model.config.get_text_config()._attn_implementation == ATTENTION:
        return
    model.set_attn_implementation(ATTENTION)
    model.base_model.register_forward_hook(_keep_sources, with_kwargs=True)


def compute_group_log_probs(
    model: Any, input_ids: Tensor, attention_mask: Tensor, completion_width: int, **more: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute what TRL's forward pass computes, up to rounding.

    Args:
        model: a causal language model with TRL's fused head, in which `enable` was called; it may
            be wrapped.
        input_ids: [N, T + C], prompts padded on the left, completions on the right.
        attention_mask: [N, T + C], 1 for a token and 0 for padding.
        completion_width: C.
        more: further arguments of the forward pass.

    Returns:
        Log-probabilities of the completions' tokens, with gradient, and entropies in nats, if the
        head computes them, both [N, C] and 0 at padding; and the auxiliary loss of experts.
    """
    row = build_row(input_ids, attention_mask, completion_width)
    with _take_apart():
        outputs = model(
            input_ids=row.tokens,
            position_ids=row.positions,
            shift_labels=row.targets,
            fused_lm_head=True,
            shared_prompts=row,
            **more,
        )
    shape = (len(input_ids), completion_width)

    def scatter(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return values.new_zeros(shape).view(-1).index_put((row.slots,), values[0]).view(shape)

    log_probs = scatter(outputs.log_probs)
    assert log_probs is not None, "the head computes them"
    return log_probs, scatter(outputs.entropy), outputs.aux_loss


def build_row(input_ids: Tensor, attention_mask: Tensor, completion_width: int) -> Row:
    """Put padded completions into a row, those of equal prompts in one group."""
    width = input_ids.shape[1] - completion_width
    starts = (width - attention_mask[:, :width].sum(dim=1)).tolist()
    lengths: list[int] = attention_mask[:, width:].sum(dim=1).tolist()
    members: dict[tuple[int, ...], list[int]] = {}
    rows: list[list[int]] = input_ids.tolist()
    for index, tokens in enumerate(rows):
        members.setdefault(tuple(tokens[starts[index] : width]), []).append(index)
    row: list[int] = []
    positions: list[int] = []
    groups: list[Group] = []
    sources: list[int] = []
    targets: list[int] = []
    slots: list[int] = []
    device = input_ids.device
    for prompt, indices in members.items():
        start, longest = len(row), max(1, *(lengths[index] for index in indices))
        row += prompt
        positions += range(len(prompt))
        firsts: list[int] = []
        for index in indices:
            first, count = len(row), lengths[index]
            firsts.append(first)
            completion = rows[index][width : width + count]
            row += completion
            positions += range(len(prompt), len(prompt) + count)
            if count:
                # The prompt's last token predicts the first token; each token predicts the next.
                sources += [start + len(prompt) - 1, *range(first, first + count - 1)]
                targets += completion
                slots += range(index * completion_width, index * completion_width + count)
        counts = torch.tensor([[lengths[index]] for index in indices], device=device)
        steps = torch.arange(longest, device=device)[None]
        present = steps < counts
        places = torch.tensor(firsts, device=device)[:, None] + steps
        groups.append(Group(start, len(prompt), torch.where(present, places, start), present))
    tensors = [torch.tensor(each, device=device) for each in (sources, targets, slots)]
    return Row(
        torch.tensor([row], device=device),
        torch.tensor([positions], device=device),
        tuple(groups),
        tensors[0],
        tensors[1][None],
        tensors[2],
    )


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    shared_prompts: Row | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as Transformers' `sdpa_attention_forward`, to a row's own groups if there is one.

    `query` is [1, H, S, D], `key` and `value` have as many heads or fewer; the result is
    [1, S, H, D].

    Raises:
        UnknownAttentionError: the layer asks for what this function does not compute.
    """
    if shared_prompts is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if more.get(name) is not None:
            raise UnknownAttentionError(f"its attention has {name}")
    window: int | None = more.get("sliding_window")
    settings: dict[str, Any] = {
        "scale": scaling,
        "dropout_p": dropout,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    attended: list[Tensor] = []
    for group in shared_prompts.groups:
        end = group.start + group.prompt
        asked, keys, values = (each[:, :, group.start : end] for each in (query, key, value))
        mask = (
            None
            if window is None or window >= group.prompt
            else _build_mask(0, group.prompt, window, query.device)
        )
        prompt = functional.scaled_dot_product_attention(
            asked, keys, values, attn_mask=mask, is_causal=mask is None, **settings
        )
        attended.append(prompt[0].transpose(0, 1))
        count, longest = group.places.shape
        own = [each[0][:, group.places].transpose(0, 1) for each in (query, key, value)]
        seen = [
            torch.cat([before.expand(count, -1, -1, -1), after], dim=2)
            for before, after in zip((keys, values), own[1:], strict=True)
        ]
        mask = _build_mask(group.prompt, longest, window, query.device)
        found = functional.scaled_dot_product_attention(own[0], *seen, attn_mask=mask, **settings)
        attended.append(found.transpose(1, 2)[group.present])
    return torch.cat(attended)[None], None


def _build_mask(before: int, count: int, window: int | None, device: torch.device) -> Tensor:
    """Return whether each of `count` tokens after `before` others sees a token, [count, both]."""
    mask = torch.ones(count, before + count, dtype=torch.bool, device=device).tril(before)
    return mask if window is None else mask.triu(before - window + 1)


def _keep_sources(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Keep the hidden states that predict a token, [1, n, width], for the head."""
    row: Row | None = kwargs.get("shared_prompts")
    if row is not None:
        output.last_hidden_state = output.last_hidden_state[:, row.sources]
    return output


def _choose_mask(*arguments: Any, **keywords: Any) -> Any:
    return None if _taken_apart.get() else sdpa_mask(*arguments, **keywords)


@contextmanager
def _take_apart() -> Generator[None]:
    token = _taken_apart.set(True)
    try:
        yield
    finally:
        _taken_apart.reset(token)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, _choose_mask)
