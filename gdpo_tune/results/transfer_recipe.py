"""Search spaces as recipes, from which a candidate takes what its own sweep cannot tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trials import Params
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.document import Mark, Problems, dump_flow, read_document
from gdpo_tune.spec.space import format_domain, get_parameter_info
from gdpo_tune.spec.starter import find_space, list_spaces
from gdpo_tune.spec.text import join_names

OPTION = "--recipe"
FREE = ("learning_rate", "beta", "temperature", "epsilon", "epsilon_high", "num_iterations")
"""Parameters that may need other values under another policy; all others carry over."""
SECTIONS = ("data", "model", "rollout", "training", "sandbox")


@dataclass(frozen=True)
class TransferRecipe:
    """A search space as the source of the values that do not carry over."""

    name: str
    """As the user wrote it."""
    spec: SweepSpec
    params: Params
    """One value for each parameter of `FREE`."""

    def list_overrides(self, searched: SweepSpec) -> list[str]:
        """Return the overrides that give a sweep's file the recipe's values."""
        mine, others = _list_values(self.spec), _list_values(searched)
        changed = {key: value for key, value in mine.items() if value != others[key]}
        chosen = {f"space.{name}": value for name, value in self.params.items()}
        return [f"{key}={dump_flow(value)}" for key, value in {**changed, **chosen}.items()]

    def name_source(self, key: str) -> str:
        """Return where the value of a dotted key is from, for a person."""
        source, name = f"`{OPTION} {self.name}`", key.removeprefix("space.")
        domains = self.spec.space.domains
        if key == "training.length_limit":
            reward = load_task_info(self.spec.task, domains).length_reward
            weights = domains.get(f"reward_weights.{reward}")
            if weights is not None and weights.list_values() == (0,):
                return f"{source}, in which the length has no weight"
        if name not in self.params or name not in self.spec.space.searched_domains:
            return source
        is_default = self.params[name] == get_parameter_info(name).default
        choice = "that of its published baseline" if is_default else "the middle"
        return f"{source}: {choice}, of {format_domain(domains[name])}"


def read_recipe(name: str, searched: SweepSpec, params: Params) -> TransferRecipe:
    """Read the recipe, a search space by name or file, for a candidate with `params` of a sweep.

    Raises:
        UsageError: there is none, or it is for another task or without a reward of the candidate.
        SpecError: the file has problems.
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
    shared = {key: params[key] for key in params if key in spec.space.domains and key not in FREE}
    complete = spec.space.complete_baseline(shared)
    return TransferRecipe(name, spec, {key: complete[key] for key in FREE})


def list_fitting_spaces(task: str, policy: str) -> list[str]:
    """Return the names of the shipped spaces of a task with a policy from the Hub.

    Those with `policy` come first.
    """
    fitting: dict[str, bool] = {}
    for name, file in list_spaces().items():
        entries = read_document(file, (), None, Problems(Mark(str(file))))
        if entries.get("task") == task and entries.get("policy") not in POLICIES:
            fitting[name] = entries.get("policy") == policy
    return sorted(fitting, key=lambda name: (not fitting[name], len(name)))


def _list_values(spec: SweepSpec) -> Mapping[str, Any]:
    def list_pairs() -> Iterator[tuple[str, Any]]:
        yield "policy", spec.policy
        for section in SECTIONS:
            for key, value in getattr(spec, section).model_dump().items():
                yield f"{section}.{key}", value
        for key in ("cpus", "gpus", "workers"):
            yield f"resources.{key}", getattr(spec.resources, key)

    return dict(list_pairs())
