"""A task from a user's file in a process of its own, which may hang, exit, print or fork.

The process is a fresh interpreter, which ends with its parent. It calls reward functions in its
main thread, where limits by signals work. A call that does not return in time is killed, and the
process starts again. Requests and answers are pickles over a pair of sockets: a method and its
arguments, then its result or the error that it raised.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gdpo_tune.core import task_files
from gdpo_tune.core.errors import GdpoTuneError, TaskFileError, TrialFailure, UsageError
from gdpo_tune.core.http import build_retry
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.task_info import ToolFormat
from gdpo_tune.tasks import base
from gdpo_tune.tasks.custom import MEAN_LENGTH, CallError, CallResult, RewardBatch, measure_turns

CHECK_LIMIT = 60.0
"""Seconds for one call of a function in `check_rewards`."""
PATIENCE, LONGEST_PAUSE = 30.0, 16.0
"""Seconds for which a function is called again that fails too often; the longest pause between."""
ROW_SHARE = 0.1
"""Share of a function's time limit that it gets for one completion alone."""
MOST_PRINTED = 1 << 16
"""Bytes of output that are passed on for each batch; also what a pipe holds."""
_POLL = 0.2
_logger = logging.getLogger(__name__)
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gdpo_tune.tasks.task_process import serve_task; serve_task(int(sys.argv[2]))"
)
"""Program of the process. It finds the modules that its parent finds, in the same order."""


class ProcessEndedError(CallError):
    """A reward function that ended its process, or did not return in time."""


