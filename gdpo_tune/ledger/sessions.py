"""Which processes have worked on a sweep, and when."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from optuna import Study
from optuna.storages import BaseStorage

from gdpo_tune.core.trials import Incident
from gdpo_tune.ledger.study import STUDY

SESSION, INCIDENT = "session:", "incident:"
"""Before the number of each, in the name of its attribute of the study."""


class Sessions:
    """The sessions that a sweep's study holds: one for each process that has run trials."""

    def __init__(self, storage: BaseStorage, study: Study) -> None:
        self.study = study
        """The Optuna study, for `optuna.visualization` and the like; never write through it."""
        self._storage = storage
        self._study_id = storage.get_study_id_from_name(STUDY)

    def begin_session(
        self, started: float, slots: int, provenance: Mapping[str, Any], sampler: str = ""
    ) -> int:
        """Record that a process works on this sweep; return the session's number.

        Args:
            started: Unix time in seconds.
            slots: trials that run side by side.
            provenance: revision, versions and hardware, as JSON.
            sampler: who proposes configurations, and why.
        """
        session = sum(key.startswith(SESSION) for key in self.study.user_attrs)
        about = {
            "started": started,
            "slots": slots,
            "provenance": dict(provenance),
            "sampler": sampler,
        }
        self._storage.set_study_user_attr(self._study_id, f"{SESSION}{session}", about)
        return session

    def note(self, incident: Incident) -> None:
        """Record what has befallen the sweep in its newest session."""
        attrs = self.study.user_attrs
        session = sum(key.startswith(SESSION) for key in attrs) - 1
        number = sum(key.startswith(INCIDENT) for key in attrs)
        about = {
            "time": incident.time,
            "what": incident.description,
            "trials": list(incident.trials),
            "session": session,
        }
        self._storage.set_study_user_attr(self._study_id, f"{INCIDENT}{number}", about)

    def end_session(self, session: int, ending: str = "") -> None:
        """Record that the process is done, for now or for good.

        Args:
            session: its number.
            ending: why nothing was left to run, for a person; empty if something was.
        """
        about = {
            **self.study.user_attrs[f"{SESSION}{session}"],
            "finished": time.time(),
            "ending": ending,
        }
        self._storage.set_study_user_attr(self._study_id, f"{SESSION}{session}", about)

    def sessions(self) -> list[dict[str, Any]]:
        """Sessions in order, with what `begin_session` and `end_session` were given.

        `finished` (Unix seconds) and `ending` are missing while one runs and for one that was
        killed. `incidents` is what befell the sweep meanwhile, each an `Incident`.
        """
        attrs = self.study.user_attrs
        incidents: dict[int, list[Incident]] = {}
        for number in range(sum(key.startswith(INCIDENT) for key in attrs)):
            about = attrs[f"{INCIDENT}{number}"]
            found = Incident(about["time"], about["what"], tuple(about["trials"]))
            incidents.setdefault(about["session"], []).append(found)
        count = sum(key.startswith(SESSION) for key in attrs)
        return [
            {**attrs[f"{SESSION}{session}"], "incidents": incidents.get(session, [])}
            for session in range(count)
        ]
