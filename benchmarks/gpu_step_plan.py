"""What both trainers of `gpu_step.py` do; light, for the process that starts the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.core import task_files
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.settings import ModelSettings, RolloutSettings, TrainingSettings
from gdpo_tune.core.trials import TrialConfig

TASK = f"{Path(__file__).resolve().with_name('gpu_step_block.py')}:LookedUp"
TRAIN_PROMPTS = 1024


@dataclass(frozen=True)
class Plan:
    """What both trainers do."""

    policy: str
    engine: str
    """`transformers` or `vllm`."""
    prompts: int
    """A step."""
    group_size: int
    tokens: int
    """Longest completion."""
    steps: int
    """Of a block that count."""
    warm_up: int
    threads: int
    model: ModelSettings
    vllm_memory_share: float = 0.3
    """Both trainers hold every weight and its optimizer state, so less than half is left."""

    def build_config(self, seed: int, folder: Path) -> TrialConfig:
        """The trial that is timed; it would go on for one more step, and evaluate after that."""
        known = list_parameters(task_files.load_task_info(TASK))
        params = {name: parameter.default for name, parameter in known.items()}
        steps = self.warm_up + self.steps + 1
        return TrialConfig(
            task=TASK,
            policy=self.policy,
            seed=seed,
            # So small a rate leaves both sides the same policy, hence the same lengths.
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
            directory=folder,
            threads=self.threads,
            model=self.model,
            rollout=RolloutSettings(engine=self.engine, vllm_memory_share=self.vllm_memory_share),
        )
