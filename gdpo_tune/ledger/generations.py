"""What was decided for the population of a sweep, generation by generation."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from optuna.storages import BaseStorage

from gdpo_tune.core.trials import Exploit, Generation

GENERATION = "generation:"
"""Before the number of a generation, in the name of its attribute of the study."""


class Generations:
    """The generations that a sweep's study holds; each is decoded once."""

    def __init__(self, storage: BaseStorage, study_id: int, stale: set[int]) -> None:
        """
        Args:
            storage: holds the study.
            study_id: of the study.
            stale: takes the numbers of trials whose records a decision changes.
        """
        self._storage = storage
        self._study_id = study_id
        self._stale = stale
        self._known: list[Generation] = []
        self._exploits: dict[int, tuple[Exploit, ...]] = {}
        """Number of a member -> what it took over."""
        self._met: dict[int, int] = {}
        """Number of a member -> the step at which it last met others."""

    def decide(self, generation: Generation) -> None:
        """Record what was decided for a population, in one write."""
        key = f"{GENERATION}{len(self.all())}"
        self._storage.set_study_user_attr(self._study_id, key, asdict(generation))
        self._stale.update(generation.members)

    def all(self) -> list[Generation]:
        """Every generation, in the order of their decisions."""
        self._catch_up()
        return list(self._known)

    def lineage(self, number: int) -> tuple[Exploit, ...]:
        """What a trial took over from others, by step."""
        self._catch_up()
        return tuple(sorted(self._exploits.get(number, ()), key=lambda exploit: exploit.step))

    def met(self, number: int) -> int:
        """The step at which a member last met others; 0: it never did."""
        self._catch_up()
        return self._met.get(number, 0)

    def _catch_up(self) -> None:
        """Decode what was decided since, by this process or by the one that writes."""
        attrs = self._storage.get_study_user_attrs(self._study_id)
        while (stored := attrs.get(f"{GENERATION}{len(self._known)}")) is not None:
            generation = _generation(stored)
            self._known.append(generation)
            for member in generation.members:
                self._met[member] = max(generation.step, self._met.get(member, 0))
            for exploit in generation.exploits:
                known = self._exploits.get(exploit.member, ())
                self._exploits[exploit.member] = (*known, exploit)


def _generation(stored: dict[str, Any]) -> Generation:
    exploits = tuple(Exploit(**exploit) for exploit in stored["exploits"])
    return Generation(stored["step"], tuple(stored["members"]), exploits)
