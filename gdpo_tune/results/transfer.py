"""Transfer of a candidate to a policy, data or lengths that its sweep did not search.

What the sweep found about rewards carries over. A learning rate, lengths and a batch do not: they
come from `--set` or from `--recipe`, another search space, and never from the sweep alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.text import format_list, format_parameter, join_names, show, suggest
from gdpo_tune.core.trials import Params
from gdpo_tune.results.public_record import name_source
from gdpo_tune.spec import SweepSpec, document, load_spec
from gdpo_tune.spec.model import list_decisive_values
from gdpo_tune.spec.space import format_domain, get_parameter_info
from gdpo_tune.spec.starter import find_space, list_spaces

OPTION = "--recipe"
SETTABLE = ("learning_rate", "beta", "temperature", "epsilon", "epsilon_high", "num_iterations")
"""Parameters that may need other values under another policy; all others carry over."""
RATE, STEPS, TOTAL = "space.learning_rate", "training.steps", "training.completions_per_step"
MINI, MICRO = "training.mini_batch_size", "training.micro_batch_size"
COMPLETION_LENGTH, LIMIT = "training.max_completion_length", "training.length_limit"
PROMPT, LORA_RANK, SCORING = "data.max_prompt_length", "model.lora_rank", "scoring"
SOURCE = "data.source"
SUBJECTS = {
    "policy": ("policy",),
    "trained weights": (LORA_RANK,),
    "data": (
        *(SOURCE, "data.config", "data.split", "data.layout", "data.columns"),
        *("data.prompt_template", "data.validation", "data.test"),
    ),
    "lengths": (COMPLETION_LENGTH, LIMIT),
    "scoring": (SCORING,),
}
"""Subject of a search -> keys that change it."""
NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    RATE: (("policy", "trained weights"), "the best one differs by policy, and for adapters"),
    STEPS: (("policy", "data"), "another policy, or other data, improves for longer"),
    TOTAL: (("policy", "data"), "the noise of a step depends on policy and data"),
    COMPLETION_LENGTH: (
        ("policy", "data"),
        "another policy, or other data, has longer completions",
    ),
    LIMIT: (("policy", "data", "lengths"), "the length reward pays for that many tokens"),
    PROMPT: (("data",), "longer prompts are left out"),
}
"""Key whose value does not carry over -> subjects on which it depends, and the reason."""
EXAMPLES = {STEPS: 100, TOTAL: 512, COMPLETION_LENGTH: 512, LIMIT: 200, PROMPT: 512}
"""Key -> a value for a policy from the Hub, as `init` writes it."""
RECIPE_SECTIONS = ("data", "model", "rollout", "training", "sandbox")
RECIPE_RESOURCES = ("cpus", "gpus", "workers")
NOT_EXPORTED = ("evaluate_every", "checkpoint_every", "prompts", "samples_per_prompt")
"""Ends of keys that decide when and on what a training here is measured."""


class MovedValue(NamedTuple):
    """A setting that does not carry over, with its searched and its wanted value."""

    key: str
    searched: str
    wanted: str
    source: str
    """Origin of `wanted`."""


@dataclass(frozen=True)
class Transfer:
    """Settings of a training that are a candidate's, and those that come from elsewhere."""

    title: str
    """Difference from the sweep, for a sentence: `another policy and other lengths`."""
    searched: SweepSpec
    carried: tuple[str, ...]
    """Settings that carry over, each with its value."""
    moved: tuple[MovedValue, ...]
    kept: tuple[str, ...]
    """Parameters that may need other values, and have the candidate's."""

    @property
    def conditions(self) -> str:
        """Policy, data, lengths and batch on which the sweep measured."""
        return _describe_conditions(self.searched)

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
class Recipe:
    """A search space as the source of the values that do not carry over."""

    name: str
    """As the user wrote it."""
    spec: SweepSpec
    params: Params
    """One value for each parameter of `SETTABLE`."""

    def name_source(self, key: str) -> str:
        """Return where the value of a dotted key is from, for a person."""
        source, name = f"`{OPTION} {self.name}`", key.removeprefix("space.")
        domains = self.spec.space.domains
        if key == LIMIT:
            reward = load_task_info(self.spec.task, domains).length_reward
            weights = domains.get(f"reward_weights.{reward}")
            if weights is not None and weights.list_values() == (0,):
                return f"{source}, in which the length has no weight"
        if name not in self.params or name not in self.spec.space.searched_domains:
            return source
        is_default = self.params[name] == get_parameter_info(name).default
        choice = "that of its published baseline" if is_default else "the middle"
        return f"{source}: {choice}, of {format_domain(domains[name])}"