class TaskProcess(CloseableResource):
    """A task in a file whose functions run in another process. Threads may share it."""

    def __init__(
        self,
        task: str,
        task_class: Any,
        training: TrainingSettings,
        sandbox: SandboxSettings,
        data: DataSettings,
    ) -> None:
        """Start the process and build the task in it; raise TaskFileError if that fails."""
        self.task, self.settings = task, training
        self.directory: Path | None = None
        self.rewards: tuple[str, ...] = tuple(task_class.rewards)
        self.metrics: tuple[str, ...] = tuple(task_class.metrics)
        self.evaluations = task_class.evaluations
        self.ranges, self.directions = task_class.ranges, task_class.directions
        self.places, self.most_failed = task_class.places, task_class.most_failed
        self.tools = [self._build_tool(function) for function in task_class.tools]
        """Functions in this process, with the signatures of the task's, which call those."""
        self._class = task_class
        self._parts = (task, training, sandbox, data)
        self._lock = threading.RLock()
        self._start()
        templates = task_class.chat_template, task_class.response_template
        self.tool_format = (
            ToolFormat(self._ask("describe_tools"), *templates) if self.tools else None
        )
        if hasattr(task_class, "write_reference"):
            self.write_reference = functools.partial(self._ask, "write_reference")

    def problems(self, split: base.Split, count: int, seed: int) -> list[base.Problem]:
        """Return `count` rows of a split; see `Task`."""
        return self._ask("problems", split, count, seed)

    def environment(self) -> dict[str, str]:
        """Return the task's own provenance."""
        return self._ask("environment")

    def __enter__(self) -> TaskProcess:
        self._ask("enter")
        return self

    def score(
        self,
        problems: Sequence[base.Problem],
        completions: Sequence[Any],
        lengths: Sequence[int],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: Mapping[str, Any] | None = None,
        *,
        is_check: bool = False,
    ) -> base.Scores:
        """Score N completions; see `score_by_functions`.

        In a check, a function that ends its process or does not return is not called again.

        Raises:
            TrialFailure: a function returned what is no reward, or in a check did not return.
        """
        self._left = MOST_PRINTED
        distinct = {id(one): one for one in problems}
        pickled = {key: pickle.dumps(one) for key, one in distinct.items()}
        copies = [pickled[id(one)] for one in problems]
        state = trainer_state or {}
        batch = RewardBatch(copies, list(completions), list(lengths), completion_ids, state)
        call = functools.partial(self._call, is_check=is_check)
        patience = 0.0 if is_check else PATIENCE
        scores = score_by_functions(self.rewards, call, batch, self.most_failed, patience)
        if not self.tools:
            return scores
        return replace(scores, metrics={**scores.metrics, **measure_turns(batch)})

    def close(self) -> None:
        """End the process and every process that it started."""
        self._end()

    def _build_tool(self, function: Callable[..., Any]) -> Callable[..., str]:
        """Return a function that calls a tool in the process; it raises what the policy reads."""

        @functools.wraps(function)
        def call_tool(**arguments: Any) -> str:
            limit, self._left = self._class.tool_time_limit, MOST_PRINTED
            return self._request("call_tool", function.__name__, arguments, limit=limit)

        return call_tool

    def _call(self, function: str, row: int | None, batch: RewardBatch, is_check: bool) -> Any:
        limit = self._class.time_limit or (CHECK_LIMIT if is_check else base.TIME_LIMIT)
        try:
            self._request("load_functions", self.directory, limit)  # may download models
            limit *= 1 if row is None else ROW_SHARE
            return self._request("score", function, row, batch, limit=limit)
        except ProcessEndedError as ended:
            if not is_check:
                raise
            name = f"reward {function} ({self.places[function]})"
            fix = "correct it, or give its class a larger time_limit"
            raise TrialFailure(f"{name} {ended}\n    fix: {fix}") from None

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._left = MOST_PRINTED
        try:
            return self._request(method, *arguments)
        except (ProcessEndedError, TaskFileError) as error:
            text = str(error)
            if isinstance(error, ProcessEndedError):
                text = f"{self.task}: {method}() {text}"
            fix = "" if "\n    fix: " in text else "\n    fix: correct the file (docs/own_task.md)"
            raise TaskFileError(text + fix) from None

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        directory = str(Path(task_files.split_task_file(self.task)[0]).parent)
        paths = [directory, *(path or os.getcwd() for path in sys.path)]
        torch = sys.modules.get("torch")
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())} if torch else {}  # the trial's
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", _START, json.dumps(paths), str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # no Ctrl-C of the terminal
            env={"PYTHONHASHSEED": "0", **os.environ, **threads},  # rows from a set, in one order
        )
        theirs.close()
        self._end = weakref.finalize(
            self, _end_process, self._process, self._connection, os.getpid()
        )
        self.instructions: str = self._ask("build", *self._parts)

    def _request(self, method: str, *arguments: Any, limit: float = math.inf) -> Any:
        """Return what a method in the process gives; start the process again if it has ended.

        Raises:
            ProcessEndedError: it ended, or did not answer within `limit` seconds and was killed.
            GdpoTuneError: from the task.
        """
        with self._lock:
            if method != "build" and (not self._end.alive or self._process.poll() is not None):
                self._end()
                self._start()
            try:
                self._connection.send((method, arguments))
                result, error = self._receive(time.monotonic() + limit)
            except TimeoutError:
                name = "tool_time_limit" if method == "call_tool" else "time_limit"
                reason = f"did not return within {limit:g} s ({name} of its class)"
            except (EOFError, OSError):
                reason = _describe_exit(self._process)
            except BaseException:  # its answer would be taken for that to the next request
                self._end()
                raise
            else:
                if error is not None:
                    raise error
                return result
            self._end()
            raise ProcessEndedError(reason)

    def _receive(self, deadline: float) -> Any:
        """Return the answer; raise TimeoutError at the deadline, EOFError or OSError at an end."""
        output: Any = self._process.stdout
        waiting: list[Any] = [self._connection, output]
        while True:
            ready: list[Any] = wait(waiting, max(0.0, min(_POLL, deadline - time.monotonic())))
            if output in ready:
                printed = os.read(output.fileno(), MOST_PRINTED)
                left, self._left = self._left, self._left - len(printed)
                if left > 0:
                    sys.stderr.write(printed[:left].decode(errors="replace"))
                    if self._left <= 0:
                        print(f"\n(more than {MOST_PRINTED} bytes are not shown)", file=sys.stderr)
                if not printed:
                    waiting.remove(output)
            if self._connection in ready:
                return self._connection.recv()
            if not ready and self._process.poll() is not None:
                raise EOFError
            if time.monotonic() >= deadline:
                raise TimeoutError


CallReward = Callable[[str, int | None, RewardBatch], CallResult]
"""Gets the name of a function, a row if that is called alone, and the completions."""


