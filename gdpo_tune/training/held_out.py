"""What a trial samples its held-out completions with, and what comes of evaluating a split."""

from __future__ import annotations

from transformers import PreTrainedModel

from gdpo_tune.core.completions import Completion, write_completions
from gdpo_tune.core.files import room_in
from gdpo_tune.core.trials import Estimate, TrialConfig
from gdpo_tune.training import ranks
from gdpo_tune.training.evaluation import Generate, HeldOut, evaluate, evaluation_seed
from gdpo_tune.training.rollout import generate, generate_in_bfloat16
from gdpo_tune.training.trl_arguments import computes_in_bfloat16
from gdpo_tune.training.warm import Warm


def held_out_sampler(config: TrialConfig) -> Generate:
    """What samples where no engine runs, in the precision of the training."""
    return generate_in_bfloat16 if computes_in_bfloat16(config.model) else generate


def evaluate_split(
    config: TrialConfig,
    state: Warm,
    model: PreTrainedModel,
    held_out: HeldOut,
    step: int,
    sampler: Generate,
    kept: list[Completion] | None = None,
) -> dict[str, Estimate]:
    """Every metric of the task on one split, as the trial has it after `step` steps."""
    seed = evaluation_seed(config.seed, held_out.split, step)
    return evaluate(
        model, state.tokenizer, state.task, held_out, config.training, seed, sampler, kept
    )


def evaluate_test(
    config: TrialConfig, state: Warm, model: PreTrainedModel, step: int, sampler: Generate
) -> dict[str, Estimate]:
    """Every metric on test prompts; a few of the completions stay in the trial's folder."""
    kept: list[Completion] = []
    found = evaluate_split(config, state, model, state.test(), step, sampler, kept)
    if ranks.is_first():
        with room_in(config.directory, "some completions"):
            write_completions(config.directory, kept)
    return found
