"""What `gpu_check.py` trains: sizes of its trials, as configurations and as a sweep's file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.core import task_files
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.settings import (
    DataSettings,
    ModelSettings,
    RolloutSettings,
    TrainingSettings,
)
from gdpo_tune.core.trial_config import TrialConfig

if TYPE_CHECKING:
    from gpu_check_processes import Processes

FILE = Path(__file__).resolve().with_name("lookup_task.py")
TASK, LONG_TASK = f"{FILE}:LookupTask", f"{FILE}:LongLookupTask"
GROUP = 4
RANK = 16
"""Rank of the adapters."""


@dataclass(frozen=True)
class CheckPlan:
    """Sizes of the trials of a check."""

    small: bool
    """True on a CPU."""
    policy: str
    """Name or directory of the policy of trials."""
    directory: Path
    """Directory of trials and sweeps."""
    threads: int
    engine: str = "auto"
    """`rollout.engine` of trials."""
    vllm: bool = False
    """True if trials sample with vLLM."""
    device_bytes: int | None = None
    """Memory of the GPU; None on a CPU."""
    tiny_policy: str = ""
    """Directory of a policy with two layers, for what a CPU can do with adapters."""
    completions: int = 64
    """Completions of a step."""
    micro_batch: int = 8
    tokens: int = 128
    """Tokens of the longest completion."""
    steps: int = 4
    """Steps of a trial."""
    devices: tuple[str, ...] = ()
    """GPUs that may be used, as `CUDA_VISIBLE_DEVICES` names them; all steps but one use the first
    alone."""

    def build_training(self, **changes: Any) -> TrainingSettings:
        """Build the settings of a short trial."""
        settings = TrainingSettings(
            steps=self.steps,
            completions_per_step=self.completions,
            micro_batch_size=self.micro_batch,
            max_completion_length=self.tokens,
            length_limit=self.tokens // 2,
            train_prompts=128,
            validation_prompts=8,
            test_prompts=8,
            evaluate_every=self.steps,
            checkpoint_every=2,
        )
        return settings.replace(**changes)

    def build_config(
        self,
        name: str,
        *,
        task: str = TASK,
        params: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        **changes: Any,
    ) -> TrialConfig:
        """Build a trial in the directory `name`; `changes` are fields of the configuration."""
        infos = list_parameters(task_files.load_task_info(task))
        defaults = {key: info.default for key, info in infos.items()}
        config = TrialConfig(
            task=task,
            policy=self.policy,
            seed=7,
            params={**defaults, "group_size": GROUP, "learning_rate": 1e-5, **(params or {})},
            training=self.build_training(**(training or {})),
            directory=self.directory / name,
            threads=self.threads,
            data=DataSettings(max_prompt_length=2048),
            model=ModelSettings(),
            rollout=RolloutSettings(engine=self.engine),
        )
        return replace(config, **changes)

    def write_space(self, name: str, **sections: Any) -> Path:
        """Write the file of a sweep; a section's keys are added to those of the check."""
        space: dict[str, Any] = {
            "name": name,
            "task": TASK,
            "policy": self.policy,
            "objectives": {
                reward: {"direction": "maximize", "reference": 0}
                for reward in ("correctness", "format")
            },
            "space": {
                "group_size": [GROUP],
                "reward_weights": {
                    "correctness": 1,
                    "format": {"log": [0.05, 2]},
                    "length": {"log": [0.05, 2]},
                },
                "learning_rate": {"log": [1e-6, 1e-5]},
            },
            "training": vars(self.build_training()),
            "data": {"max_prompt_length": 2048},
            "rollout": {"engine": self.engine},
            "search": {
                # Random proposals do not depend on the order in which trials end.
                "sampler": "random",
                "scheduler": {"type": "fifo"},
                "replicates": {"max_runs": 0},
                # The steps count trials that train.
                "merges": {"budget": 0},
                "checkpoints": {"budget": 0},
            },
            "tracking": {"uri": f"sqlite:///{self.directory / 'mlflow.db'}"},
            "storage": str(self.directory / "sweeps"),
        }
        for section, content in sections.items():
            space[section] = {**space.get(section, {}), **content}
        file = self.directory / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(space, indent=2))  # YAML contains JSON
        return file


@dataclass(frozen=True)
class Context:
    """What a step gets."""

    plan: CheckPlan
    processes: Processes