def score_by_functions(
    names: Sequence[str],
    call: CallReward,
    batch: RewardBatch,
    most_failed: float = 0.0,
    patience: float = 0.0,
) -> base.Scores:
    """Return the scores by functions of N completions.

    A function that raises, or ends its process, is called for each completion alone. While it fails
    on more than `most_failed` of them, which may be the outage of a service, these are tried again
    for `patience` seconds. A completion on which it still raises gets no score. With
    `most_failed` 0 it may compare completions, so it is called for all of them again.
    """
    results: dict[str, CallResult] = {}
    failures: dict[str, dict[int, str]] = {}
    seconds: dict[str, float] = {}
    for name in names:
        started = time.perf_counter()
        results[name], failures[name] = _call_patiently(name, call, batch, most_failed, patience)
        seconds[name] = time.perf_counter() - started
    rewards = {name: result.values for name, result in results.items()}
    return base.Scores(
        rewards,
        {**rewards, MEAN_LENGTH: [float(length) for length in batch.lengths]},
        failures,
        logged=[entry for result in results.values() for entry in result.logged],
        columns={k: v for result in results.values() for k, v in result.columns.items()},
        seconds=seconds,
    )


def _call_patiently(
    name: str, call: CallReward, batch: RewardBatch, most_failed: float, patience: float
) -> tuple[CallResult, dict[int, str]]:
    count = len(batch.completions)
    result, failed = CallResult([None] * count, [], {}, {}), dict[int, str]()

    def call_for_all() -> bool:
        nonlocal result, failed
        try:
            result, failed = call(name, None, batch), {}
        except CallError as error:
            failed = dict.fromkeys(range(count), str(error))
        return bool(failed)

    def call_for_each() -> bool:
        ended = 0
        for row in tuple(failed):
            if ended > max(2, most_failed * count):  # each costs a start of the process
                break
            try:
                alone = call(name, row, batch.take(row))
            except CallError as error:
                has_ended = isinstance(error, ProcessEndedError)
                failed[row] = failed[row] if has_ended else str(error)
                ended += has_ended
            else:
                del failed[row]
                result.values[row] = alone.values[0]
                result.logged.extend(alone.logged)
                result.failures.update((row, text) for text in alone.failures.values())
        return len(failed) > most_failed * count and not ended

    if call_for_all():
        from tenacity import RetryError, retry_if_result  # late: 30 ms, for asyncio

        first = failed[0]
        again = build_retry(patience, longest=LONGEST_PAUSE, retry=retry_if_result(bool))
        with contextlib.suppress(RetryError):
            again(call_for_each if most_failed else call_for_all)
        _logger.warning(
            "reward %s raised: %s; of %d completions %d have no score",
            name,
            first,
            count,
            len(failed),
        )
    return result, {**failed, **result.failures}


