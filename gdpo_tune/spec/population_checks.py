"""What a population needs: members, something that moves, and places to meet."""

from __future__ import annotations

from gdpo_tune.core.trials import MOVABLE, TrainingSettings
from gdpo_tune.spec.model import Search
from gdpo_tune.spec.problems import KeyPath, Node, Problems
from gdpo_tune.spec.schedulers import PbtSettings
from gdpo_tune.spec.space import Space


def check_population(
    search: Search | None,
    space: Space | None,
    training: TrainingSettings | None,
    root: Node,
    problems: Problems,
) -> None:
    """Under `type: pbt`, trials can be a population."""
    if search is None or not isinstance(search.scheduler, PbtSettings):
        return
    chosen, path = search.scheduler, ("search", "scheduler")

    def refuse(place: KeyPath, reason: str, fix: str) -> None:
        problems.at(root.find(place), place, reason, fix)

    if search.trials < 2:
        reason = "a population of one has nobody to take over from"
        refuse(("search", "trials"), reason, "write 4 or more, or another scheduler")
    if search.sampler not in ("auto", "qmc"):
        reason = "the members of a population begin spread over the space: nothing proposes them"
        refuse(("search", "sampler"), reason, "remove the key, or write another scheduler")
    if search.patience:
        reason = "every member of a population begins before any ends, so none is left to give up"
        refuse(("search", "patience"), reason, "remove the key, or write another scheduler")
    if space is not None and not any(name.startswith(MOVABLE) for name in space.dimensions):
        reason = "nothing can move: neither the learning rate nor a reward weight is searched"
        fix = "search one, such as learning_rate: {log: [3.0e-5, 3.0e-4]}"
        refuse((*path, "type"), reason, fix)
    if training is not None and not chosen.meetings(training.steps):
        reason = f"no step of {training.steps} lies there before the last one"
        refuse((*path, "interval"), reason, f"write {1 / max(2, min(5, training.steps)):g}")
    if chosen.resample == 0 and set(chosen.factors) == {1}:
        reason = "no value would ever move: every factor is 1 and resample is 0"
        refuse((*path, "factors"), reason, "write [0.8, 1.25]")
