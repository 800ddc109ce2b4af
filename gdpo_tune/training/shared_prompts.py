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

`PromptDecoder` samples in the same way: it holds each prompt's keys and values once, and all
completions of a prompt look at them together.

Shapes: N completions, T prompt and C completion positions as TRL pads them; S positions of the row,
n of them predict a token; H heads, D their size; a group has g completions, the longest of c.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gdpo_tune.training.decoding import list_distinct, pad_left

ATTENTION = "gdpo_tune_shared_prompts"
"""Name under which Transformers knows the attention function."""
CHOSEN = ("eager", "flash_attention_2")
"""Other values of `model.attention`, which compute all that is not taken apart."""
LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers, as a config names them, that look at other positions through attention alone."""
HALVES = (torch.bfloat16, torch.float16)
FEWER_KEYS: dict[str, Any] = {
    n: True for n in signature(varlen_attn).parameters if n == "enable_gqa"
}
"""Argument that allows fewer heads of keys than of queries: torch 2.11 needs none for it."""
_taken_apart: ContextVar[bool] = ContextVar("taken_apart", default=False)
"""True while a model computes a row that is taken apart, and needs no mask."""


@dataclass(frozen=True)
class Group:
    """A prompt and its completions in a row."""

    start: int
    """First position of the prompt."""
    prompt: int
    """Tokens of the prompt."""
    completions: Sequence[tuple[int, int]]
    """First position and number of tokens of each completion."""
    device: torch.device

    @cached_property
    def places(self) -> Tensor:
        """Position in the row of each completion's tokens, [g, c]; where one is shorter, any."""
        longest = max(1, *(count for _, count in self.completions))
        first, count = torch.tensor(self.completions)[:, :, None].unbind(1)
        steps = torch.arange(longest)[None]
        return torch.where(steps < count, first + steps, self.start).to(self.device)

    @cached_property
    def present(self) -> Tensor:
        """Index of the places of tokens in the flattened [g, c]."""
        width = self.places.shape[1]
        rows = enumerate(self.completions)
        kept = [row * width + step for row, (_, count) in rows for step in range(count)]
        return torch.tensor(kept, dtype=torch.long, device=self.device)  # also of none


@dataclass(frozen=True)
class Texts:
    """Each prompt, and each completion after its prompt, as a text of its own.

    What is asked of the texts, in their order, is the row itself.
    """

    seen: Tensor
    """Positions in the row of all texts, one after the other."""
    bounds: tuple[Tensor, Tensor]
    """Where each text begins in the row and in `seen`, and where the last one ends."""
    longest: tuple[int, int]
    """Most tokens that one text has in each of them."""


@dataclass(frozen=True)
class Row:
    """All groups of a micro-batch in one row."""

    tokens: Tensor
    """[S]"""
    positions: Tensor
    """[S], counted from the start of each prompt."""
    groups: tuple[Group, ...]
    sources: Tensor
    """Position of each hidden state that predicts a completion's token, [n]."""
    targets: Tensor
    """The tokens that they predict, [n]."""
    slots: Tensor
    """Index of these tokens in the flattened [N, C], [n]."""
    segments: Tensor
    """[S]: 0 in a prompt, 1, 2, ... in its completions, -1 at padding."""

    @cached_property
    def texts(self) -> Texts:
        """The texts of the row, for kernels that take texts of different lengths."""
        pieces: list[Tensor] = []
        counts: list[tuple[int, int]] = []
        for group in self.groups:
            prompt = torch.arange(group.start, group.start + group.prompt)
            pieces.append(prompt)
            counts.append((group.prompt, group.prompt))
            for first, count in group.completions:
                pieces += [prompt, torch.arange(first, first + count)]
                counts.append((count, group.prompt + count))
        device = self.tokens.device
        lengths = torch.tensor([(0, 0), *counts])
        asked, seen = lengths.cumsum(0).to(device, torch.int32).unbind(1)
        asked_most, seen_most = lengths.amax(0).tolist()
        bounds = asked.contiguous(), seen.contiguous()
        return Texts(torch.cat(pieces).to(device), bounds, (asked_most, seen_most))

    def scatter(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Put values [n] of the completions' tokens where they stand in `shape` (N, C), else 0."""
        return values.new_zeros(shape).view(-1).index_put((self.slots,), values).view(shape)


class UnknownAttentionError(Exception):
    """A layer asks for attention that is not computed here."""


def find_obstacle(model: Any) -> str:
    """Return why prompts cannot be shared in a model; empty if they can.

    `model` is a causal language model of Transformers, with adapters or without.
    """
    model = _get_policy(model)
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())} - LAYERS
    if kinds:
        return f"it has layers of another kind than attention ({', '.join(sorted(kinds))})"
    if getattr(model, "_is_stateful", False):
        return "it is recurrent"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    # "eager" of an architecture without "sdpa" may compute what is not computed here.
    replaced = ("sdpa", ATTENTION, *(CHOSEN if model._supports_sdpa else ()))
    if config._attn_implementation not in replaced:
        return f"its attention is {config._attn_implementation}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention has a soft cap"
    return ""


