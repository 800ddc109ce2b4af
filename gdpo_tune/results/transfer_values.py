"""Values of a training that repeats a candidate: from `--set`, else a recipe, else the sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gdpo_tune.core.settings import DataSettings
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trials import Params
from gdpo_tune.results.public_record import name_source
from gdpo_tune.results.transfer_recipe import TransferRecipe
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.document import ABSENT, Mark, YamlMap, locate

RATE = "space.learning_rate"
STEPS, TOTAL, MINI, MICRO, LONGEST, LIMIT = (
    f"training.{name}"
    for name in (
        "steps",
        "completions_per_step",
        "mini_batch_size",
        "micro_batch_size",
        "max_completion_length",
        "length_limit",
    )
)
PROMPT, RANK, SCORING = "data.max_prompt_length", "model.lora_rank", "scoring"
SUBJECTS = {
    "policy": ("policy",),
    "trained weights": (RANK,),
    "data": (
        *("data.source", "data.config", "data.split", "data.layout"),
        *(f"data.{name}" for name in DataSettings.list_later()),
    ),
    "lengths": (LONGEST, LIMIT),
    "scoring": (SCORING,),
}
"""Subject of a search -> keys that change it."""
NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    RATE: (("policy", "trained weights"), "the best one differs by policy, and for adapters"),
    STEPS: (("policy", "data"), "another policy, or other data, improves for longer"),
    TOTAL: (("policy", "data"), "the noise of a step depends on policy and data"),
    MICRO: (("policy", "data"), "it decides the memory, and 0 computes a whole batch at once"),
    LONGEST: (("policy", "data"), "another policy, or other data, has longer completions"),
    LIMIT: (("policy", "data", "lengths"), "the length reward pays for that many tokens"),
    PROMPT: (("data",), "longer prompts are left out"),
}
"""Key whose value does not carry over -> subjects on which it depends, and the reason."""


@dataclass(frozen=True)
class WantedValues:
    """Values of a training that repeats a candidate."""

    searched: SweepSpec
    """The candidate's sweep."""
    params: Params
    """Those of the candidate."""
    own: YamlMap
    """Values of `--set`."""
    recipe: TransferRecipe | None

    def is_set(self, key: str) -> bool:
        """Return whether `--set` gives a dotted key a value."""
        return locate(self.own, Mark(""), (key,))[1] is not ABSENT

    def has(self, key: str) -> bool:
        """Return whether `--set` or the recipe gives a key a value."""
        return self.is_set(key) or self.recipe is not None

    def get(self, key: str) -> Any:
        """Return the value that the training will have; that of `--set` is not checked yet."""
        if self.is_set(key):
            return locate(self.own, Mark(""), (key,))[1]
        # What a reward means is what its weight was found for.
        if self.recipe is None or key == SCORING:
            return get_value(self.searched, key)
        return get_value(self.recipe.spec, key)

    def get_searched(self, key: str) -> Any:
        """Return the candidate's value."""
        section, _, name = key.partition(".")
        return self.params[name] if section == "space" else get_value(self.searched, key)

    def is_changed(self, key: str) -> bool:
        """Return whether a key has another value; a key without one is as good as 0 or ''.

        Adapters of another rank train the same weights.
        """
        wanted, searched = self.get(key), self.get_searched(key)
        if key == RANK:
            return bool(wanted) != bool(searched)
        return (wanted or None) != (searched or None)

    def list_subjects(self) -> tuple[str, ...]:
        """Return the subjects that differ from those of the sweep."""
        return tuple(name for name, keys in SUBJECTS.items() if any(map(self.is_changed, keys)))

    def list_needs(self) -> list[str]:
        """Return the keys whose values do not carry over."""
        subjects = {*self.list_subjects()}
        needs = [key for key, (others, _) in NEEDS.items() if subjects & {*others}]
        return [key for key in needs if key != LIMIT or self._pays_for_length()]

    def _pays_for_length(self) -> bool:
        reward = load_task_info(self.searched.task, self.params).length_reward
        return float(self.params.get(f"reward_weights.{reward}", 0.0)) > 0


def get_value(spec: SweepSpec, key: str) -> Any:
    """Return the value of a dotted key that is no parameter."""
    value: Any = spec
    for name in key.split("."):
        value = getattr(value, name)
    return value


def describe_conditions(spec: SweepSpec) -> str:
    """Describe policy, data, lengths and batch of a sweep."""
    training, data = spec.training, name_source(spec.data.source, "data")
    data = data or "the prompts that the task writes"
    adapters = f" with adapters of rank {spec.model.lora_rank}" if spec.model.lora_rank else ""
    return (
        f"policy {spec.policy}{adapters}, data {data}, {training.max_completion_length} tokens "
        f"(length_limit {training.length_limit}), {training.steps} steps of "
        f"{training.completions_per_step} completions"
    )