@dataclass(frozen=True)
class TransferPlan:
    """Values of a training that repeats a candidate: of `--set`, else a recipe, else the sweep."""

    searched: SweepSpec
    """The candidate's sweep."""
    params: Params
    """Those of the candidate."""
    raw_overrides: tuple[str, ...]
    """Values of `--set`, as typed."""
    own: document.YamlMap
    """Parsed values of these overrides."""
    recipe: Recipe | None
    missing: str = ""
    """Message that lists the values that nobody gave; empty if none is missing."""
    examples: Mapping[str, float | int] = field(default_factory=dict)
    """Values for the missing ones."""

    def is_set(self, key: str) -> bool:
        """Return whether `--set` gives a dotted key a value."""
        return document.locate(self.own, document.Place(""), (key,))[1] is not document.ABSENT

    def has(self, key: str) -> bool:
        """Return whether `--set` or the recipe gives a key a value."""
        return self.is_set(key) or self.recipe is not None

    def get(self, key: str) -> Any:
        """Return the value that the training will have; that of `--set` is not checked yet."""
        if self.is_set(key):
            return document.locate(self.own, document.Place(""), (key,))[1]
        # A weight was found for the rewards of the sweep, so their settings stay with it.
        source = self.recipe.spec if self.recipe and key != SCORING else self.searched
        return attrgetter(key)(source)

    def get_searched(self, key: str) -> Any:
        """Return the candidate's value."""
        section, _, name = key.partition(".")
        return self.params[name] if section == "space" else attrgetter(key)(self.searched)

    def is_changed(self, key: str) -> bool:
        """Return whether a key has another value; a key without one is as good as 0 or ''.

        Adapters of another rank train the same weights.
        """
        wanted, searched = self.get(key), self.get_searched(key)
        if key == LORA_RANK:
            return bool(wanted) != bool(searched)
        return (wanted or None) != (searched or None)

    @cached_property
    def subjects(self) -> tuple[str, ...]:
        """Subjects that differ from those of the sweep."""
        return tuple(name for name, keys in SUBJECTS.items() if any(map(self.is_changed, keys)))

    @cached_property
    def needs(self) -> list[str]:
        """Keys whose values do not carry over."""
        reward = load_task_info(self.searched.task, self.params).length_reward
        pays = float(self.params.get(f"reward_weights.{reward}", 0.0)) > 0
        needs = [key for key, (others, _) in NEEDS.items() if {*self.subjects} & {*others}]
        return [key for key in needs if key != LIMIT or pays]

    @property
    def overrides(self) -> list[str]:
        """Overrides of the sweep's file."""
        fixed = {f"space.{name}": value for name, value in self.params.items()}
        if self.subjects:
            fixed[MICRO] = "auto"
        if self.recipe:
            own, others = _list_recipe_values(self.recipe.spec), _list_recipe_values(self.searched)
            taken = {key: value for key, value in own.items() if value != others[key]}
            fixed |= taken | {f"space.{name}": v for name, v in self.recipe.params.items()}
        settings = [f"{key}={document.dump_flow(value)}" for key, value in fixed.items()]
        examples = [f"{key}={show(value)}" for key, value in self.examples.items()]
        return ["enqueue=[]", *settings, *self.raw_overrides, *examples]

    def describe(self, spec: SweepSpec, params: Params) -> Transfer:
        """Return the settings of the training with `params` under `spec`, and their origins."""
        given = [name for name in SETTABLE if self.has(f"space.{name}")]
        before = _list_settings(self.searched) | {f"space.{n}": self.params[n] for n in given}
        after = _list_settings(spec) | {f"space.{name}": params[name] for name in given}
        shown = {*self.needs, *(key for key in after if before[key] != after[key])}
        moved: list[MovedValue] = []
        for key, value in after.items():
            if key in shown and self.has(key):
                origin = "`--set`"
                if self.recipe is not None and not self.is_set(key):
                    is_foreign = key == RATE and self.recipe.spec.policy != self.get("policy")
                    origin = self.recipe.name_source(key)
                    origin += f"; for {self.recipe.spec.policy}" * is_foreign
                pair = _format_setting(key, before[key]), _format_setting(key, value)
                moved.append(MovedValue(key, *pair, origin))
        carried: list[str] = []
        for name, value in params.items():
            info = get_parameter_info(name)
            needed, values = info.needs or ("", ())
            is_idle = bool(needed) and params.get(needed) not in values
            is_chosen = name in self.searched.space.dimensions or value != info.default
            if name not in SETTABLE and is_chosen and not is_idle:
                carried.append(f"{name} {_format_value(value)}")
        if load_task_info(spec.task).offers_released and not self.is_changed(SCORING):
            is_other = self.recipe is not None and self.recipe.spec.scoring != spec.scoring
            carried.append(f"scoring {spec.scoring}" + ", unlike the recipe" * is_other)
        titles = [_title_subject(name, self.searched, spec) for name in self.subjects]
        return Transfer(
            format_list(titles or ["the settings of a recipe"]),
            self.searched,
            tuple(carried),
            tuple(moved),
            kept=tuple(f"{n} {_format_value(params[n])}" for n in SETTABLE if n not in given),
        )

    def find_missing(self, option: str, source: str) -> TransferPlan:
        """Return the plan with what is missing; `option` and `source` name the candidate."""
        missing = [key for key in self.needs if not self.has(key)]
        problems = [f"{k} = {_format_value(self.get_searched(k))}: {NEEDS[k][1]}" for k in missing]
        if self.recipe and not self.is_set(RATE):
            rank = self.recipe.spec.model.lora_rank
            if bool(self.get(LORA_RANK)) != bool(rank):
                trained = "adapters" if rank else "all weights"
                rate = _format_value(self.recipe.params["learning_rate"])
                problems = [f"{RATE} = {rate}: {OPTION} {self.recipe.name} has it for {trained}"]
                missing = [RATE]
        examples = {key: self._suggest_value(key) for key in missing}
        total, size = self.get(TOTAL), int(self.params["group_size"])
        if TOTAL not in missing and isinstance(total, int) and total > 0 and total % size:
            near = sorted({max(1, total // self._unit) * self._unit, self._round_up(total)})
            reason = f"group_size {size}, which carries over, does not divide it"
            problems.append(f"{TOTAL} = {total}: {reason}; {' or '.join(map(str, near))} would do")
            examples[TOTAL] = min(near, key=lambda count: abs(count - total))
        if not problems:
            return self
        asked = [key for keys in SUBJECTS.values() for key in keys if self.is_changed(key)]
        shown = ", ".join(f"{key} = {show(self.get(key))}" for key in asked)
        lines = [
            f"{option} {source}: the sweep measured on {_describe_conditions(self.searched)}; "
            f"values of it do not carry over to {shown or 'this recipe'}",
            *problems,
            "fix: choose values, for example "
            + " ".join(f"--set {key}={show(value)}" for key, value in examples.items()),
        ]
        fitting = list_fitting_spaces(self.searched.task, str(self.get("policy")))
        if self.recipe is None and fitting:
            recipe = f"{OPTION} {fitting[0]}"
            lines.append(f"or: {recipe}, for its data, lengths, batch, learning rate and adapters")
        return replace(self, missing="\n    ".join(lines), examples=examples)

    def _suggest_value(self, key: str) -> float | int:
        """Return an example that fits the other values; for the policy of the sweep its own."""
        if key == RATE:  # of the method's paper; ten times as high for adapters
            return 1e-5 if self.get(LORA_RANK) else 1e-6
        example = EXAMPLES[key] if self.is_changed("policy") else self.get_searched(key)
        if key == TOTAL:
            return self._round_up(example)
        longest, training = self.get(COMPLETION_LENGTH), self.searched.training
        if key == LIMIT and self.has(COMPLETION_LENGTH) and isinstance(longest, int):
            return max(1, round(training.length_limit / training.max_completion_length * longest))
        return example

    @property
    def _unit(self) -> int:
        sizes = (self.params["group_size"], self.get(MINI))
        return math.lcm(*(size for size in sizes if isinstance(size, int) and size > 0))

    def _round_up(self, completions: int) -> int:
        return -(-completions // self._unit) * self._unit


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

    `recipe` is the value of `--recipe`; `option` and `source` name the candidate in messages. A
    UsageError refuses a value that carries over, and a recipe that does not fit.
    """
    own = document.read_overrides(overrides)
    other = read_recipe(recipe, searched, params) if recipe else None
    plan = TransferPlan(searched, params, tuple(overrides), own, other)
    is_transfer = bool(other or plan.subjects)
    refuse_parameters(own, option, allowed=SETTABLE if is_transfer else ())
    return plan.find_missing(option, source) if is_transfer else None


def read_recipe(name: str, searched: SweepSpec, params: Params) -> Recipe:
    """Read the recipe, a search space by name or file, for a candidate with `params` of a sweep.

    A UsageError refuses a file with problems, another task, or one without a reward of it.
    """
    spec = load_spec(find_space(name, OPTION), to_run=False)
    if spec.task != searched.task:
        fitting = join_names(list_fitting_spaces(searched.task, "")) or "a file of your own"
        raise UsageError(
            f"{OPTION} {name}: its task is {spec.task}, and the sweep's is {searched.task}, whose "
            f"rewards and prompts are others\n    fix: for {searched.task}, write {fitting}"
        )
    rewards = load_task_info(spec.task, spec.space.domains).rewards
    weighted = [key for key, value in params.items() if key.startswith("reward_weights.") and value]
    missing = [key for key in weighted if key.partition(".")[2] not in rewards]
    if missing:
        raise UsageError(
            f"{OPTION} {name}: it has no {join_names(missing)}, which the candidate has\n"
            "    fix: add that weight to its space, or choose a candidate without it"
        )
    # As for the published baseline: the default where the domain has it, else the middle.
    shared = {
        key: params[key] for key in params if key in spec.space.domains and key not in SETTABLE
    }
    complete = spec.space.complete_baseline(shared)
    return Recipe(name, spec, {key: complete[key] for key in SETTABLE})


def list_fitting_spaces(task: str, policy: str) -> list[str]:
    """Return the shipped spaces of a task with a policy from the Hub, those with `policy` first."""
    fitting: dict[str, bool] = {}
    for name, file in list_spaces().items():
        entries = document.read_document(
            file, (), None, document.Problems(document.Place(str(file)))
        )
        if entries.get("task") == task and entries.get("policy") not in POLICIES:
            fitting[name] = entries.get("policy") == policy
    return sorted(fitting, key=lambda name: (not fitting[name], len(name)))


def refuse_parameters(own: document.YamlMap, option: str, *, allowed: Sequence[str] = ()) -> None:
    """Refuse `--set space.` by a UsageError for parameters that come from the candidate."""
    if "space" not in own:
        return
    space = own["space"]
    if not allowed:
        raise UsageError(
            f"{option} takes the parameters of a trial, so --set space. has no effect\n"
            f"    fix: leave it out; only under another policy may {join_names(SETTABLE)} be set"
        )
    for name in space if isinstance(space, document.YamlMap) else [show(space)]:
        if name not in allowed:
            raise UsageError(
                f"--set space.{name}: {option} takes it from the trial: what a sweep finds about "
                f"rewards carries over to another policy\n    fix: {suggest(name, allowed)}leave "
                f"it out; {join_names(allowed)} may be set"
            )


def _describe_conditions(spec: SweepSpec) -> str:
    training, data = spec.training, name_source(spec.data.source, "data")
    data = data or "the prompts that the task writes"
    adapters = f" with adapters of rank {spec.model.lora_rank}" if spec.model.lora_rank else ""
    return (
        f"policy {spec.policy}{adapters}, data {data}, {training.max_completion_length} tokens "
        f"(length_limit {training.length_limit}), {training.steps} steps of "
        f"{training.completions_per_step} completions"
    )


def _title_subject(subject: str, searched: SweepSpec, wanted: SweepSpec) -> str:
    ranks = (searched.model.lora_rank, wanted.model.lora_rank)
    if subject == "trained weights" and not all(ranks):
        names = [f"adapters of rank {rank}" if rank else "all weights" for rank in ranks]
        return f"{names[1]} in place of {names[0]}"
    titles = {"policy": "another policy", "trained weights": "adapters of another rank"}
    return titles.get(subject, f"other {subject}")


def _format_value(value: object) -> str:
    return format_parameter(value) if isinstance(value, float) else show(value)


def _format_setting(key: str, value: object) -> str:
    if key == SOURCE:
        return name_source(str(value), "data") or "the task's own prompts"
    return _format_value(value)


def _list_settings(spec: SweepSpec) -> dict[str, Any]:
    values = list_decisive_values(spec) | {MICRO: attrgetter(MICRO)(spec)}
    skipped = ("task", "objectives.", "space.")
    return {
        key: value
        for key, value in values.items()
        if not key.startswith(skipped) and not key.endswith(NOT_EXPORTED)
    }


def _list_recipe_values(spec: SweepSpec) -> dict[str, Any]:
    sections = {name: getattr(spec, name).model_dump() for name in RECIPE_SECTIONS}
    sections["resources"] = {name: getattr(spec.resources, name) for name in RECIPE_RESOURCES}
    pairs = (
        (f"{s}.{key}", value) for s, values in sections.items() for key, value in values.items()
    )
    return {"policy": spec.policy, **dict(pairs)}
