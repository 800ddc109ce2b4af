"""Which processes have worked on a sweep, and when."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from optuna import Study
from optuna.storages import BaseStorage

from gdpo_tune.ledger.study import STUDY


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
        session = sum(key.startswith("session:") for key in self.study.user_attrs)
        about = {
            "started": started,
            "slots": slots,
            "provenance": dict(provenance),
            "sampler": sampler,
        }
        self._storage.set_study_user_attr(self._study_id, f"session:{session}", about)
        return session

    def end_session(self, session: int, ending: str = "") -> None:
        """Record that the process is done, for now or for good.

        Args:
            session: its number.
            ending: why nothing was left to run, for a person; empty if something was.
        """
        about = {
            **self.study.user_attrs[f"session:{session}"],
            "finished": time.time(),
            "ending": ending,
        }
        self._storage.set_study_user_attr(self._study_id, f"session:{session}", about)

    def sessions(self) -> list[dict[str, Any]]:
        """Sessions in order, with what `begin_session` and `end_session` were given.

        `finished` (Unix seconds) and `ending` are missing while one runs and for one that was
        killed.
        """
        attrs = self.study.user_attrs
        count = sum(key.startswith("session:") for key in attrs)
        return [attrs[f"session:{session}"] for session in range(count)]
