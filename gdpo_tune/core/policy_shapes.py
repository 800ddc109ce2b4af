"""Shapes of a policy: its tensors and sizes, from its files or where they are known."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gdpo_tune.core.settings import EVERY_LINEAR

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EXPERTS = ".experts."
_HEAD, _EMBEDDING = "lm_head.weight", ("embed_tokens.weight", "wte.weight", "embed_in.weight")
POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_seq_length")
"""Keys of a config.json with the tokens that a policy reads and writes, by architecture."""

TEXT_PART_TYPES = (
    *("dots3_note", "emu3", "llama4", "mllama", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
)
"""Types of policies that read images, and whose text model has a class of its own."""


def find_position_limit(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a policy reads and writes by its config.json; None if it is silent.

    Where positions beyond an original limit have factors of their own, as in Phi-3.5, that limit:
    they would hold for every text of a batch whose longest is beyond it. Source: llama.cpp#24823.
    """
    limit, switching = _read_size(config, *POSITION_KEYS), ("longrope", "dynamic")
    for section in _list_sections(config):
        for rope in (section.get("rope_parameters"), section.get("rope_scaling")):
            if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in switching:
                own = {**config, **rope}
                limit = _read_size(own, "original_max_position_embeddings") or limit
    return limit or None


def find_expert_problem(names: Iterable[str], targets: Sequence[str]) -> str:
    """Return why adapters on all linear modules would miss some of a policy's tensors; often empty.

    Source: unsloth#5345; Transformers holds the experts of a layer as one parameter, on which PEFT
    puts no adapter, or one that it cannot join or write, by its version.
    """
    if EVERY_LINEAR not in targets or not any(_EXPERTS in name for name in names):
        return ""
    return (
        f"model.lora_targets = [{EVERY_LINEAR}]: the policy is a mixture of experts, which get no "
        "adapters that PEFT can train and write\n    fix: name the modules of attention, --set "
        "'model.lora_targets=[q_proj, k_proj, v_proj, o_proj]', or --set model.lora_rank=0"
    )


def find_naming_problem(config: Mapping[str, Any]) -> str:
    """Return why vLLM would not know the modules of a policy's adapters; often empty.

    `AutoModelForCausalLM` loads the text model of these policies alone, and vLLM the architecture
    that config.json names, whose modules have other names. Source: vllm#34186, vllm#48019.
    """
    if config.get("model_type") not in TEXT_PART_TYPES or "text_config" not in config:
        return ""
    return (
        f"model.lora_rank: the policy also reads images ({config['model_type']}), its text model "
        "is trained, and vLLM knows its modules by other names\n    fix: write the text model, "
        "AutoModelForCausalLM.from_pretrained(POLICY).save_pretrained(DIRECTORY), and train that; "
        "or --set rollout.engine=transformers, or --set model.lora_rank=0"
    )


