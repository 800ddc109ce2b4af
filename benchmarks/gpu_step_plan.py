"""Work of both trainers of `gpu_step.py`; imports no torch, for the process that starts blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.core import task_files
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.settings import ModelSettings, RolloutSettings, TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig

TASK = f"{Path(__file__).resolve().with_name('lookup_task.py')}:LookupTask"
TRAIN_PROMPTS = 1024


@dataclass(frozen=True)
class Plan:
    """Work of both trainers."""

    policy: str
    engine: str
    """`transformers` or `vllm`."""
    prompts: int
    """Prompts of a step."""
    group_size: int
    tokens: int
    """Tokens of the longest completion."""
    steps: int
    """Counted steps of a block."""
    warm_up: int
    threads: int
    model: ModelSettings
    vllm_memory_share: float = 0.3
    """Share of the GPU's memory for vLLM; weights and optimizer state take more than half."""

    def build_config(self, seed: int, directory: Path) -> TrialConfig:
        """Build the timed trial; it has one more step, so that its evaluation is not timed."""
        parameters = list_parameters(task_files.load_task_info(TASK))
        params = {name: parameter.default for name, parameter in parameters.items()}
        steps = self.warm_up + self.steps + 1
        return TrialConfig(
            task=TASK,
            policy=self.policy,
            seed=seed,
            # The small rate keeps the policy, and so the lengths, equal on both sides.
            params={**params, "group_size": self.group_size, "learning_rate": 1e-7},
            training=TrainingSettings(
                steps=steps,
                completions_per_step=self.prompts * self.group_size,
                max_completion_length=self.tokens,
                length_limit=self.tokens,
                train_prompts=TRAIN_PROMPTS,
                evaluate_every=steps,
                checkpoint_every=steps,
            ),
            directory=directory,
            threads=self.threads,
            model=self.model,
            rollout=RolloutSettings(engine=self.engine, vllm_memory_share=self.vllm_memory_share),
        )
