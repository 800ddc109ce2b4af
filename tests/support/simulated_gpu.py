"""A step of a trial's trainer on a simulated GPU: fake tensors, whose bytes are counted.

The policy, the trainer, its loss, the recomputation, the backward pass and AdamW are real; tensors
have shapes and no values. What a GPU computes in kernels of its own is as there: attention by
`varlen_attn`, and TRL's head without the arrays of its fallback on a CPU. What these kernels
allocate inside is not counted, nor what torch's allocator loses to fragments.

Source: torch's FakeTensorMode; `InputBuffer::accumulate` of its autograd engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl.kernels.chunked_logprob
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Trainer,
)

from gdpo_tune.core.gpu_memory import TrialMemory
from gdpo_tune.core.policy_shapes import PolicyShapes
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.training import micro_batches, shared_prompts
from gdpo_tune.training.lora import build_adapter_config
from gdpo_tune.training.trainer import GDPOTrainer
from gdpo_tune.training.trl_arguments import build_trainer_arguments, choose_weights_dtype
from tests.support.training import SETTINGS, build_trial_config

MICRO_BATCHES = 2
ATEN = torch.ops.aten
RESIZE = torch.UntypedStorage.resize_


class PeakMemory(TorchDispatchMode):
    """Bytes of all storages that are alive, and their peak.

    A backward pass adds gradients of a weight in place: the engine of autograd does so with all but
    subclasses of tensors, such as fake ones.
    """

    def __init__(self):
        super().__init__()
        self.seen, self.now, self.peak = WeakIdKeyDictionary(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it asks again for the part of this process
        if func is ATEN._local_scalar_dense.default:  # the value of a metric
            return 1.0 if args[0].is_floating_point() else 1
        if func is ATEN.add.Tensor and not torch.is_grad_enabled() and args[0].dim() == 2:
            func = ATEN.add_.Tensor
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor) and tensor.untyped_storage() not in self.seen:
                storage = tensor.untyped_storage()
                self.seen[storage] = size = [0]
                self.resize(size, storage.nbytes())
                weakref.finalize(storage, self.resize, size, 0)
        return result

    def resize(self, size, count):
        self.now += count - size[0]
        self.peak = max(self.peak, self.now)
        size[0] = count

    def resize_storage(self, storage, count):
        """Stand in for `UntypedStorage.resize_`, by which FSDP frees what it has gathered."""
        RESIZE(storage, count)
        if storage in self.seen:
            self.resize(self.seen[storage], count)
        return storage


def build_qwen(shapes: PolicyShapes) -> Qwen2Config:
    """Return the config of a Qwen2 with these shapes, whose heads have 128 values."""
    of_layer = "model.layers.0.self_attn."
    queries, keys = (shapes.shapes[f"{of_layer}{part}_proj.weight"][0] for part in "qk")
    return Qwen2Config(
        vocab_size=shapes.vocabulary,
        hidden_size=shapes.hidden_size,
        intermediate_size=shapes.intermediate_size,
        num_hidden_layers=shapes.layers,
        num_attention_heads=queries // 128,
        num_key_value_heads=keys // 128,
        tie_word_embeddings="lm_head.weight" not in shapes.shapes,
        pad_token_id=0,
    )


def measure_step(policy: PretrainedConfig, memory: TrialMemory, directory: Path) -> int:
    """Return the peak of a trial's second micro-batch, for the trial that an estimate describes.

    Weights, moments and gradients of the first micro-batch are there. A micro-batch has the
    positions of `memory`, all completions of full length.
    """
    asked, shares_prompts = memory.config, memory.config.model.shared_prompts != "off"
    prompt, completion = asked.data.max_prompt_length, asked.training.max_completion_length
    prompts, count = memory.micro_batch
    config = build_trial_config(
        "policy",
        directory,
        settings=SETTINGS.replace(completions_per_step=count * MICRO_BATCHES),
        group_size=2,
        learning_rate=1e-5,
    )
    model_settings = ModelSettings(
        dtype="bfloat16" if memory.bfloat16 else "float32",
        lora_rank=memory.rank,
        lora_targets=asked.model.lora_targets,
        gradient_checkpointing="on" if memory.recomputes else "off",
        shared_prompts="on" if shares_prompts else "off",
    )
    config = replace(config, model=model_settings)
    arguments = build_trainer_arguments(config, ("hits", "vowels", "length"))
    with ExitStack() as stack:
        patch = partial(_patch, stack)
        patch(Trainer, "_move_model_to_device", lambda *_: None)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                policy, dtype=choose_weights_dtype(config), attn_implementation="sdpa"
            )
            trainer = _build_trainer(model, arguments, config)
        for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
            patch(trl.kernels.chunked_logprob, name, lambda *_, **__: None)
        rows = torch.arange(count * MICRO_BATCHES)
        prompt_ids = (rows % prompts)[:, None].expand(-1, prompt).contiguous()
        completion_ids = torch.zeros(len(rows), completion, dtype=torch.long)
        if shares_prompts:
            ids = torch.cat([prompt_ids, completion_ids], dim=1)[:count]
            row = shared_prompts.build_row(ids, torch.ones_like(ids), completion)
            assert len(row.texts.seen) > len(row.tokens) == prompts * prompt + count * completion
            patch(shared_prompts, "build_row", lambda *_: row)
        patch(micro_batches, "measure_width", lambda mask: mask.shape[1])
        patch(FakeTensor, "is_cuda", True, create=True)
        fake, counted = FakeTensorMode(allow_non_fake_inputs=True), PeakMemory()
        patch(torch.UntypedStorage, "resize_", lambda *a: counted.resize_storage(*a))
        processes = _join_fake_processes(memory.shards) if memory.shards > 1 else nullcontext()
        mesh = stack.enter_context(processes)
        with fake, counted:
            _run_step(trainer, counted, mesh, prompt_ids, completion_ids)
    return counted.peak


def _patch(stack: ExitStack, target: Any, name: str, value: Any, **options: Any) -> None:
    stack.enter_context(mock.patch.object(target, name, value, **options))


@contextmanager
def _join_fake_processes(count: int) -> Generator[DeviceMesh]:
    """Be one of so many processes, whose collectives send nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        torch.distributed.destroy_process_group()


