"""Failed attempts at trials: a trial's own failures count against it.

Lost nodes, unreachable stores and crowded GPUs do not, unless they come in a row.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.tune import Callback

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.incidents import IS_TRIED_AGAIN, WAS_LOST
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.tuning.ray.messages import (
    NODE_DIED,
    AttemptError,
    Cause,
    TrialUpdate,
    pack,
    unpack_attempt,
    unpack_message,
)
from gdpo_tune.tuning.ray.nodes import ClusterNode, Nodes, find_node
from gdpo_tune.tuning.search.searcher import LedgerSearcher

RETRIES = 2
"""Further attempts after failures of a trial's own, each from its newest checkpoint."""
LOSSES = 5
"""Nodes that a trial may lose in a row without a result in between: it might be their killer. The
same number of times it may find its GPU crowded."""
EXCUSE_SECONDS = 60.0
"""Seconds after the death of a process within which the death of its node explains it."""
FOR_EVER = -1
"""How often Ray may start a trial again: we decide that."""
LOST_AGAIN = "its node was lost again and again, each time before it had a result"
"""Reason for giving up a trial that may itself kill its nodes."""


@dataclass
class TrialHistory:
    """Failed attempts at one trial that has not ended, and where it runs."""

    failed: int = 0
    """Attempts that failed by themselves."""
    lost: int = 0
    """Nodes lost, stores out of reach and GPUs crowded in a row, without a result in between."""
    node: str = ""
    """Node on which it runs; empty between two attempts."""
    moving: bool = False
    """True if it has lost its node and has no other yet."""
    cut_from: str = ""
    """Node to whose process the connection was lost: the node may be lost, too."""
    died_on: str = ""
    """Node on which its process died last; the node may turn out to have died with it."""
    died_at: float = 0.0
    given_up: Any = None
    """Ray's trial, if it is given up and has not ended yet."""

    def count(self, cause: Cause, node: str, now: float) -> bool:
        """Count the end of an attempt on a node; return whether there may be another attempt."""
        if cause in ("lost", "store", "crowded"):
            self.lost += 1
            return self.lost <= LOSSES
        if cause == "died":
            self.died_on, self.died_at = node, now
        self.failed += 1
        return self.failed <= RETRIES

    def reclassify_as_node_loss(self, node: str, now: float) -> bool:
        """Return whether a dead process was on this node, which has died too; count it as lost."""
        excused = self.died_on == node and now - self.died_at <= EXCUSE_SECONDS
        if excused:
            self.failed -= 1
            self.lost += 1
            self.died_on = ""
        return excused


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
        history = self._histories[trial.trial_id]
        history.node, history.given_up = self._actors[repr(actor)], None
        if history.moving:
            history.moving = False
            node = self._nodes.describe(history.node)
            self._searcher.record_incident(f"resumes on node {node}", [trial.trial_id])

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any
    ) -> None:
        """Take note of a measurement; a notice about waiting is no progress."""
        if isinstance(unpack_message(result), TrialUpdate):
            self._histories[trial.trial_id].lost = 0

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Count an attempt that has failed, before Ray tries again."""
        error, name = read_error(trial), trial.trial_id
        history = self._histories[name]
        node, reason = history.node, describe_error(error)
        cause = self._find_cause(error, node)
        history.node = ""
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
            if again:
                self._searcher.record_incident(f"{IS_TRIED_AGAIN}: {reason}", [name])
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

    def _find_cause(self, error: BaseException | None, node: str) -> Cause:
        """Return why an attempt ended; mark its node as lost if that was the reason."""
        self._nodes.refresh()
        node_died = isinstance(error, RayActorError) and NODE_DIED in str(error)
        if node_died and self._nodes.is_alive(node):
            self._nodes.mark_lost(node)
        return classify_error(error, node_lost=bool(node) and not self._nodes.is_alive(node))


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
