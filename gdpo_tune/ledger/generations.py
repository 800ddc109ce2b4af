"""What was decided for the population of a sweep, generation by generation."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from optuna import Study
from optuna.storages import BaseStorage

from gdpo_tune.ledger.sessions import Sessions
from gdpo_tune.trials import Exploit, Generation

GENERATION = "generation:"
"""Before the number of a generation, in the name of its attribute of the study."""


class Generations(Sessions):
    """The generations that a sweep's study holds."""

    def __init__(self, storage: BaseStorage, study: Study) -> None:
        super().__init__(storage, study)
        self._stale: set[int] = set()
        """Numbers of the trials whose records are to be read again."""

    def decide_generation(self, generation: Generation) -> None:
        """Record what was decided for a population, in one write."""
        key = f"{GENERATION}{len(self.generations())}"
        self._storage.set_study_user_attr(self._study_id, key, asdict(generation))
        self._stale.update(generation.members)

    def generations(self) -> list[Generation]:
        """Every generation, in the order of their decisions."""
        attrs = self._storage.get_study_user_attrs(self._study_id)
        count = sum(key.startswith(GENERATION) for key in attrs)
        return [_generation(attrs[f"{GENERATION}{index}"]) for index in range(count)]

    def lineage(self, number: int) -> tuple[Exploit, ...]:
        """What a trial took over from others, by step."""
        found = [e for generation in self.generations() for e in generation.exploits]
        own = [exploit for exploit in found if exploit.member == number]
        return tuple(sorted(own, key=lambda exploit: exploit.step))


def _generation(stored: dict[str, Any]) -> Generation:
    exploits = tuple(Exploit(**exploit) for exploit in stored["exploits"])
    return Generation(stored["step"], tuple(stored["members"]), exploits)
