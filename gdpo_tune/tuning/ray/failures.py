"""What only Ray's callbacks see: processes, why attempts at trials fail, and the end of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.tune import Callback

from gdpo_tune.core.trials import TrialConfig
from gdpo_tune.tuning.ray.attempts import Accounts
from gdpo_tune.tuning.ray.folder import FolderAwayError
from gdpo_tune.tuning.ray.lost import NODE_DIED, NodeLostError, StoreAwayError, WorkerDiedError
from gdpo_tune.tuning.ray.nodes import Node, Nodes, node_of
from gdpo_tune.tuning.ray.trainable import GIVEN_UP
from gdpo_tune.tuning.search.searcher import LedgerSearcher

Cause = Literal["changed", "lost", "folder", "away", "died", "own"]
"""Of the end of an attempt: it asked for another process, it lost its node, the sweep's folder was
away, its node did not reach the store, its process died for reasons that nobody told, or it raised
something."""

FOR_EVER = -1
"""What Ray is told of how often a trial may fail: who is tried again is our decision."""
LOST_AGAIN = "its node was lost again and again, each time before it had a result"
"""Why a trial is given up that may be what kills its nodes."""


class Attempts(Callback):
    """Says that a process started, decides whether a trial that failed is tried again, hands the
    reason of a final failure to the searcher, and makes Ray forget what ended trials were about.

    Ray would count the loss of a node as a failure of each trial on it. So it is told to try for
    ever, and a trial that may not be tried again finds that in its config when it starts.
    """

    def __init__(
        self,
        searcher: LedgerSearcher,
        nodes: Nodes,
        on_process: Callable[[], None],
        node_of_actor: Callable[[Any], str] = node_of,
    ) -> None:
        self._searcher = searcher
        self._nodes = nodes
        self._on_process = on_process
        self._node_of = node_of_actor
        self._processes: dict[str, str] = {}
        """The actors of all trials so far, and the node of each. Their names: a handle would keep
        one alive."""
        self._where: dict[str, str] = {}
        """Ray's id of a trial under way -> its node."""
        self._moving: set[str] = set()
        """Trials that lost their node and have no other yet."""
        self._cut: dict[str, str] = {}
        """Trials that lost the connection to their process, and its node: it may be lost, too."""
        self._given_up: dict[str, Any] = {}
        """Trials that are given up, and have not been told yet."""
        self._accounts = Accounts()
        nodes.watch(self.on_nodes)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray has a process for the trial, which may have served others before."""
        actor, name = trial.temporary_state.ray_actor, trial.trial_id
        if repr(actor) not in self._processes:
            self._processes[repr(actor)] = self._node_of(actor)
            self._on_process()
        self._where[name] = self._processes[repr(actor)]
        self._given_up.pop(name, None)
        if name in self._moving:
            self._moving.discard(name)
            here = self._nodes.named(self._where[name])
            self._searcher.note(f"goes on at node {here}", [name])

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any
    ) -> None:
        """A trial gets on, unless it only says what it waits for."""
        if "measurement" in result:
            self._accounts.progressed(trial.trial_id)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """An attempt has failed, and Ray is about to try again."""
        error, name = last_error(trial), trial.trial_id
        node = self._where.get(name, "")
        why = self._cause(error, node)
        self._where.pop(name, None)
        if why == "changed":
            return
        told = reason(error)
        if why == "folder":
            self._searcher.note(told, [name])
            return
        if why == "lost":
            again = self._accounts.lost(name)
            if name not in self._moving:  # else it was told together with the others there
                self._moving.add(name)
                self._cut[name] = node
                known = self._nodes.named(node)
                self._searcher.note(f"was cut off from node {known}", [name])
        elif why == "away":
            again = self._accounts.lost(name)
            self._searcher.note(f"leaves node {self._nodes.named(node)}: {told}", [name])
        else:
            died = why == "died"
            again = (
                self._accounts.died(name, node, time.monotonic())
                if died
                else self._accounts.failed(name)
            )
            write_error(trial.config["trial"], error)
            if again:
                self._searcher.note(f"is tried again: {told}", [name])
        if not again:
            trial.config[GIVEN_UP] = given_up(why, error)
            trial.max_failures = 0  # should not even that attempt come to its end
            self._given_up[name] = trial

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Whatever there is to know of the trial is in the ledger by now."""
        self._close(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray gives the trial up: the reason goes to the ledger, the traceback beside the trial."""
        error = last_error(trial)
        self._searcher.on_failure(trial.trial_id, trial.config.get(GIVEN_UP) or reason(error))
        write_error(trial.config["trial"], error)
        self._close(trial)

    def on_nodes(self, gone: Sequence[Node], come: Sequence[Node]) -> None:
        """Nodes have gone and come."""
        for node in gone:
            there = [name for name, where in self._where.items() if where == node.id]
            excused = self._accounts.excuse(node.id, time.monotonic())
            for trial in [self._given_up.pop(name) for name in excused if name in self._given_up]:
                del trial.config[GIVEN_UP]
                trial.max_failures = FOR_EVER
            self._moving.update(there)
            cut = [name for name, where in self._cut.items() if where == node.id]
            self._searcher.note(f"node {node} was lost", [*there, *excused, *cut])
        for node in come:
            self._searcher.note(f"node {node} has joined", [])
        self._searcher.fit(self._nodes.alive())

    def _cause(self, error: BaseException | None, node: str) -> Cause:
        """What an attempt ended of; if that was its node, all hear that it has gone."""
        self._nodes.look()
        if isinstance(error, RayActorError) and NODE_DIED in str(error) and self._nodes.has(node):
            self._nodes.lose(node)
        return cause(error, gone=bool(node) and not self._nodes.has(node))

    def _close(self, trial: Any) -> None:
        self._where.pop(trial.trial_id, None)
        self._moving.discard(trial.trial_id)
        self._cut.pop(trial.trial_id, None)
        self._given_up.pop(trial.trial_id, None)
        self._accounts.close(trial.trial_id)
        forget(trial)


def forget(trial: Any) -> None:
    """Empty what Ray would hold of a trial to the end of the sweep, and then write to a snapshot
    that nobody reads."""
    trial.config.clear()
    trial.evaluated_params.clear()
    trial.metric_analysis.clear()
    trial.metric_n_steps.clear()
    trial.run_metadata.last_result = {"ended": True}  # of an empty one Ray prints a line
    trial.experiment_tag = ""
    # What its process was asked for as it started: who asks for the last result would wait for it.
    trial._default_result_or_future = None


def last_error(trial: Any) -> BaseException | None:
    """What ended a Ray trial's last attempt; None if Ray kept no error."""
    # Ray's own accessor reads the uploaded copy, which does not exist before a snapshot
    file = trial.pickled_error_file
    return cloudpickle.loads(Path(file).read_bytes()) if file else None


def write_error(config: TrialConfig, error: BaseException | None) -> None:
    """Keep a traceback beside the trial."""
    config.directory.mkdir(parents=True, exist_ok=True)
    (config.directory / "error.txt").write_text(str(error), encoding="utf-8")


def given_up(why: Cause, error: BaseException | None) -> str | Exception:
    """What the last attempt ended of: a reason of the trial's, or an error that ends the sweep."""
    if (
        why == "away"
        and isinstance(error, RayTaskError)
        and isinstance(error.cause, StoreAwayError)
    ):
        return error.cause.error
    return LOST_AGAIN if why == "lost" else reason(error)


def cause(error: BaseException | None, *, gone: bool) -> Cause:
    """What an attempt ended of.

    Args:
        error: what Ray says.
        gone: whether its node is no longer there.
    """
    told = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(told, NodeLostError):
        return "lost"
    if isinstance(told, StoreAwayError):
        return "away"
    if isinstance(told, FolderAwayError):
        return "folder"
    if isinstance(error, RayTaskError):
        asked = isinstance(told, RayActorError) and told.preempted
        return "changed" if asked else "own"
    if isinstance(error, ActorUnavailableError):
        return "lost"
    if isinstance(error, RayActorError):
        lost = error.preempted or NODE_DIED in str(error) or gone
        return "lost" if lost else "died"
    return "own"


def reason(error: BaseException | None) -> str:
    """One line for the ledger."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, WorkerDiedError | FolderAwayError):
            return str(error.cause)
        if isinstance(error.cause, StoreAwayError):
            return error.cause.error.what
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError):
        return "the trial's process died (killed, out of memory, or crashed)"
    return f"{type(error).__name__}: {error}" if error else "unknown"
