"""History of a sweep beside its trials: sessions, incidents, requests, generations, content."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from optuna import Study
from optuna.storages import BaseStorage

from gdpo_tune.core.events import Incident, RecordedRequest
from gdpo_tune.core.trials import Exploit, Generation
from gdpo_tune.ledger.budget import WorkClock
from gdpo_tune.ledger.steering_state import decode_recorded, encode_recorded

SESSION, INCIDENT, GENERATION, REQUEST = "session:", "incident:", "generation:", "request:"
CONTENT = "content:"
"""Prefixes of the study's attributes, before a number that starts at 0."""


class SweepHistory:
    """Sessions, incidents, requests and generations, each in its own attribute of the study.

    A session is the time in which one process ran trials.
    """

    _clock: WorkClock
    """Runs in a session."""

    def __init__(self, storage: BaseStorage, study: Study) -> None:
        self.study = study
        """The Optuna study, for `optuna.visualization` and the like; never write through it."""
        self._storage = storage
        self._study_id = storage.get_study_id_from_name(study.study_name)
        self._generations: list[Generation] = []
        """Generations decoded so far."""
        self._requests: list[RecordedRequest] = []
        """Requests decoded so far."""

    def begin_session(
        self, started: float, slots: int, provenance: Mapping[str, Any], sampler: str = ""
    ) -> int:
        """Record that a process works on this sweep; return the session's number.

        `started` is Unix time in seconds, `slots` the number of trials that run side by side.
        `provenance` holds revision, versions and hardware as JSON. `sampler` is the name of the
        sampler, and why it was chosen.
        """
        self._clock.ended.set()  # of a session that was not ended
        self._clock = WorkClock()
        self._clock.start()
        content = {"started": started, "slots": slots, "provenance": dict(provenance)}
        return self._append(SESSION, {**content, "sampler": sampler})

    def end_session(self, session: int, ending: str = "") -> None:
        """Record that the process has stopped working on the sweep.

        `ending` says why nothing was left to run, for a person; it is empty if something was left.
        """
        self._clock.ended.set()
        self.record_gaps()
        content = {**self._list(SESSION)[session], "finished": time.time(), "ending": ending}
        self._set_entry(SESSION, session, content)

    def record_ending(self, ending: str) -> None:
        """Record why nothing is left to run, if the newest session was killed before it did.

        It still has no `finished`, so that its hours count as before.
        """
        sessions = self._list(SESSION)
        if sessions and not sessions[-1].get("ending"):
            self._set_entry(SESSION, len(sessions) - 1, {**sessions[-1], "ending": ending})

    def record_gaps(self) -> None:
        """Record in the newest session when its process did not work; usually that is never."""
        if gaps := self._clock.take_gaps():
            *_, newest = sessions = self._list(SESSION)
            content = {**newest, "gaps": [*newest.get("gaps", ()), *map(list, gaps)]}
            self._set_entry(SESSION, len(sessions) - 1, content)

    def record_incident(self, incident: Incident) -> None:
        """Record an incident in the newest session."""
        session, trials = len(self._list(SESSION)) - 1, list(incident.trials)
        content = {"time": incident.time, "what": incident.description, "trials": trials}
        self._append(INCIDENT, {**content, "session": session})

    def get_sessions(self) -> list[dict[str, Any]]:
        """Return the sessions in order, as `begin_session` and `end_session` wrote them.

        `finished` (Unix seconds) is missing in a session that runs or was killed, and so is
        `ending` until such a sweep is found finished.
        `incidents` holds the session's `Incident`s, `gaps` what `WorkClock` found, if anything.
        """
        incidents = defaultdict[int, list[Incident]](list)
        for stored in self._list(INCIDENT):
            incident = Incident(stored["time"], stored["what"], tuple(stored["trials"]))
            incidents[stored["session"]].append(incident)
        return [
            {**stored, "incidents": incidents[session]}
            for session, stored in enumerate(self._list(SESSION))
        ]

    def get_contents(self) -> list[dict[str, Any]]:
        """Return the content that decided the results, by time; see `Ledger.compare_content`.

        `digests` are those of `core.content`, `time` is Unix time in seconds. `first` is the number
        of the first trial with that content. After an accepted change, `changes` are its names, and
        `one_front` is true if trials before and after it share a front.
        """
        return self._list(CONTENT)

    def record_generation(self, generation: Generation) -> None:
        """Record the decisions of one meeting of a population, in one write."""
        self._append(GENERATION, asdict(generation))

    def get_generations(self) -> list[Generation]:
        """Return every generation in order; do not change the list."""
        attributes = self._storage.get_study_user_attrs(self._study_id)
        while stored := attributes.get(f"{GENERATION}{len(self._generations)}"):
            exploits = tuple(Exploit(**exploit) for exploit in stored["exploits"])
            generation = Generation(stored["step"], tuple(stored["members"]), exploits)
            self._generations.append(generation)
        return self._generations

    def record_request(self, request: RecordedRequest) -> None:
        """Record a request, and what came of it, in one write."""
        self._append(REQUEST, encode_recorded(request))

    def get_requests(self) -> list[RecordedRequest]:
        """Return every request that was applied or refused, in order; do not change the list."""
        attributes = self._storage.get_study_user_attrs(self._study_id)
        while stored := attributes.get(f"{REQUEST}{len(self._requests)}"):
            self._requests.append(decode_recorded(stored))
        return self._requests

    def find_lineage(self, number: int) -> tuple[Exploit, ...]:
        """Return the checkpoints that a trial took over from others, by step."""
        exploits = (exploit for past in self.get_generations() for exploit in past.exploits)
        return tuple(exploit for exploit in exploits if exploit.member == number)

    def find_last_meeting(self, number: int) -> int:
        """Return the step at which a member last met others; 0 if it never did."""
        generations = reversed(self.get_generations())
        return next((past.step for past in generations if number in past.members), 0)

    def _append(self, prefix: str, content: Mapping[str, Any]) -> int:
        """Store a new entry in one write; return its number."""
        number = len(self._list(prefix))
        self._set_entry(prefix, number, content)
        return number

    def _set_entry(self, prefix: str, number: int, content: Mapping[str, Any]) -> None:
        self._storage.set_study_user_attr(self._study_id, f"{prefix}{number}", content)

    def _list(self, prefix: str) -> list[dict[str, Any]]:
        attributes = self._storage.get_study_user_attrs(self._study_id)
        count = sum(key.startswith(prefix) for key in attributes)
        return [attributes[f"{prefix}{number}"] for number in range(count)]