def _list_sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the section of the text model, which policies that read images have, and `config`."""
    nested: Any = config.get("text_config")
    return [nested, config] if isinstance(nested, Mapping) else [config]


def _read_size(config: Mapping[str, Any], *keys: str) -> int:
    """Return the size under one of `keys`, which differ by architecture; 0 if there is none."""
    sizes = [section.get(key) for section in _list_sections(config) for key in keys]
    return next((size for size in sizes if type(size) is int and size > 0), 0)


@dataclass(frozen=True)
class PolicyShapes:
    """Shapes of a policy's tensors, and sizes from them or from its config.json.

    Not all tensors tell: some architectures store queries, keys and values as one, or the halves of
    the feed-forward network. And not every config.json has the defaults of its architecture. What
    neither tells is 0.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Name of a tensor, as in the policy's files -> its shape."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The policy's config.json."""

    @property
    def parameters(self) -> int:
        """Parameters of the whole policy."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len({match[1] for match in map(_LAYER.search, self.shapes) if match})

    @property
    def parameters_outside_layers(self) -> int:
        """Parameters that FSDP2 gathers together: embedding, head and last norm."""
        inside = (math.prod(shape) for name, shape in self.shapes.items() if _LAYER.search(name))
        return self.parameters - sum(inside)

    @property
    def vocabulary(self) -> int:
        """Tokens of the vocabulary."""
        found = (shape[0] for name, shape in self.shapes.items() if name.endswith(_EMBEDDING))
        return next(found, 0) or _read_size(self.config, "vocab_size")

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state."""
        found = (shape[1] for name, shape in self.shapes.items() if name.endswith(_EMBEDDING))
        return next(found, 0) or _read_size(self.config, "hidden_size", "n_embd", "d_model")

    @property
    def intermediate_size(self) -> int:
        """Width of a layer's feed-forward network."""
        keys = "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"
        return _read_size(self.config, *keys) or 4 * self.hidden_size

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of the KV cache per token: keys and values of every layer."""
        ends = (".k_proj.weight", ".v_proj.weight")
        if found := sum(shape[0] for name, shape in self.shapes.items() if name.endswith(ends)):
            return found
        heads = _read_size(self.config, "num_attention_heads", "n_head", "n_heads")
        width = _read_size(self.config, "head_dim") or self.hidden_size // max(1, heads)
        kept = _read_size(self.config, "num_key_value_heads", "num_kv_heads") or heads
        return 2 * self.layers * width * kept

    def count_adapter_parameters(self, rank: int, targets: Sequence[str] = (EVERY_LINEAR,)) -> int:
        """Return the trained parameters of LoRA: two factors for each module with an adapter.

        Experts have none: Transformers holds all of a layer as one parameter, which PEFT leaves.
        """
        ends = (".weight",) if EVERY_LINEAR in targets else tuple(f".{t}.weight" for t in targets)
        return sum(
            rank * sum(shape)
            for name, shape in self.shapes.items()
            if len(shape) == 2
            and _EXPERTS not in name
            and f".{name}".endswith(ends)
            and not name.endswith((_HEAD, *_EMBEDDING))
        )

    def count_slot_parameters(self, rank: int) -> int:
        """Return the parameters of an adapter's slot in vLLM, whatever modules the trial adapts.

        A slot spans every linear module and every expert. Of architectures that allow it, such as
        Llama and Qwen3, it also spans embedding and head, even if they are tied. They count for
        every policy, because the names of tensors do not tell.

        Source: `LoRAModelManager._create_lora_modules` and `FusedMoEWithLoRA` of vLLM 0.31.
        """
        count = 2 * rank * (self.vocabulary + self.hidden_size)
        count += self.count_adapter_parameters(rank)
        for name, shape in self.shapes.items():
            if _EXPERTS in name and len(shape) > 1:
                # Gate and up have a factor each that reads the hidden state.
                second = self.hidden_size if "gate_up" in name else 0
                count += math.prod(shape[:-2]) * rank * (sum(shape[-2:]) + second)
        return count


def find_known_size(name: str) -> PolicyShapes | None:
    """Return the shapes of a policy on the Hub that recipes or docs here name; None of another."""
    match = re.fullmatch(r"Qwen/Qwen2\.5-(?:Coder-|Math-)?([\d.]+B)(?:-Instruct)?", name)
    shape = _QWEN_2_5.get(match[1]) if match else None
    if re.fullmatch(r"Qwen/Qwen3-0\.6B(?:-Base)?", name):
        shape = _QWEN_3_SMALLEST
    return shape.describe() if shape else None


@dataclass(frozen=True)
class _QwenShape:
    """Dimensions from `config.json`, from which the shapes of every tensor follow."""

    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int = 151_936
    is_tied: bool = True
    """True if the head is the embedding."""
    normed_head: int = 0
    """Size of a head whose queries and keys are normed, and have no bias; 0 for the opposite."""

    def describe(self) -> PolicyShapes:
        hidden, ends = self.hidden, (self.vocabulary, self.hidden)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": ends}
        for layer in range(self.layers):
            attention, inner = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
            for part, rows in (("q", self.queries), ("k", self.keys), ("v", self.keys)):
                shapes[f"{attention}.{part}_proj.weight"] = (rows, hidden)
                if not self.normed_head:
                    shapes[f"{attention}.{part}_proj.bias"] = (rows,)
                elif part != "v":
                    shapes[f"{attention}.{part}_norm.weight"] = (self.normed_head,)
            shapes[f"{attention}.o_proj.weight"] = (hidden, self.queries)
            for part in ("gate", "up"):
                shapes[f"{inner}.{part}_proj.weight"] = (self.intermediate, hidden)
            shapes[f"{inner}.down_proj.weight"] = (hidden, self.intermediate)
            for part in ("input", "post_attention"):
                shapes[f"model.layers.{layer}.{part}_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        shapes |= {} if self.is_tied else {"lm_head.weight": ends}
        return PolicyShapes(shapes, {"intermediate_size": self.intermediate})


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
