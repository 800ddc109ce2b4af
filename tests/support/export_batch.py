"""One step's samples with given rewards and log-probabilities, through a whole trainer of TRL.

`python -m tests.support.export_batch IN OUT` does so for another version of TRL than the installed
one, if it comes first on the path.

Shapes: N completions, G group size, K rewards, C completion positions.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.training import build_plain_trainer

N, G, C = 48, 8, 36
MINI, MICRO = 24, 12
UNANIMOUS_G = 6
NAMES = ("correctness", "format", "length")
SIZES = (f"training.completions_per_step={N}", "model.dtype=float32")
"""Settings of a trial that trains on a batch of `draw_batch`."""
PARTS = (f"training.mini_batch_size={MINI}", f"training.micro_batch_size={MICRO}")
"""Further settings: two optimizer steps, each of two micro-batches."""
_DIGIT = 20
"""A prompt is the number of its completion in this base, so that rows of a batch are known."""


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Samples of a step; probabilities are logarithms, [N, C], of tokens that may be padding."""

    rewards: Tensor
    """[N, K], NaN where a reward is not scored."""
    lengths: Tensor
    """[N] tokens."""
    present: Tensor
    """Under the policy that is trained."""
    old: Tensor
    """Under the trainer's policy at the time of the sampling."""
    reference: Tensor
    sampled: Tensor
    """As the engine that sampled rounds those of `old`."""

    @property
    def mask(self) -> Tensor:
        """[N, C] bool, True for a token."""
        return torch.arange(C) < self.lengths[:, None]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of a training step for the samples of a batch."""

    advantages: Tensor
    """[N]"""
    losses: Tensor
    """One per optimizer step."""
    gradient: Tensor
    """[N, C] gradient of the loss of its optimizer step, by the present log-probability."""


@functools.cache
def draw_batch(missing: bool = False, rounded: bool = False, updated: bool = True) -> Batch:
    """Draw unequal lengths, ratios that every clip reaches, and a group without any spread.

    `missing` leaves one reward of one completion out; `rounded` is true of a sampler that rounds;
    `updated` is false at the first optimizer step, where the present policy is the old one.
    """
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.rand, generator=generator)
    spread = functools.partial(torch.randn, (N, C), generator=generator)
    lengths = 1 + (draw(N) * C).long()
    lengths[0] = C
    rewards = torch.stack([draw(N), (draw(N) < 0.6).float(), (lengths <= 12).float()], 1)
    rewards[2 * G : 3 * G] = torch.tensor([0.5, 1.0, 0.0])
    if missing:
        rewards[5, 0] = torch.nan
    old = -2 * draw(N, C) - 0.05
    return Batch(
        rewards=rewards,
        lengths=lengths,
        present=old + 0.45 * spread() * updated,
        old=old,
        reference=old + 0.5 * spread(),
        sampled=old + 0.15 * spread() * rounded,
    )


def draw_unanimous_batch() -> Batch:
    """Draw rewards that are equal in every second group of 6, and no sums of powers of 2."""
    batch = draw_batch()
    values = batch.rewards.unflatten(0, (-1, UNANIMOUS_G)).clone()
    values[::2] = values[::2, :1] * 0.7 + 0.1
    return dataclasses.replace(batch, rewards=values.flatten(0, 1))


def build_reward_functions(batch: Batch) -> list[Any]:
    def build(column: int) -> Any:
        def score(completions: list[Any], **_: Any) -> list[float | None]:
            values = batch.rewards[:, column].tolist()
            return [None if value != value else value for value in values]

        score.__name__ = NAMES[column]
        return score

    return [build(column) for column in range(len(NAMES))]


def compute_step(trainer: Any, batch: Batch) -> StepResult:
    """Return what TRL's trainer, or one of its subclasses, computes from the batch.

    The sampler and the forward pass are replaced; rewards, advantages and losses are the trainer's.
    """
    leaf = batch.present.clone().requires_grad_()
    completions = [[5] * int(length) for length in batch.lengths]
    prompts = [list(divmod(row, _DIGIT)) for row in range(N)]
    sampled = [list(row[:length]) for row, length in zip(batch.sampled, batch.lengths, strict=True)]

    def compute_log_probs(model: Any, ids: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
        rows = ids[:, 0] * _DIGIT + ids[:, 1]
        if torch.is_grad_enabled():
            values = leaf
        else:
            values = batch.reference if model is trainer.ref_model else batch.old
        return values[rows], torch.zeros(len(rows), C), None

    trainer._generate = lambda _: (
        *(prompts, completions, None, ["a"] * N),
        *(sampled if trainer.use_vllm else None, {}, None, []),
    )
    trainer._get_per_token_logps_and_entropies = compute_log_probs
    trainer.model.train()
    arguments = trainer.args
    trainer.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps
    samples = trainer._generate_and_score_completions([{"prompt": "a"}] * N)
    assert samples["completion_mask"].shape == (N, C)
    losses = torch.zeros(arguments.steps_per_generation // arguments.gradient_accumulation_steps)
    for number, rows in enumerate(torch.arange(N).split(arguments.per_device_train_batch_size)):
        part = {name: _take(value, rows) for name, value in samples.items()}
        loss = trainer.compute_loss(trainer.model, part)
        loss.backward()
        losses[number // arguments.gradient_accumulation_steps] += loss.detach()
    assert leaf.grad is not None
    return StepResult(samples["advantages"].detach(), losses, leaf.grad)


def _take(value: Any, rows: Tensor) -> Any:
    return value[rows] if isinstance(value, Tensor) and value.dim() else value


def build_exported_trainer(
    settings: Mapping[str, Any], batch: Batch, policy: str, directory: Path
) -> Any:
    """Build TRL's trainer from the keys of an exported file that are arguments of TRL."""
    from trl import GRPOConfig

    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    others = ("output_dir", "use_vllm", "vllm_", "max_steps", "warmup_steps")
    taken = {key: settings[key] for key in known & set(settings) if not key.startswith(others)}
    functions = build_reward_functions(batch)
    trainer = build_plain_trainer(policy, directory, reward_funcs=functions, **taken)
    trainer.use_vllm = settings["use_vllm"]  # no engine is needed to weight what it sampled
    for key in (f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max")):
        setattr(trainer, key, settings.get(key))
    return trainer


def build_own_trainer(overrides: Sequence[str], batch: Batch, policy: str, directory: Path) -> Any:
    """Build the trainer of a trial; no engine is needed to weight what it sampled."""
    from datasets import Dataset

    from gdpo_tune.policies.load_policy import load_policy
    from gdpo_tune.training.trainer import GDPOTrainer
    from gdpo_tune.training.trl_arguments import build_trainer_arguments
    from tests.support.export import make_request

    # A mini-batch at once: what micro-batches of a trial add up to.
    request = make_request([*SIZES, *overrides, "training.micro_batch_size=0"])
    config = request.spec.build_trial_config(request.params, request.seed, directory)
    arguments = build_trainer_arguments(config, NAMES)
    model, tokenizer = load_policy(policy)
    trainer = GDPOTrainer(
        normalization=str(request.params["normalization"]),
        baseline=str(request.params["baseline"]),
        reward_funcs=build_reward_functions(batch),
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * N}),
        processing_class=tokenizer,
    )
    rollout = request.spec.rollout
    trainer.use_vllm = rollout.engine == "vllm"
    trainer.vllm_importance_sampling_mode = rollout.importance_sampling
    trainer.vllm_importance_sampling_clip_max = rollout.importance_sampling_cap
    return trainer


def main(source: str, target: str) -> None:
    """Compute the step of each (settings, batch) in a file, and write the results to another."""
    policy, cases = torch.load(source)
    results: list[dict[str, Tensor]] = []
    for settings, tensors in cases:
        batch = Batch(**tensors)
        trainer = build_exported_trainer(settings, batch, policy, Path(target).parent / "out")
        results.append(dataclasses.asdict(compute_step(trainer, batch)))
    torch.save(results, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