def check_rewards(task: TaskProcess) -> tuple[str, list[str]]:
    """Call every reward on a few texts; return the time of each function, and warnings.

    Two prompts have four completions each: an empty one, a text of the row, one with the tags of
    the instructions, and one of maximal length.

    Raises:
        UsageError: values of a wrong number, type or range; a function that raises for every text,
            ends its process or does not return.
    """
    settings = task.settings
    problems = task.problems("train", min(2, settings.train_prompts), 0)
    tags = re.findall(r"</?\w[\w-]*>", task.instructions) or ["<think>", "</think>"]
    longest = 4 * settings.max_completion_length
    texts: list[str] = []
    for problem in problems:
        own = next((v for v in problem.data.values() if isinstance(v, str) and v), problem.prompt)
        repeated = f"{own} " * (longest // (len(own) + 1) + 1)
        texts += ["", own, own.join(["", *tags, ""]), repeated[:longest]]
    lengths = [min(settings.max_completion_length, len(text) // 4 + 1) for text in texts]
    state = {"global_step": 0, "max_steps": settings.steps}
    ids = [list(range(length)) for length in lengths]
    all_problems = [one for one in problems for _ in range(4)]
    warnings: list[str] = []
    try:
        scores = task.score(all_problems, texts, lengths, ids, state, is_check=True)
        base.check_ranges(scores, task)
        warnings += _check_values(scores, len(texts), task)
        for name, failed in scores.failures.items():
            first = next(iter(failed.values()), "")
            if len(failed) == len(texts):
                raise TrialFailure(
                    f"reward {name} ({task.places[name]}) raised for each of {len(texts)} texts, "
                    f"and has to return a number or None: {first}\n"
                    "    fix: correct the function, or start what it needs"
                )
            if failed:
                share = f"{len(failed)} of {len(texts)} texts"
                warnings.append(f"reward {name} raised for {share}: {first}")
    except TrialFailure as failure:
        raise UsageError(f"{task.task}: {failure}") from None
    times = [f"{name} {1000 * seconds:.0f} ms" for name, seconds in scores.seconds.items()]
    return f"{', '.join(times) or 'all'} for {len(texts)} texts", warnings


def _check_values(scores: base.Scores, count: int, task: TaskProcess) -> list[str]:
    """Refuse NaN and infinities, and return warnings of what would be ignored."""
    warnings: list[str] = []
    for attribute, named in (("ranges", task.ranges), ("directions", task.directions)):
        if idle := {*named} - {*task.rewards, *task.metrics}:
            warnings.append(f"{attribute} names {min(idle)!r}, which is no reward or metric")
    for name, values in {**scores.metrics, **scores.rewards}.items():
        numbers = [value for value in values if value is not None]
        for number in numbers:
            if not math.isfinite(number):
                raise TrialFailure(
                    f"{name} ({task.places.get(name, '')}) is {number}, which ends a trial\n"
                    "    fix: return a number, or None for a completion that it does not score"
                )
        if not numbers and not scores.failures.get(name):
            warnings.append(f"{name} is None for each of {count} texts")
    return warnings


def _end_process(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
    process.wait()
    for stream in (process.stdin, process.stdout, connection):
        if stream is not None:
            stream.close()


def _describe_exit(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "closed the connections of its process"
    if status >= 0:
        return f"ended its process (exit status {status})"
    names = {one.value: one.name for one in signal.Signals}  # not all of those of real time
    return f"ended its process (signal {names.get(-status, -status)})"


def serve_task(descriptor: int) -> None:
    """Answer the requests of the parent, in the main thread, until it closes the connection."""
    connection, parent, process = Connection(descriptor), os.dup(0), os.getpid()
    os.set_inheritable(descriptor, False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # for functions that read their input
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    name = ""
    task: Any = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        result, error = None, None
        try:
            if method != "score":
                _seed_draws(0)
            if method == "build":
                name = arguments[0]
                task = task_files.load_class(name)(*arguments[1:])
                result = getattr(task, "instructions", None)
                if not isinstance(result, str):
                    task = None
                    reason = "instructions has to be a text, which may be empty"
                    raise TaskFileError(f"{name}: {reason}")
            elif method == "enter":
                task.__enter__()
            elif method == "score":
                result = _score(task, *arguments)
            else:
                result = getattr(task, method)(*arguments)
        except GdpoTuneError as raised:
            error = UsageError(f"{name}: {raised}") if type(raised) is UsageError else raised
        except BaseException as raised:  # a user's class may raise anything
            _logger.debug("a task raised", exc_info=True)
            reason = f"{method}() raised {task_files.describe_task_error(raised)}"
            error = TaskFileError(f"{name}: {reason}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind would hit the next call
        if os.getpid() != process:  # a fork that a reward function made and forgot
            os._exit(0)
        try:
            connection.send((result, error))
        except (pickle.PicklingError, TypeError, AttributeError) as unsent:
            reason = (
                f"{name}: {method}() gives what cannot be sent to another process ({unsent})"
                "\n    fix: give columns texts, numbers, lists and mappings"
            )
            connection.send((None, TaskFileError(reason)))
        if task is None:
            return


def _end_with_parent(parent: int) -> None:
    while os.read(parent, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _seed_draws(number: int) -> None:
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def _score(task: Any, function: str, row: int | None, batch: RewardBatch) -> CallResult:
    """Call a reward function, which gets its own copy of everything."""
    # Random draws depend on the batch alone, so that a trial that resumes repeats them.
    seed = hashlib.sha256(repr(batch.completions).encode(errors="replace")).digest()
    seed = hashlib.sha256(seed + f"/{function}/{row}".encode()).digest()[:4]
    _seed_draws(int.from_bytes(seed, "big"))
    batch = batch._replace(problems=list(map(pickle.loads, batch.problems)))
    return task.call_function(function, batch)
