"""What is exported: one training with every value that it had, in the words of no library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import NO_CONDITION, PARTIAL_CREDIT
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.settings import DataSettings, ModelSettings, RolloutSettings, TrainingSettings
from gdpo_tune.core.task_files import task_info
from gdpo_tune.core.trials import Params, Segment
from gdpo_tune.spec import SweepSpec

LORA_SCALE = 2
"""`lora_alpha: 0` stands for so many times the rank."""


@dataclass(frozen=True)
class Reward:
    """One reward of the training."""

    name: str
    weight: float
    """The largest of a recipe is 1, as while it trained."""
    low: float
    high: float
    """Range of its values, infinite where it is not known."""
    shaping: tuple[str, ...]
    """What the training made of it before anything was normalised, a sentence each."""


@dataclass(frozen=True)
class Recipe:
    """One training."""

    name: str
    """Sweep and choice, such as `code-knee`."""
    note: str
    """Where it is from, for a person."""
    policy: str
    """What `from_pretrained` takes: the policy that the training starts from."""
    rewards: tuple[Reward, ...]
    """Those with a weight, in the order of the task."""
    params: Params
    seed: int
    training: TrainingSettings
    model: ModelSettings
    data: DataSettings
    rollout: RolloutSettings
    schedule: tuple[Segment, ...] = ()

    @property
    def mode(self) -> str:
        """How rewards become advantages."""
        return str(self.params["normalization"])

    @property
    def sums_first(self) -> bool:
        """Whether the weighted rewards are added up before anything is normalised."""
        return registry.NORMALIZATIONS[self.mode].sums_first

    @property
    def loss(self) -> str:
        """How token losses are averaged."""
        return str(self.params["loss_type"])

    @property
    def group_size(self) -> int:
        """Completions of one prompt."""
        return int(self.params["group_size"])

    @property
    def prompts(self) -> int:
        """Groups a step."""
        return self.training.completions_per_step // self.group_size

    @property
    def passes(self) -> int:
        """Optimizer steps over each step's samples."""
        return int(self.params["num_iterations"])

    @property
    def updates(self) -> int:
        """Optimizer steps in all."""
        return self.training.steps * self.passes

    @property
    def warmup(self) -> int:
        """Optimizer steps over which the learning rate rises."""
        return round(self.training.warmup_share * self.training.steps) * self.passes

    @property
    def micro_batch(self) -> int:
        """Completions whose forward and backward pass are computed at once."""
        return self.training.micro_batch_size or self.training.completions_per_step

    @property
    def micro_batches(self) -> int:
        """Of them in a step."""
        return self.training.completions_per_step // self.micro_batch

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its completion together, at most."""
        return self.data.max_prompt_length + self.training.max_completion_length

    @property
    def lora_alpha(self) -> float:
        """Scale of the adapters."""
        return self.model.lora_alpha or LORA_SCALE * self.model.lora_rank

    @property
    def leaves_one_out(self) -> bool:
        """Whether a reward is compared with the others of its group, and that has an effect."""
        ignored = "baseline" in registry.NORMALIZATIONS[self.mode].ignores
        return self.params.get("baseline") == "leave_one_out" and not ignored

    @property
    def gamma(self) -> float:
        """Saturation exponent, 0 where the mode ignores it."""
        ignored = "gamma" in registry.NORMALIZATIONS[self.mode].ignores
        return 0.0 if ignored else float(self.params.get("gamma", 0.0))

    @property
    def weights(self) -> list[float]:
        """Of the rewards, in their order."""
        return [reward.weight for reward in self.rewards]

    def number(self, name: str) -> float:
        """A parameter that is a number."""
        return float(self.params[name])

    def upper_clip(self, *, absolute_for_cispo: bool) -> float:
        """Upper clip as a distance from 1; as the bound itself for CISPO, where it is asked for."""
        distance = self.number("epsilon_high")
        return 1 + distance if absolute_for_cispo and self.loss == "cispo" else distance


def recipe_of(
    spec: SweepSpec,
    params: Params,
    seed: int,
    *,
    policy: str,
    name: str,
    note: str,
    schedule: tuple[Segment, ...] = (),
) -> Recipe:
    """What `train()` would be asked for, as a recipe.

    Args:
        spec: what the training shares with its sweep.
        params: complete.
        seed: of the training.
        policy: what `from_pretrained` takes for the spec's.
        name: for a folder.
        note: where it is from, for a person.
        schedule: what of the parameters changes on the way.
    """
    info = task_info(spec.task, params)
    prefix = "reward_weights."
    weights = {
        reward: float(params[f"{prefix}{reward}"])
        for reward in info.rewards
        if float(params.get(f"{prefix}{reward}", 0.0)) > 0
    }
    top = max(weights.values())
    rewards = [
        Reward(each, weight / top, *info.rewards[each], _shaping(each, info, params, spec))
        for each, weight in weights.items()
    ]
    return Recipe(
        name=name,
        note=note,
        policy=policy,
        rewards=tuple(rewards),
        params=params,
        seed=seed,
        training=spec.training,
        model=spec.model,
        data=spec.data,
        rollout=spec.rollout,
        schedule=schedule,
    )


def _shaping(reward: str, info: TaskInfo, params: Params, spec: SweepSpec) -> tuple[str, ...]:
    """What `training.shaping` does to a reward, in words."""
    found: list[str] = []
    limit, longest = spec.training.length_limit, spec.training.max_completion_length
    if reward == info.partial_reward and params.get(PARTIAL_CREDIT):
        found.append("partial credit: the share of tests that pass")
    if reward == info.length_reward:
        found.append(_length(params, limit, longest))
    on = str(params.get(f"conditioning.{reward}", NO_CONDITION))
    if on != NO_CONDITION:
        low, high = info.rewards[on]
        share = float(params[f"conditioning_threshold.{reward}"])
        found.append(f"0 unless {on} is at least {(1 - share) * low + share * high:g}")
    return tuple(found)


def _length(params: Mapping[str, object], limit: int, longest: int) -> str:
    """The shape of the length reward, in tokens with the end token."""
    match params.get("length_shape", "step"):
        case "ramp":
            return f"1 up to {limit} tokens, then in a line to 0 at {longest}"
        case "overlong":
            cache = float(str(params["length_cache"])) * longest
            return f"1 up to {longest - cache:g} tokens, then in a line to 0 at {longest}"
        case _:
            return f"1 up to {limit} tokens, else 0"
