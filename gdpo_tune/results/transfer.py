"""Transfer of a candidate to a policy, data or lengths that its sweep did not search.

What the sweep found about rewards carries over. A learning rate, lengths and a batch do not: they
come from `--set` or from a recipe, which is another search space, and never from the sweep alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.text import format_list
from gdpo_tune.core.trial_config import Segment
from gdpo_tune.core.trials import Params
from gdpo_tune.results.public_record import name_source
from gdpo_tune.results.transfer_check import (
    MissingValues,
    find_missing_values,
    format_value,
    refuse_parameters,
)
from gdpo_tune.results.transfer_recipe import FREE, read_recipe
from gdpo_tune.results.transfer_values import (
    MICRO,
    NEEDS,
    RATE,
    SCORING,
    SUBJECTS,
    WantedValues,
    describe_conditions,
    get_value,
)
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.document import dump_flow, read_overrides
from gdpo_tune.spec.model import list_decisive_values
from gdpo_tune.spec.space import get_parameter_info

SOURCE = "data.source"
NOT_EXPORTED = ("evaluate_every", "checkpoint_every", "prompts", "samples_per_prompt")
"""Ends of keys that decide when and on what a training here is measured."""


@dataclass(frozen=True)
class MovedValue:
    """A setting that does not carry over."""

    key: str
    searched: str
    """In the candidate's training."""
    wanted: str
    source: str
    """Origin of the value that is wanted."""


@dataclass(frozen=True)
class Transfer:
    """Settings of a training that are a candidate's, and those that come from elsewhere."""

    title: str
    """Difference from the sweep, for a sentence: `another policy and other lengths`."""
    searched: SweepSpec
    """The sweep."""
    carried: tuple[str, ...]
    """Settings that carry over, each with its value."""
    moved: tuple[MovedValue, ...]
    kept: tuple[str, ...]
    """Parameters that may need other values, and have the candidate's."""

    @property
    def conditions(self) -> str:
        """Policy, data, lengths and batch on which the sweep measured."""
        return describe_conditions(self.searched)

    @property
    def lines(self) -> tuple[str, str]:
        """Two lines for a terminal: the settings that carry over, and those that do not."""
        needed = {*NEEDS, *(key for keys in SUBJECTS.values() for key in keys)}
        if SOURCE in {value.key for value in self.moved}:  # it stands for its data
            needed -= {*SUBJECTS["data"]} - {SOURCE}
        values = [
            f"{value.key.removeprefix('space.')} {value.wanted} (was {value.searched})"
            for value in self.moved
            if value.key in needed and value.wanted != value.searched
        ]
        return (
            f"carries over: {', '.join(self.carried)}; measured on {self.conditions}",
            f"does not carry over to {self.title}: {', '.join(values) or 'nothing'}",
        )


