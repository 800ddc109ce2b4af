"""Merges: policies whose weights are weighted means of the weights of trained policies.

All parts were trained from one initial policy. Full weights are interpolated in float32, one tensor
at a time. Adapters are joined into one of the sum of their ranks, whose change of the weights is
the weighted mean of their changes; the weights below it are written on request.

Source: Rame et al. 2023, Rewarded soups, arXiv 2306.04488, section 2.2.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.files import explain_full_disk
from gdpo_tune.core.trial_config import TrainedPart
from gdpo_tune.core.trial_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    MARKER,
    TRAINER_STATE_FILE,
    find_adapter,
)
from gdpo_tune.core.trials import check_part_weights
from gdpo_tune.policies.adapters import DTYPE, INITIAL_FILE, join_adapter, read_initial_policy
from gdpo_tune.policies.load_policy import load_policy, restore_base_files
from gdpo_tune.policies.prompt_format import PROMPTS_FILE, TEMPLATE_FILE
from gdpo_tune.training.checkpoints import (
    OPTIMIZER_FILE,
    SCHEDULER_FILE,
    link_or_copy,
    read_checkpoint,
)

LARGEST_FILE = "5GB"
"""A merged policy is written to several files if it is larger."""
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_TRAINING_STATE = (MARKER, OPTIMIZER_FILE, SCHEDULER_FILE, TRAINER_STATE_FILE, "rng_state*.pth")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "README.md", ADAPTER_CONFIG, ADAPTER)
_TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
_PROMPTS = (PROMPTS_FILE, TEMPLATE_FILE)
_NOT_COMPARED = {
    PROMPTS_FILE: {"instructions_text"},  # of a task whose settings may differ
    INITIAL_FILE: {DTYPE},
    "config.json": {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"},
    "tokenizer.json": {"version", "truncation", "padding"},
}
"""Keys of JSON files in which equal policies may differ."""
_ONE_ORIGIN = "merge policies that were trained from one initial policy"


def check_parts(parts: Sequence[TrainedPart], initial: str = "") -> None:
    """Refuse parts that cannot be merged.

    `initial` is the digest of the policy from which all have to have been trained; empty: they only
    have to agree. A checkpoint without a digest agrees with all.

    Raises:
        TrialFailure: a checkpoint is missing or damaged, the weights do not sum to 1, or two parts
            differ in kind, names or shapes of weights, architecture, tokenizer, prompt format or
            initial policy.
    """
    try:
        check_part_weights([part.weight for part in parts])
    except ValueError as error:
        raise TrialFailure(str(error)) from None
    directories = [read_checkpoint(part.checkpoint).path for part in parts]
    for directory in directories[1:]:
        _compare(directories[0], directory)
    for directory in directories:
        recorded = read_initial_policy(directory)
        if initial and recorded and recorded != initial:
            raise TrialFailure(
                f"{directory} was trained from another initial policy than this sweep's: merge "
                "policies that were trained from it"
            )


def write_merge(
    parts: Sequence[TrainedPart],
    directory: Path,
    load_initial: Callable[[], PreTrainedModel] | None = None,
) -> None:
    """Write the merge of parts that `check_parts` accepts as a policy.

    `directory` exists and is empty; it gets the files of a training's last checkpoint, without the
    state of the training. A single part is linked. With `load_initial`, which returns the initial
    policy, the merge of adapters is a whole policy with the adapter in `directory / ADAPTER`.

    Raises:
        DiskFullError: there is no room for it.
        PolicyError: the adapters were trained from another policy.
        TrialFailure: a tensor of integers differs between the parts.
    """
    first, own = parts[0].checkpoint, find_adapter(parts[0].checkpoint)
    with explain_full_disk(directory, "a merged policy"):
        if len(parts) == 1 and own is None:
            _copy_files(first, directory, _TRAINING_STATE, link_or_copy)
            return
        unlike = (*_TRAINING_STATE, *_WEIGHTS, *(() if own is None else ("config.json",)))
        _copy_files(first, directory, unlike, shutil.copyfile)
        if own is None:
            _interpolate_weights(parts, directory)
            return
        target = directory / ADAPTER if load_initial else directory
        target.mkdir(exist_ok=True)
        if len(parts) == 1:
            for file in (ADAPTER_CONFIG, _ADAPTER_WEIGHTS):
                link_or_copy(own / file, target / file)
        else:
            _join_adapters(parts, target)
        if load_initial is not None:
            join_adapter(load_initial(), directory).save_pretrained(directory)


def write_whole_policy(
    adapter: Path,
    directory: Path,
    policy: str,
    revision: str,
    start: Path | None,
    temperature: float,
) -> None:
    """Write what an adapter makes of its base, whole, in the type in which its trial computed.

    The base is a policy, or what its supervised `start` made of it; `temperature` is that by which
    it is judged. `directory` exists and is empty.

    Raises:
        DiskFullError: there is no room for it.
        PolicyError: the adapter was trained from another policy.
        TrialFailure: the adapter's files have changed.
    """
    logging.disable_progress_bar()
    dtype = read_initial_policy(adapter, DTYPE) or "auto"
    parts = (TrainedPart(adapter, 1.0),)
    check_parts(parts)
    base, _ = load_policy(policy, dtype, revision, temperature=temperature, weights=start)
    write_merge(parts, directory, lambda: base)
    with explain_full_disk(directory, "a policy"):
        restore_base_files(directory, policy, revision)


class _Weights:
    """Tensors of safetensors files in a directory, read one at a time; `stack` closes them."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        files = sorted(directory.glob("*.safetensors"))
        opened: list[Any] = [stack.enter_context(safe_open(f, framework="pt")) for f in files]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def list_shapes(self) -> dict[str, list[int]]:
        """Map names to shapes; of the matrices of adapters, without the rank."""
        shapes = {name: f.get_slice(name).get_shape() for name, f in self._files.items()}
        ranked = {".lora_A.": slice(1, None), ".lora_B.": slice(1)}
        ranked |= {".lora_embedding_A": slice(1, None), ".lora_embedding_B": slice(1)}
        for key, kept in ranked.items():
            shapes |= {name: shape[kept] for name, shape in shapes.items() if key in name}
        return shapes


