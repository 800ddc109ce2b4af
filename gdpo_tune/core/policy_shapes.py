"""Shapes of a policy: its tensors, from its files or where they are known, and its positions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdpo_tune.core.settings import EVERY_LINEAR

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_seq_length")
"""Keys of a config.json with the tokens that a policy reads and writes, by architecture."""


def find_position_limit(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a policy reads and writes by its config.json; None if it is silent.

    A policy that also reads images has its limit in the section of its text model.
    """
    nested: Any = config.get("text_config")
    sections = [config, nested] if isinstance(nested, Mapping) else [config]
    limits = [section.get(key) for section in sections for key in POSITION_KEYS]
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


@dataclass(frozen=True)
class PolicyShapes:
    """Shapes of a policy's tensors, named as in its files; what names do not tell is 0."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def parameters(self) -> int:
        """Numbers of the whole policy."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len({match[1] for match in map(_LAYER.search, self.shapes) if match})

    @property
    def outer(self) -> int:
        """Numbers outside of layers, which FSDP2 gathers together: embedding, head, last norm."""
        inside = (math.prod(shape) for name, shape in self.shapes.items() if _LAYER.search(name))
        return self.parameters - sum(inside)

    @property
    def vocabulary(self) -> int:
        """Tokens of the vocabulary."""
        return self._get_first(_EMBEDDING)[0]

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state."""
        return self._get_first(_EMBEDDING)[1]

    @property
    def intermediate_size(self) -> int:
        """Numbers between the two halves of a layer's feed-forward part."""
        return self._get_first("gate_proj.weight")[0]

    @property
    def cached(self) -> int:
        """Numbers in the cache of one token: keys and values of every layer."""
        ends = ("k_proj.weight", "v_proj.weight")
        return sum(shape[0] for name, shape in self.shapes.items() if name.endswith(ends))

    def count_adapter_numbers(self, rank: int, targets: Sequence[str] = (EVERY_LINEAR,)) -> int:
        """Return the trained numbers of LoRA: two factors for each module that has an adapter."""

        def is_target(name: str) -> bool:
            if name.endswith((_HEAD, _EMBEDDING)) or not name.endswith(".weight"):
                return False
            module = f".{name.removesuffix('.weight')}"
            return EVERY_LINEAR in targets or any(module.endswith(f".{each}") for each in targets)

        matrices = [shape for name, shape in self.shapes.items() if is_target(name)]
        return sum(rank * sum(shape) for shape in matrices if len(shape) == 2)

    def _get_first(self, end: str) -> tuple[int, ...]:
        found = (shape for name, shape in self.shapes.items() if name.endswith(end))
        return next(found, (0, 0))


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
