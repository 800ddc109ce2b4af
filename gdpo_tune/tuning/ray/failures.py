"""Failed attempts at trials: a trial's own failures count against it.

Lost nodes, unreachable stores and crowded GPUs do not, unless they come in a row.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.tune import Callback

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.events import IS_TRIED_AGAIN, WAS_LOST
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.tuning.ray.messages import (
    NODE_DIED,
    AttemptError,
    Cause,
    TrialPlaced,
    TrialUpdate,
    pack,
    unpack_attempt,
    unpack_message,
)
from gdpo_tune.tuning.ray.nodes import ClusterNode, Nodes, find_node
from gdpo_tune.tuning.ray.trial_history import DEATHS, LOSSES, TrialHistory
from gdpo_tune.tuning.search.searcher import LedgerSearcher

FOR_EVER = -1
"""How often Ray may start a trial again: we decide that."""
LOST_AGAIN = "its node was lost again and again, each time before it had a result"
"""Reason for giving up a trial that may itself kill its nodes."""


class Attempts(Callback):
    """Decides whether a trial that failed is tried again, and passes final reasons to the searcher.

    Ray would count the loss of a node as a failure of each trial on it. So Ray retries without a
    limit, and a trial that may not be tried again finds `AttemptConfig.given_up` at its start.
    """

    def __init__(
        self, searcher: LedgerSearcher, nodes: Nodes, on_process: Callable[[], None]
    ) -> None:
        self._searcher = searcher
        self._nodes = nodes
        self._on_process = on_process
        """Called when a process was started."""
        self._actors: dict[str, str] = {}
        """Name of each actor so far -> its node. A handle would keep an actor alive."""
        self._histories: defaultdict[str, TrialHistory] = defaultdict(TrialHistory)
        """By Ray's id of a trial."""
        self._dead_hosts: dict[str, list[str]] = {}
        """Shared process that died -> Ray's ids of its trials."""
        nodes.on_change = self.on_nodes_changed

    def __getstate__(self) -> dict[str, Any]:
        """Return no state, for the copy that Ray writes and nothing reads: it knows processes."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Note where a trial runs; its process may have served others before."""
        actor = trial.temporary_state.ray_actor
        if repr(actor) not in self._actors:
            self._actors[repr(actor)] = find_node(actor)
            self._on_process()
        self._histories[trial.trial_id].given_up = None
        if unpack_attempt(trial.config).setup.pack == 1:  # otherwise see `TrialPlaced`
            self._note_node(trial.trial_id, self._actors[repr(actor)])

    def _note_node(self, name: str, node: str) -> None:
        history = self._histories[name]
        history.node = node
        if history.moving:
            history.moving = False
            where = self._nodes.describe(node)
            self._searcher.record_incident(f"resumes on node {where}", [name])

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any
    ) -> None:
        """Take note of a measurement or a place; a notice about waiting is no progress."""
        message, history = unpack_message(result), self._histories[trial.trial_id]
        if isinstance(message, TrialPlaced):
            history.host = message.host
            self._note_node(trial.trial_id, message.node)
            self._on_process()
        elif isinstance(message, TrialUpdate):
            every = unpack_attempt(trial.config).trial.training.checkpoint_every
            history.note_step(message.measurement.step, every)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Count an attempt that has failed, before Ray tries again."""
        error, name = read_error(trial), trial.trial_id
        history = self._histories[name]
        node, reason = history.node, describe_error(error)
        cause = self._find_cause(error, node)
        if cause == "host":
            cause = self._find_cause_of_death(trial)
        history.node = history.host = ""
        if cause in ("changed", "directory"):
            if cause == "directory":
                self._searcher.record_incident(reason, [name])
            return
        again = history.count(cause, node, time.monotonic())
        if cause == "lost":
            if not history.moving:  # otherwise it was reported together with the others there
                history.moving, history.cut_from = True, node
                self._searcher.record_incident(
                    f"was cut off from node {self._nodes.describe(node)}", [name]
                )
        elif cause == "store":
            self._searcher.record_incident(
                f"leaves node {self._nodes.describe(node)}: {reason}", [name]
            )
        else:
            write_error(unpack_attempt(trial.config).trial, error)
            if again and cause != "host":
                self._searcher.record_incident(f"{IS_TRIED_AGAIN}: {reason}", [name])
        if history.host_deaths >= DEATHS:
            attempt = unpack_attempt(trial.config)
            trial.config.update(pack(replace(attempt, alone=True)))
        if not again:
            set_given_up(trial, describe_end(cause, reason, error))
            history.given_up = trial

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Forget a trial whose end is in the ledger by now, and free what Ray would hold of it."""
        self._histories.pop(trial.trial_id, None)
        # Ray would write all of this to a snapshot that is not read
        trial.config.clear()
        trial.evaluated_params.clear()
        trial.metric_analysis.clear()
        trial.metric_n_steps.clear()
        trial.run_metadata.last_result = {"ended": True}  # Ray prints a line if it is empty
        trial.experiment_tag = ""
        # A result requested when the process started: reading it would wait for the process.
        trial._default_result_or_future = None

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Pass on why Ray gives a trial up; its traceback stays beside the trial."""
        error, attempt = read_error(trial), unpack_attempt(trial.config)
        self._searcher.on_failure(trial.trial_id, str(attempt.given_up or describe_error(error)))
        write_error(attempt.trial, error)
        self.on_trial_complete(iteration, trials, trial)

    def on_nodes_changed(self, lost: Sequence[ClusterNode], joined: Sequence[ClusterNode]) -> None:
        """Report lost and joined nodes; reclassify failures of trials on lost nodes."""
        for node in lost:
            running, excused, disconnected = list[str](), list[str](), list[str]()
            for name, history in self._histories.items():
                if history.node == node.id:
                    history.moving = True
                    running.append(name)
                if history.reclassify_as_node_loss(node.id, time.monotonic()):
                    excused.append(name)
                    if history.given_up is not None:
                        set_given_up(history.given_up, None)
                        history.given_up = None
                if history.cut_from == node.id:
                    disconnected.append(name)
            trials = [*running, *excused, *disconnected]
            self._searcher.record_incident(f"node {node} {WAS_LOST}", trials)
        for node in joined:
            self._searcher.record_incident(f"node {node} has joined", [])
        self._searcher.resize(self._nodes.list_alive())

    def _find_cause_of_death(self, trial: Any) -> Cause:
        """Return whether a shared process died with one trial or several; report it once."""
        host = self._histories[trial.trial_id].host
        together = [name for name, history in self._histories.items() if history.host == host]
        is_first = host not in self._dead_hosts
        together = self._dead_hosts.setdefault(host, together)
        if len(together) == 1:
            return "died"
        if is_first:
            text = f"{IS_TRIED_AGAIN}: {describe_error(read_error(trial))}"
            self._searcher.record_incident(text, together)
        return "host"

    def _find_cause(self, error: BaseException | None, node: str) -> Cause:
        """Return why an attempt ended; mark its node as lost if that was the reason."""
        self._nodes.refresh()
        node_died = isinstance(error, RayActorError) and NODE_DIED in str(error)
        if node_died and self._nodes.is_alive(node):
            self._nodes.mark_lost(node)
        node_lost = bool(node) and not self._nodes.is_alive(node)
        cause = classify_error(error, node_lost=node_lost)
        return "lost" if cause == "host" and node_lost else cause


def describe_end(cause: Cause, reason: str, error: BaseException | None) -> str | Exception:
    """Return why a trial is given up; an error where it is not the trial's fault.

    Such an error stops the sweep, and the same command resumes it with this trial.
    """
    if cause == "crowded":
        return ResourcesError(
            f"{reason}; {LOSSES + 1} attempts in a row\n    fix: end the other processes on that "
            "GPU, or take another one, and run the same command to resume"
        )
    outage = getattr(getattr(error, "cause", None), "outage", None)  # of a store
    return LOST_AGAIN if cause == "lost" else outage or reason


def set_given_up(trial: Any, why: str | Exception | None) -> None:
    """Let one of Ray's trials end at its next start, with this reason; None: let it continue."""
    trial.config.update(pack(replace(unpack_attempt(trial.config), given_up=why)))
    # if that attempt fails too, Ray gives the trial up
    trial.max_failures = FOR_EVER if why is None else 0