def _divide(base: Any, model: Any, mesh: DeviceMesh) -> None:
    """Divide a policy by FSDP2 as accelerate does with the arguments of a sharded trial."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*base.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=True)


def _build_trainer(model: Any, arguments: Any, config: Any) -> Any:
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return GDPOTrainer(
        normalization="gdpo",
        reward_funcs=[lambda prompts, **_: [0.0] * len(prompts)] * 3,
        ranges=[(0, 1)] * 3,
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        ),
        peft_config=build_adapter_config(model, config.model, "policy"),
        shared_prompts=config.model.shared_prompts,
    )


def _run_step(
    trainer: Any,
    memory: PeakMemory,
    mesh: DeviceMesh | None,
    prompts: torch.Tensor,
    completions: torch.Tensor,
) -> None:
    """Compute the micro-batches of a step after an optimizer step of gradients of 0.

    The fused optimizer allocates nothing in its later steps.
    """
    model = trainer.model.to_empty(device="cpu").train()
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    base.tie_weights()
    if trainer.args.gradient_checkpointing:  # as Transformers' `train` does
        model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    count, size = len(prompts), len(prompts) // MICRO_BATCHES
    batch: dict[str, Any] = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.ones(count),
        "old_per_token_logps": torch.zeros(completions.shape),
        "num_items_in_batch": torch.ones(()),
    }
    trainer._prepare_inputs = lambda inputs: inputs
    trainer._divide = lambda *_: [[*range(n, n + size)] for n in range(0, count, size)]
    trainer._had_signal, trainer.current_gradient_accumulation_steps = True, 1
    if mesh is not None:
        _divide(base, model, mesh)
    optimizer = trainer.create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    memory.peak = memory.now
    trainer.training_step(model, batch)