def enable(model: Any) -> None:
    """Let a model that `find_obstacle` accepts take rows apart; otherwise it computes as before."""
    model = _get_policy(model)
    network, own = model.base_model, model.config.get_text_config()._attn_implementation
    if _keep_sources in network._forward_hooks.values():
        return
    model.set_attn_implementation(ATTENTION)
    network.register_forward_hook(_keep_sources, with_kwargs=True)
    if own in CHOSEN:
        choose = partial(_choose_attention, own=own)
        network.register_forward_pre_hook(choose, with_kwargs=True)


def _get_policy(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


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
            input_ids=row.tokens[None],
            position_ids=row.positions[None],
            shift_labels=row.targets[None],
            fused_lm_head=True,
            shared_prompts=row,
            **more,
        )
    shape = (len(input_ids), completion_width)
    entropies = None if outputs.entropy is None else row.scatter(outputs.entropy[0], shape)
    return row.scatter(outputs.log_probs[0], shape), entropies, outputs.aux_loss


def build_row(
    input_ids: Tensor, attention_mask: Tensor, completion_width: int, limit: int = 0
) -> Row:
    """Put padded completions into a row, those of equal prompts in one group.

    With a `limit`, completions that would make a group longer than so many tokens go into another
    one of the same prompt, and groups are padded to equal lengths.
    """
    width = input_ids.shape[1] - completion_width
    starts = (width - attention_mask[:, :width].sum(dim=1)).tolist()
    lengths: list[int] = attention_mask[:, width:].sum(dim=1).tolist()
    members: dict[tuple[int, ...], list[int]] = {}
    rows: list[list[int]] = input_ids.tolist()
    for index, tokens in enumerate(rows):
        members.setdefault(tuple(tokens[starts[index] : width]), []).append(index)
    most = max(1, (limit - width) // max(1, *lengths)) if limit else len(rows)
    parts = [
        (prompt, indices[first : first + most])
        for prompt, indices in members.items()
        for first in range(0, len(indices), most)
    ]
    padded = max(len(p) + sum(lengths[i] for i in part) for p, part in parts) if limit else 0
    names = ("tokens", "positions", "segments", "sources", "targets", "slots")
    lists: dict[str, list[int]] = {name: [] for name in names}
    groups: list[Group] = []
    device, row = input_ids.device, lists["tokens"]
    for prompt, indices in parts:
        start = len(row)
        row += prompt
        lists["positions"] += range(len(prompt))
        lists["segments"] += [0] * len(prompt)
        completions: list[tuple[int, int]] = []
        for segment, index in enumerate(indices, start=1):
            first, count = len(row), lengths[index]
            completions.append((first, count))
            completion = rows[index][width : width + count]
            row += completion
            lists["positions"] += range(len(prompt), len(prompt) + count)
            lists["segments"] += [segment] * count
            if count:
                # The prompt's last token predicts the first token; each token predicts the next.
                lists["sources"] += [start + len(prompt) - 1, *range(first, first + count - 1)]
                lists["targets"] += completion
                slot = index * completion_width
                lists["slots"] += range(slot, slot + count)
        padding = max(0, start + padded - len(row))
        row += [0] * padding
        lists["positions"] += [0] * padding
        lists["segments"] += [-1] * padding
        groups.append(Group(start, len(prompt), completions, device))
    # A long type also where no completion has a token, as those that were cut may have none.
    tensors = {n: torch.tensor(v, dtype=torch.long, device=device) for n, v in lists.items()}
    return Row(groups=tuple(groups), **tensors)


@dataclass(frozen=True)
class HeldPrompts:
    """Keys and values of U prompts, W positions wide, and the b completions that go on from them.

    Attention is computed in float32: a cache of so many tokens is read once for all completions of
    a prompt, so it is small beside the weights.
    """

    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer, [U, heads, W, D] each."""
    positions: Tensor
    """Positions in each prompt, [U, W]; beyond every text at padding."""
    prompts: Tensor
    """The prompt of each completion, [b]."""
    now: Tensor
    """Position of the token of each completion that is in flight, [b]."""

    @cached_property
    def members(self) -> tuple[Tensor, Tensor]:
        """Completions of each prompt, [U, g], any where one has fewer; and the place of each."""
        of = self.prompts.tolist()
        rows: list[list[int]] = [[] for _ in self.positions]
        for row, prompt in enumerate(of):
            rows[prompt].append(row)
        most = max(map(len, rows))
        places = [prompt * most + rows[prompt].index(row) for row, prompt in enumerate(of)]
        padded = [found + [0] * (most - len(found)) for found in rows]
        device = self.prompts.device
        return torch.tensor(padded, device=device), torch.tensor(places, device=device)

    def keep(self, rows: Tensor) -> HeldPrompts:
        """Keep these completions, and the prompts that they need."""
        needed, prompts = self.prompts[rows].unique(return_inverse=True)
        layers, positions = self.layers, self.positions
        if len(needed) < len(positions):
            layers = [(keys[needed], values[needed]) for keys, values in layers]
            positions = positions[needed]
        return HeldPrompts(layers, positions, prompts, self.now[rows])

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        """Attend from scaled tokens [b, H, 1, D] to prompts and own tokens [b, heads, t, D]."""
        (members, places), (keys, values) = self.members, self.layers[layer]
        count, heads, width, own = len(query), key.shape[1], keys.shape[2], key.shape[2]

        def gather(of_prompts: Tensor) -> Tensor:  # [U, heads, g * r, x] -> [b, heads, r, x]
            parts = of_prompts.unflatten(2, (members.shape[1], -1)).transpose(1, 2)
            return parts.flatten(0, 1)[places]

        def join(of_rows: Tensor) -> Tensor:  # [b, heads, r, x] -> [U, heads, g * r, x]
            return of_rows[members].transpose(1, 2).flatten(2, 3)

        with torch.autocast(query.device.type, enabled=False):
            asked = query.view(count, heads, -1, query.shape[-1])
            before = gather(join(asked) @ keys.transpose(2, 3))
            scores = torch.cat([before, asked @ key.float().transpose(2, 3)], dim=-1)
            steps = torch.arange(1 - own, 1, device=query.device)
            seen = torch.cat([self.positions[self.prompts], self.now[:, None] + steps], dim=1)
            hidden = seen > self.now[:, None]
            if window is not None:
                hidden |= seen <= self.now[:, None] - window
            weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(dim=-1)
            of_prompt, of_own = weights.split([width, own], dim=-1)
            found = gather(join(of_prompt) @ values) + of_own @ value.float()
        return found.reshape(count, 1, query.shape[1], -1)


class PromptDecoder:
    """A policy of Transformers that has read prompts, equal ones once; see `Decoder`."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], padding: int) -> None:
        """Read B prompts with a model that `find_obstacle` accepts; `enable` it."""
        enable(model)
        self._model = model
        distinct, rows = list_distinct(prompts)
        tokens, present = (each.to(model.device) for each in pad_left(distinct, padding))
        positions = present.cumsum(dim=1) - 1
        read = model(
            input_ids=tokens,
            attention_mask=present.long(),
            position_ids=positions.clamp(min=0),
            past_key_values=(cache := DynamicCache()),  # whole prompts, where windows slide too
            use_cache=True,
            logits_to_keep=1,
        )
        of, layers = torch.tensor(rows, device=model.device), cast("Any", cache.layers)
        self.logits: Tensor = read.logits[of, -1]
        self._prompts = HeldPrompts(
            [(layer.keys.float(), layer.values.float()) for layer in layers],
            positions.masked_fill(~present, torch.iinfo(positions.dtype).max),
            of,
            positions[of, -1],
        )
        self._own = DynamicCache()

    def keep(self, rows: Tensor) -> None:
        """Forget all completions but these."""
        self._prompts = self._prompts.keep(rows)
        self._own.batch_select_indices(rows)

    def read(self, tokens: Tensor) -> Tensor:
        """Read a token of each completion, [b], and return the logits of the next, [b, E]."""
        self._prompts.now.add_(1)
        with _take_apart():
            outputs = self._model(
                input_ids=tokens[:, None],
                position_ids=self._prompts.now[:, None],
                past_key_values=self._own,
                use_cache=True,
                logits_to_keep=1,
                shared_prompts=self._prompts,
            )
        return outputs.logits[:, -1]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    shared_prompts: Row | HeldPrompts | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as Transformers' `sdpa_attention_forward`, but to each prompt once.

    `query` is [1, H, S, D] of a row, or [b, H, 1, D] of the tokens after held prompts; `key` and
    `value` have as many heads or fewer. The result is [1, S, H, D] or [b, 1, H, D].

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
    if isinstance(shared_prompts, HeldPrompts):
        layer: Any = module.layer_idx
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        found = shared_prompts.attend(layer, query.float() * scale, key, value, window)
        return found.to(_choose_dtype(query)), None
    if not query.is_cuda and _choose_dtype(query) in HALVES:
        # The backward pass of a CPU's attention takes 2.6 times as long in bfloat16.
        more |= {"scaling": scaling, "dropout": dropout, "shared_prompts": shared_prompts}
        with torch.autocast(query.device.type, enabled=False):
            whole = query.float(), key.float(), value.float()
            attended, _ = attend(module, *whole, attention_mask, **more)
        return attended.to(_choose_dtype(query)), None
    asked, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))  # [S, H, D]
    if _has_kernel(asked, values, dropout):
        return _attend_to_texts(asked, keys, values, shared_prompts.texts, window, scaling), None
    settings: dict[str, Any] = {"scale": scaling, "dropout_p": dropout}
    parts: list[Tensor] = []
    for group in shared_prompts.groups:
        end = group.start + group.prompt
        first, *before = (each[:, :, group.start : end] for each in (query, key, value))
        parts.append(_attend_to_last(first, before[0], before[1], window, settings)[0])
        own, *after = (each[group.places].transpose(1, 2) for each in (asked, keys, values))
        seen = [
            torch.cat([one.expand(len(own), -1, -1, -1), other], dim=2)
            for one, other in zip(before, after, strict=True)
        ]
        found = _attend_to_last(own, seen[0], seen[1], window, settings)
        parts.append(found.flatten(0, 1)[group.present])
    return torch.cat(parts)[None], None


