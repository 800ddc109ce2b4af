"""Sizes of policies on the Hub that recipes or docs name, before they are downloaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gdpo_tune.core.gpu_memory import PolicyShapes


def find_known_size(name: str) -> PolicyShapes | None:
    """Return the size of a policy on the Hub that recipes or docs here name; None of another."""
    match = re.fullmatch(r"Qwen/Qwen2\.5-(?:Coder-|Math-)?([\d.]+B)(?:-Instruct)?", name)
    shape = _QWEN_2_5.get(match[1]) if match else None
    if re.fullmatch(r"Qwen/Qwen3-0\.6B(?:-Base)?", name):
        shape = _QWEN_3_SMALLEST
    return PolicyShapes(_list_qwen_shapes(shape)) if shape else None


@dataclass(frozen=True)
class _QwenShape:
    """Numbers of `config.json` from which the shapes of every tensor follow."""

    layers: int
    width: int
    inner: int
    queries: int
    keys: int
    vocabulary: int = 151_936
    is_tied: bool = True
    """True if the head is the embedding."""
    normed_head: int = 0
    """Width of a head whose queries and keys are normed, and have no bias; 0 for the opposite."""


_QWEN_2_5 = {
    "0.5B": _QwenShape(24, 896, 4864, 896, 128),
    "1.5B": _QwenShape(28, 1536, 8960, 1536, 256),
    "3B": _QwenShape(36, 2048, 11_008, 2048, 256),
    "7B": _QwenShape(28, 3584, 18_944, 3584, 512, 152_064, is_tied=False),
    "14B": _QwenShape(48, 5120, 13_824, 5120, 1024, 152_064, is_tied=False),
}
_QWEN_3_SMALLEST = _QwenShape(28, 1024, 3072, 2048, 1024, normed_head=128)

KNOWN_POLICIES = (
    *(
        f"Qwen/Qwen2.5-{kind}{size}{ending}"
        for size in _QWEN_2_5
        for kind in ("", "Coder-", "Math-")
        for ending in ("", "-Instruct")
    ),
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-0.6B-Base",
)
"""Policies on the Hub whose size is known, and others of their family."""


def _list_qwen_shapes(shape: _QwenShape) -> dict[str, tuple[int, ...]]:
    width, queries, keys = shape.width, shape.queries, shape.keys
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, width)}
    for layer in range(shape.layers):
        attention, inner = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{attention}.{part}_proj.weight"] = (rows, width)
            if not shape.normed_head:
                shapes[f"{attention}.{part}_proj.bias"] = (rows,)
            elif part != "v":
                shapes[f"{attention}.{part}_norm.weight"] = (shape.normed_head,)
        shapes[f"{attention}.o_proj.weight"] = (width, queries)
        for part in ("gate", "up"):
            shapes[f"{inner}.{part}_proj.weight"] = (shape.inner, width)
        shapes[f"{inner}.down_proj.weight"] = (width, shape.inner)
        for part in ("input", "post_attention"):
            shapes[f"model.layers.{layer}.{part}_layernorm.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    return shapes if shape.is_tied else shapes | {"lm_head.weight": (shape.vocabulary, width)}
