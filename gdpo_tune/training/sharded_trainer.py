"""TRL's GRPOTrainer of a policy that its processes share: it samples, and resumes from whole files.

It overrides private hooks of TRL and Transformers. Without sharding nothing here has an effect.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin

from gdpo_tune.training.adam_8bit import compute_eagerly, is_8bit
from gdpo_tune.training.checkpoints import OPTIMIZER_FILE, SCHEDULER_FILE
from gdpo_tune.training.fast_cpu.accumulation import MicroBatchTrainer
from gdpo_tune.training.sharding import gather_weights, is_sharded, load_optimizer, start_sharding


class ShardedTrainer(MicroBatchTrainer):
    """MicroBatchTrainer whose checkpoints do not depend on the number of processes."""

    def create_accelerator_and_postprocess(self) -> None:
        """Turn FSDP2 on where accelerate does not: among processes on CPUs."""
        super().create_accelerator_and_postprocess()
        plugin: Any = self.args.fsdp_plugin_args
        if plugin is None or self.is_fsdp_enabled:
            return
        state: Any = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin)
        # Accelerate copies it from one state to the other.
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        self.is_fsdp_enabled = True

    def create_optimizer(self, *arguments: Any, **keywords: Any) -> Any:
        """Create the optimizer, on a CPU one that compiles nothing."""
        optimizer = super().create_optimizer(*arguments, **keywords)
        if self.args.use_cpu and is_8bit(optimizer):
            compute_eagerly(optimizer)
        return optimizer

    def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """Sample with Transformers while each process has all weights, at a pace of its own."""
        model: Any = self.model
        with nullcontext() if self.use_vllm else gather_weights(model):
            return super()._generate_single_turn(*arguments, **keywords)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """Load the weights of a checkpoint before they are divided."""
        if self.is_fsdp_enabled and resume_from_checkpoint is not None:
            self.is_fsdp_enabled = False  # Transformers would expect divided files
            try:
                super()._load_from_checkpoint(resume_from_checkpoint)
            finally:
                self.is_fsdp_enabled = True
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        if self.is_fsdp_enabled:
            start_sharding(prepared[0])
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        network: Any = self.model
        if not is_sharded(network):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (self.is_fsdp_enabled or is_8bit(self.optimizer)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        directory = Path(checkpoint)
        options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
        averages = torch.load(directory / OPTIMIZER_FILE, mmap=True, **options)
        load_optimizer(self.optimizer, averages)
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(torch.load(directory / SCHEDULER_FILE, **options))
