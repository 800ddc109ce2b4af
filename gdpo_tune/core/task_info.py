"""Description of a task and of a layout of a data set, and the choice of a sweep's prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from gdpo_tune.core.metrics import MetricInfo
    from gdpo_tune.core.trials import ParamValue

Scoring = Literal["strict", "released"]
"""Scoring of a task's rewards: as this package documents them, or as the authors' code does."""
STRICT: Scoring = "strict"
"""The default."""
UNKNOWN_RANGE = (float("-inf"), float("inf"))
"""Range of a reward whose task states none."""


@dataclass(frozen=True)
class ToolFormat:
    """How a policy reads the tools of a task, and how its calls are read."""

    schemas: Sequence[dict[str, Any]]
    """JSON schema of each tool, as chat templates take them."""
    chat_template: str = ""
    """Chat template of the task, in place of the policy's own; empty: it keeps its own."""
    response_template: Mapping[str, Any] | None = None
    """How Transformers reads a turn of the policy; None: TRL knows it by the chat template."""


@dataclass(frozen=True)
class TaskInfo:
    """A task: its rewards, the metrics that it measures on held-out prompts, and its defaults."""

    build: Callable[..., Any]
    """Builds the task from `TrainingSettings`, `SandboxSettings` and `DataSettings`; with names as
    `optional_rewards`, if it has any, and with `scoring` if it offers that."""
    rewards: Mapping[str, tuple[float, float]]
    """Reward name -> range of its values, infinite where it is unknown."""
    metrics: Mapping[str, MetricInfo]
    """Held-out metrics; objectives and constraints name these."""
    published: Mapping[str, ParamValue]
    """The setting of the method's paper, drawn as a baseline."""
    embedded: str
    """The policy of `POLICIES` that ships for it: the default of `policy:`."""
    length_reward: str | None = None
    """The reward that is 1 within `length_limit` tokens, else 0; it may have other shapes."""
    prompts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Split -> distinct prompts that the task can write itself; empty where that is unknown."""
    partial_reward: str | None = None
    """The reward that is all or nothing and can also give partial credit."""
    optional_rewards: Mapping[str, MetricInfo] = field(default_factory=dict[str, Any])
    """Rewards that are on where the space has a weight for them."""
    published_with: Mapping[str, Mapping[str, ParamValue]] = field(default_factory=dict[str, Any])
    """Optional reward -> what the published setting has with it, besides a weight of 1."""
    calls_tools: bool = False
    """True if the policy has several turns, between which it calls tools."""
    offers_released: bool = False
    """True if it can also score as the authors' code does: `scoring: released`."""
    judges: tuple[str, ...] = ()
    """Rewards that a language model gives."""

    def add_optional_rewards(self, parameters: Collection[str]) -> TaskInfo:
        """Return the task with those optional rewards whose weight is among `parameters`."""
        names = [name for name in self.optional_rewards if f"reward_weights.{name}" in parameters]
        if not names:
            return self
        published = dict(self.published)
        for name in names:
            published |= {f"reward_weights.{name}": 1.0, **self.published_with.get(name, {})}
        build = partial(self.build, optional_rewards=names)
        optional = {name: self.optional_rewards[name] for name in names}
        ranges = {name: (info.low, info.high) for name, info in optional.items()}
        return replace(self, build=build, rewards={**self.rewards, **ranges}, published=published)


@dataclass(frozen=True)
class LayoutInfo:
    """A layout of a data set: its columns, and how a row becomes a problem."""

    convert: Callable[[Mapping[str, Any]], Any]
    """Returns the problem of a row, or raises `RowError`."""
    write_reference: Callable[[Mapping[str, Any]], str]
    """Returns a row's own solution as a completion in the tasks' format, or raises `RowError`."""
    tasks: tuple[str, ...]
    """Tasks that can judge such problems."""
    columns: tuple[str, ...]
    """Columns that a data set must have, the prompt first."""
    doc: str
    optional: tuple[str, ...] = ()
    """Columns that are read if they are there."""
    one_of: tuple[str, ...] = ()
    """Optional columns of which a data set must have one."""
    keeps_messages: bool = False
    """True if `convert` itself reads a prompt that is a list of messages."""

    def fits(self, present: Collection[str]) -> bool:
        """Return whether a data set with these columns has this layout."""
        return {*self.columns} <= {*present} and not (
            self.one_of and {*self.one_of}.isdisjoint(present)
        )


PROBLEM_SEED = 0
"""Prompts belong to the sweep and not to the trial: every trial of every run has the same."""


def order_prompts(problems: int, count: int, seed: int) -> list[int]:
    """Return the indices of a trial's `count` prompts; each pass over all has its own order.

    The order is fixed in advance, because a data loader that shuffles by itself would start another
    order when a trial resumes after its first pass.
    """
    import numpy as np  # late: names of tasks are read without it

    generator = np.random.default_rng(seed)
    passes = -(-count // problems)
    order = np.concatenate([generator.permutation(problems) for _ in range(passes)])
    return order[:count].tolist()