def _attend_to_last(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, settings: dict[str, Any]
) -> Tensor:
    """Attend from the last tokens of texts to what is before them, or in a window of each."""
    count, length = query.shape[2], key.shape[2]
    before, mask = length - count, None
    if before or (window is not None and window < length):
        mask = torch.ones(count, length, dtype=torch.bool, device=query.device).tril(before)
        mask = mask if window is None else mask.triu(before - window + 1)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
        **settings,
    ).transpose(1, 2)


def _has_kernel(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Return whether `varlen_attn` takes these heads, [S, H, D]: flash attention on a GPU."""
    size = query.shape[-1]
    fits = size == value.shape[-1] and size % 8 == 0 and size <= 256
    return query.is_cuda and fits and not dropout and _choose_dtype(query) in HALVES


def _choose_dtype(query: Tensor) -> torch.dtype:
    """Return the precision in which autocast lets attention compute."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _attend_to_texts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    texts: Texts,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Attend in all texts at once: two loops of small kernels would take longer than the rest."""
    dtype = _choose_dtype(query)
    key, value = (_Repeat.apply(each.to(dtype), texts.seen) for each in (key, value))
    left = -1 if window is None else window - 1
    attended: Any = varlen_attn(
        query.to(dtype),
        key,
        value,
        *texts.bounds,
        *texts.longest,
        scale=scaling,
        window_size=(left, 0),
        **FEWER_KEYS,
    )
    return attended[None]


class _Repeat(torch.autograd.Function):
    """Rows of a tensor, whose gradients are added up in float32: a prompt gets many of them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(values)
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (rows,), (gradient,) = ctx.saved_tensors, grad_outputs
        total = gradient.new_zeros((ctx.count, *gradient.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, rows, gradient.float()).to(gradient.dtype), None


def _choose_attention(module: Any, args: Any, kwargs: dict[str, Any], own: str) -> None:
    """Let the `own` attention of a model compute a pass that is not taken apart.

    It stays until the next pass, because the backward pass of this one may compute layers again.
    """
    wanted = ATTENTION if kwargs.get("shared_prompts") is not None else own
    if module.config.get_text_config()._attn_implementation != wanted:
        module.set_attn_implementation(wanted)


def _keep_sources(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Keep the hidden states that predict a token, [1, n, width], for the head."""
    row = kwargs.get("shared_prompts")
    if isinstance(row, Row):
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