def _compare(first: Path, other: Path) -> None:
    adapters = find_adapter(first), find_adapter(other)
    if (adapters[0] is None) != (adapters[1] is None):
        full, adapter = (first, other) if adapters[0] is None else (other, first)
        raise TrialFailure(
            f"{adapter} is an adapter and {full} has weights of its own: merge policies that were "
            "trained with the same model.lora_rank"
        )
    with ExitStack() as stack:
        ours, theirs = (
            _Weights(adapter or directory, stack).list_shapes()
            for adapter, directory in zip(adapters, (first, other), strict=True)
        )
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            there, missing = (first, other) if name in ours else (other, first)
            raise TrialFailure(f"{there} has a weight {name} and {missing} has none: {_ONE_ORIGIN}")
        if ours[name] != theirs[name]:
            shapes = [" x ".join(map(str, shape)) for shape in (ours[name], theirs[name])]
            raise TrialFailure(
                f"weight {name} is {shapes[0]} in {first} and {shapes[1]} in {other}: {_ONE_ORIGIN}"
            )
    for files, subject in (
        (_TOKENIZER, "tokenizer"),
        (("config.json",), "architecture"),
        (_PROMPTS, "prompt format"),
        ((INITIAL_FILE,), "initial policy"),
    ):
        for file in files:
            if (difference := _find_difference(first / file, other / file)) is not None:
                raise TrialFailure(
                    f"{first} and {other} differ in their {subject} ({difference}): {_ONE_ORIGIN}"
                )