def read_error(trial: Any) -> BaseException | None:
    """Return the error of a Ray trial's last attempt; None if Ray kept none."""
    # Ray's own accessor reads the uploaded copy, which does not exist before a snapshot
    file = trial.pickled_error_file
    return cloudpickle.loads(Path(file).read_bytes()) if file else None


def write_error(config: TrialConfig, error: BaseException | None) -> None:
    """Keep a traceback beside the trial."""
    config.directory.mkdir(parents=True, exist_ok=True)
    (config.directory / "error.txt").write_text(str(error), encoding="utf-8")


def classify_error(error: BaseException | None, *, node_lost: bool) -> Cause:
    """Return why an attempt ended, by what Ray says and by whether its node is lost."""
    raised = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(raised, AttemptError):
        return raised.cause
    if isinstance(error, RayTaskError) or not isinstance(error, RayActorError):
        return "own"
    lost = error.preempted or NODE_DIED in str(error) or node_lost
    return "lost" if lost or isinstance(error, ActorUnavailableError) else "died"


def describe_error(error: BaseException | None) -> str:
    """Return an attempt's error in one line, for the ledger."""
    raised = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(raised, AttemptError):
        return str(raised)
    if isinstance(error, RayActorError) and not isinstance(error, RayTaskError):
        return "the trial's process died (killed, out of memory, or crashed)"
    return f"{type(raised).__name__}: {raised}" if raised else "unknown"