@dataclass(frozen=True)
class TransferPlan:
    """Overrides of a sweep's file for a training with another policy, data or lengths."""

    values: WantedValues
    words: tuple[str, ...]
    """Values of `--set`, as typed."""
    missing: MissingValues | None = None
    """Values without which it cannot be trained; None if there are all."""

    @property
    def overrides(self) -> list[str]:
        """Overrides of the sweep's file."""
        recipe, searched = self.values.recipe, self.values.searched
        fixed = [f"space.{name}={dump_flow(v)}" for name, v in self.values.params.items()]
        taken = recipe.list_overrides(searched) if recipe else []
        # A single training needs no first points, and no scheduler that moves its values.
        alone = ["enqueue=[]", "search.scheduler=", "search.scheduler={type: fifo}"]
        examples = self.missing.list_overrides() if self.missing else []
        return [*alone, *fixed, *taken, *self.words, *examples]

    def move_schedule(self, schedule: Sequence[Segment]) -> tuple[Segment, ...]:
        """Return the changes of a member's values, without those of a learning rate that moved."""
        if not self.values.has(RATE):
            return tuple(schedule)
        kept = [{n: v for n, v in s.params.items() if n not in FREE} for s in schedule]
        pairs = zip(schedule, kept, strict=True)
        return tuple(replace(segment, params=params) for segment, params in pairs if params)

    def describe(self, spec: SweepSpec, params: Params) -> Transfer:
        """Return the settings of the training with `params` under `spec`, and their origins."""
        values, subjects = self.values, self.values.list_subjects()
        given = [name for name in FREE if values.has(f"space.{name}")]
        before = _list_settings(values.searched)
        before |= {f"space.{name}": values.params[name] for name in given}
        after = _list_settings(spec) | {f"space.{name}": params[name] for name in given}
        shown = {*values.list_needs(), *(key for key in after if before[key] != after[key])}
        titles = [_name_subject(name, values.searched, spec) for name in subjects]
        return Transfer(
            title=format_list(titles or ["the settings of a recipe"]),
            searched=values.searched,
            carried=(*_list_carried(params), *self._list_scoring(spec)),
            moved=tuple(
                MovedValue(
                    key, _format(key, before[key]), _format(key, after[key]), self._name_source(key)
                )
                for key in after
                if key in shown and values.has(key)
            ),
            kept=tuple(f"{n} {format_value(params[n])}" for n in FREE if n not in given),
        )

    def _list_scoring(self, spec: SweepSpec) -> Iterator[str]:
        if not load_task_info(spec.task).offers_released or self.values.is_changed(SCORING):
            return
        recipe = self.values.recipe
        is_other = recipe is not None and recipe.spec.scoring != spec.scoring
        yield f"scoring {spec.scoring}" + (", unlike the recipe" if is_other else "")

    def _name_source(self, key: str) -> str:
        recipe = self.values.recipe
        if recipe is None or self.values.is_set(key):
            return "`--set`"
        is_foreign = key == RATE and recipe.spec.policy != self.values.get("policy")
        return recipe.name_source(key) + (f"; for {recipe.spec.policy}" if is_foreign else "")


def plan_transfer(
    searched: SweepSpec,
    params: Params,
    overrides: Sequence[str],
    recipe: str,
    *,
    option: str,
    source: str,
) -> TransferPlan | None:
    """Plan the training of a candidate with `params`; None if overrides change no subject.

    `recipe` is the value of `--recipe`, or empty; `option` and `source` name the candidate in
    messages.

    Raises:
        UsageError: a value is given that carries over, or there is no such recipe for this task.
    """
    own = read_overrides(overrides)
    other = read_recipe(recipe, searched, params) if recipe else None
    values = WantedValues(searched, params, own, other)
    is_transfer = bool(other or values.list_subjects())
    refuse_parameters(own, option, allowed=FREE if is_transfer else ())
    if not is_transfer:
        return None
    missing = find_missing_values(values, option, source)
    return TransferPlan(values, tuple(overrides), missing)


def _name_subject(subject: str, searched: SweepSpec, wanted: SweepSpec) -> str:
    if subject == "policy":
        return "another policy"
    ranks = (searched.model.lora_rank, wanted.model.lora_rank)
    if subject == "trained weights" and not all(ranks):
        names = [f"adapters of rank {rank}" if rank else "all weights" for rank in ranks]
        return f"{names[1]} in place of {names[0]}"
    return "adapters of another rank" if subject == "trained weights" else f"other {subject}"


def _format(key: str, value: object) -> str:
    if key == SOURCE:
        return name_source(str(value), "data") or "the task's own prompts"
    return format_value(value)


def _list_settings(spec: SweepSpec) -> dict[str, Any]:
    values = list_decisive_values(spec)
    values[MICRO] = get_value(spec, MICRO)
    skipped = ("task", "objectives.", "space.")
    return {
        key: value
        for key, value in values.items()
        if not key.startswith(skipped) and not key.endswith(NOT_EXPORTED)
    }


def _list_carried(params: Params) -> Iterator[str]:
    for name, value in params.items():
        info = get_parameter_info(name)
        needed, values = info.needs or ("", ())
        is_idle = bool(needed) and params.get(needed) not in values
        if name not in FREE and not is_idle and not (info.added_later and value == info.default):
            yield f"{name} {format_value(value)}"