def _find_difference(first: Path, other: Path) -> str | None:
    """Name what differs between two files; None if nothing does, or if one does not exist."""
    if not first.is_file() or not other.is_file():
        return None
    if first.suffix != ".json":
        return None if first.read_bytes() == other.read_bytes() else first.name
    codec = first.name == "tokenizer.json"  # versions write its pairs in two ways
    texts = [
        Tokenizer.from_file(str(f)).to_str() if codec else f.read_text() for f in (first, other)
    ]
    ours, theirs = map(json.loads, texts)
    keys = ours.keys() | theirs.keys()
    if ("rope_parameters" in ours) != ("rope_parameters" in theirs):  # two versions wrote them
        keys = ours.keys() & theirs.keys()
    keys -= _NOT_COMPARED.get(first.name, set())
    different = sorted(key for key in keys if ours.get(key) != theirs.get(key))
    return f"{different[0]} in {first.name}" if different else None


def _copy_files(
    source: Path, target: Path, left_out: Sequence[str], copy: Callable[[Path, Path], object]
) -> None:
    """Copy the files of a directory, and of those in it, whose names match no pattern."""
    for path in sorted(source.iterdir()):
        if any(path.match(pattern) for pattern in left_out):
            continue
        if path.is_dir():
            (target / path.name).mkdir()
            _copy_files(path, target / path.name, (), copy)
        else:
            copy(path, target / path.name)


def _interpolate_weights(parts: Sequence[TrainedPart], directory: Path) -> None:
    with ExitStack() as stack:
        sources = [_Weights(part.checkpoint, stack) for part in parts]
        shares = [part.weight for part in parts]
        empty = {name: torch.empty_like(sources[0][name], device="meta") for name in sources[0]}
        plan = split_torch_state_dict_into_shards(empty, max_shard_size=LARGEST_FILE)
        for file, names in plan.filename_to_tensors.items():
            merged = {n: _interpolate(n, [source[n] for source in sources], shares) for n in names}
            save_file(merged, directory / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        file = directory / "model.safetensors.index.json"
        file.write_text(json.dumps(index), encoding="utf-8")


def _interpolate(name: str, tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the weighted mean in the type of the first tensor, computed in float32."""
    first = tensors[0]
    if not first.is_floating_point():
        if not all(torch.equal(first, tensor) for tensor in tensors):
            raise TrialFailure(f"{name} has no fractions and differs between the parts of a merge")
        return first.clone()
    total = torch.zeros(first.shape)
    for tensor, share in zip(tensors, shares, strict=True):
        total += share * tensor.float()
    return total.to(first.dtype)


def _join_adapters(parts: Sequence[TrainedPart], directory: Path) -> None:
    """Write one adapter whose product B A is the weighted sum of those of the parts.

    A stacks their rows, B their columns, each times weight and scale; its own scale is 1. Rounded
    once to the type in which the parts computed, as they are.
    """
    half = read_initial_policy(parts[0].checkpoint, DTYPE) == "bfloat16"
    adapters = [find_adapter(part.checkpoint) or part.checkpoint for part in parts]
    configs = [json.loads((path / ADAPTER_CONFIG).read_text("utf-8")) for path in adapters]
    scales = [
        part.weight * config["lora_alpha"] / config["r"]
        for part, config in zip(parts, configs, strict=True)
    ]
    joined: dict[str, Tensor] = {}
    with ExitStack() as stack:
        sources = [_Weights(path, stack) for path in adapters]
        for name in sources[0]:
            matrices = [source[name].float() for source in sources]
            if ".lora_B." in name or ".lora_embedding_B" in name:
                scaled = [s * matrix for s, matrix in zip(scales, matrices, strict=True)]
                joined[name] = torch.cat(scaled, dim=1)
            else:
                joined[name] = torch.cat(matrices, dim=0)
    rank = sum(config["r"] for config in configs)
    config = {**configs[0], "r": rank, "lora_alpha": rank}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    joined = {name: each.bfloat16() if half else each for name, each in joined.items()}
    save_file(joined, directory / _ADAPTER_WEIGHTS, metadata={"format": "pt"})
