"""A task from a user's file in a process of its own, which may hang, exit, print or fork.

The process is a fresh interpreter. It calls reward functions in its main thread, where limits by
signals work, in a sweep as in a training alone. A call that does not return in time is killed, and
the process starts again. It ends with its parent.

Requests and answers are pickles over a pair of sockets. A request is the name of a method of
`_Server` and its arguments. Answers are `("done", result)`, `("raised", error)`, and before them
`("begin", function, row)` and `("end", function, result)` for each call of a function.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
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
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from gdpo_tune.core import task_files
from gdpo_tune.core.errors import GdpoTuneError, TaskFileError, TrialFailure, UsageError
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.tasks.base import CallContext, Problem, Scores, Split, check_scores, takes_context
from gdpo_tune.tasks.custom import TIME_LIMIT, CallRecord, CallResult, RewardFunctionTask

CHECK_LIMIT = 60.0
"""Seconds for one call of a function in `check_rewards`, if its class does not say otherwise."""
ROW_SHARE = 0.1
"""Share of a function's time limit that it gets for one completion alone."""
MOST_PRINTED = 1 << 16
"""Bytes of output that are passed on for each request."""
_POLL = 0.2
_logger = logging.getLogger(__name__)
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gdpo_tune.tasks.task_process import serve; serve(int(sys.argv[2]))"
)
"""Program of the process. It finds the modules that its parent finds, in the same order."""


class TaskProcess(CloseableResource):
    """A task in a file, as `Task`; its functions run in another process. Threads may share it."""

    def __init__(
        self,
        task: str,
        training: TrainingSettings,
        sandbox: SandboxSettings,
        data: DataSettings,
        **others: Any,
    ) -> None:
        """Start the process and build the task in it.

        Raises:
            TaskFileError: the task cannot be built.
        """
        self.task, self.settings = task, training
        self._parts = (task, (training, sandbox, data), others)
        self._lock = threading.Lock()
        self._output = _Output()
        self._pickled: dict[int, tuple[Problem, bytes]] = {}
        with self._lock:
            self._start()

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
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
        problems: Sequence[Problem],
        completions: Sequence[str],
        lengths: Sequence[int],
        *,
        context: CallContext | None = None,
        by_row: bool = True,
    ) -> Scores:
        """Judge N completions; see `RewardFunctionTask.score`.

        A function that hangs or ends its process is called for each completion alone, and those in
        which it does that again are not scored.

        Args:
            problems: one for each completion.
            completions: N texts.
            lengths: their tokens.
            context: what is known besides.
            by_row: whether such a function is called again; otherwise this raises.

        Raises:
            TrialFailure: a function returned what is no reward, or `score` itself, which is the
                task's own, did not return.
        """
        batch = ([self._pickle(one) for one in problems], list(completions), list(lengths), context)
        finished: dict[str, CallResult] = {}
        lost: dict[str, dict[int | None, str]] = {}
        with self._lock:
            while True:
                try:
                    return self._exchange("score", (*batch, finished, lost), finished)
                except _ProcessEndedError as ended:
                    rows = lost.setdefault(ended.function, {})
                    if not ended.function or ended.row in rows or not by_row:
                        raise TrialFailure(self._describe(ended)) from None
                    rows[ended.row] = ended.reason

    def close(self) -> None:
        """End the process and every process that it started."""
        self._end()

    def _ask(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            try:
                return self._exchange(method, arguments, {})
            except _ProcessEndedError as ended:
                raise TaskFileError(f"{self.task}: {method}() {ended.reason}") from None

    def _start(self) -> None:
        ours, theirs = Pipe()
        paths = [path or os.getcwd() for path in sys.path]
        threads = {}
        if "torch" in sys.modules:  # the trial's threads
            threads["OMP_NUM_THREADS"] = str(sys.modules["torch"].get_num_threads())
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(paths), str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # no Ctrl-C of the terminal
            env={**os.environ, **threads},
        )
        theirs.close()
        self._connection = ours
        forward = (self._process.stdout, self._output)
        threading.Thread(target=_forward_output, args=forward, daemon=True).start()
        self._end = weakref.finalize(self, _end_process, self._process, ours, os.getpid())
        try:
            told = self._exchange("build", self._parts, {})
        except _ProcessEndedError as ended:
            raise TaskFileError(f"{self.task}: its process {ended.reason}") from None
        except GdpoTuneError:
            self._end()
            raise
        self.rewards: tuple[str, ...] = told["rewards"]
        self.metrics: tuple[str, ...] = told["metrics"]
        self.instructions: str = told["instructions"]
        self.ranges: Mapping[str, tuple[float, float]] = told["ranges"]
        self.places: Mapping[str, str] = told["places"]
        self.time_limit: float = told["time_limit"]

    def _exchange(self, method: str, arguments: Any, finished: dict[str, CallResult]) -> Any:
        """Send a request and return its result; `finished` gets those of single functions.

        Raises:
            _ProcessEndedError: there is none, and the process has ended or was killed.
            GdpoTuneError: from the task.
        """
        if method != "build" and (not self._end.alive or self._process.poll() is not None):
            self._end()
            self._start()
        self._output.left = MOST_PRINTED
        function, row, limit, deadline = "", None, 0.0, float("inf")
        reason = ""
        try:
            self._connection.send((method, arguments))
            while not reason:
                if self._connection.poll(min(_POLL, max(0.0, deadline - time.monotonic()))):
                    answer: tuple[Any, ...] = self._connection.recv()
                    if answer[0] == "done":
                        return answer[1]
                    if answer[0] == "raised":
                        raise answer[1]
                    if answer[0] == "end":
                        finished[answer[1]] = answer[2]
                        function, row, deadline = "", None, float("inf")
                        continue
                    _, function, row = answer
                    limit = self.time_limit * (1 if row is None else ROW_SHARE)
                    deadline = time.monotonic() + limit
                elif self._process.poll() is not None:
                    reason = _describe_exit(self._process)
                elif time.monotonic() >= deadline:
                    reason = f"did not return within {limit:g} s (time_limit of its class)"
        except GdpoTuneError:
            raise
        except (EOFError, OSError):
            reason = _describe_exit(self._process)
        except BaseException:  # its answer would be taken for that to the next request
            self._end()
            raise
        self._end()
        raise _ProcessEndedError(function, row, reason)

    def _describe(self, ended: _ProcessEndedError) -> str:
        place = self.places.get(ended.function, "")
        who = f"reward {ended.function} ({place})" if place else f"{self.task}: score()"
        fix = "correct it, or give its class a larger time_limit"
        return f"{who} {ended.reason}\n    fix: {fix}"

    def _pickle(self, problem: Problem) -> bytes:
        known = self._pickled.get(id(problem))
        if known is None or known[0] is not problem:
            known = self._pickled[id(problem)] = (problem, pickle.dumps(problem))
        return known[1]


def check_rewards(task: TaskProcess) -> tuple[str, list[str]]:
    """Call every reward on a few texts of the data: two prompts with four completions each.

    Those are an empty one, a text of the row, one with the tags of the instructions, and one of
    maximal length. Their token ids are made up.

    Returns:
        The time of each function, and warnings.

    Raises:
        UsageError: values of a wrong number, type or range; a function that raises for every text,
            ends its process or does not return.
    """
    settings, limit = task.settings, task.time_limit
    problems = task.problems("train", min(2, settings.train_prompts), 0)
    tags = re.findall(r"</?\w[\w-]*>", task.instructions) or ["<think>", "</think>"]
    texts: list[str] = []
    for problem in problems:
        own = next((v for v in problem.data.values() if isinstance(v, str) and v), problem.prompt)
        longest = f"{own} " * (4 * settings.max_completion_length // (len(own) + 1) + 1)
        texts += ["", own, own.join(["", *tags, ""]), longest[: 4 * settings.max_completion_length]]
    lengths = [min(settings.max_completion_length, len(text) // 4 + 1) for text in texts]
    state = {"global_step": 0, "max_steps": settings.steps}
    context = CallContext([list(range(length)) for length in lengths], state)
    if limit == TIME_LIMIT:
        task.time_limit = CHECK_LIMIT
    try:
        all_problems = [one for one in problems for _ in range(4)]
        scores = task.score(all_problems, texts, lengths, context=context, by_row=False)
        missing = {*task.rewards} - {*scores.rewards} or {*task.metrics} - {*scores.metrics}
        if missing:
            raise TrialFailure(f"score() gives no values of {', '.join(sorted(missing))}")
        check_scores(scores, len(texts), task.ranges, task.places)
    except TrialFailure as failure:
        raise UsageError(f"{task.task}: {failure}") from None
    finally:
        task.time_limit = limit
    warnings: list[str] = []
    for name, failed in scores.failures.items():
        if failed.count == len(texts):
            raise UsageError(
                f"{task.task}: reward {name} ({task.places.get(name, '')}) raised for each of "
                f"{len(texts)} texts, and has to return a number or None: {failed.first}\n"
                "    fix: correct the function, or start what it needs"
            )
        if failed.count:
            warnings.append(
                f"reward {name} raised for {failed.count} of {len(texts)} texts: {failed.first}"
            )
    times = [f"{name} {1000 * seconds:.0f} ms" for name, seconds in scores.seconds.items()]
    return f"{', '.join(times) or 'all'} for {len(texts)} texts", warnings


class _ProcessEndedError(Exception):
    """End of the process during a request."""

    def __init__(self, function: str, row: int | None, reason: str) -> None:
        super().__init__(reason)
        self.function, self.row, self.reason = function, row, reason


class _Output:
    """Bytes of output that may still be passed on."""

    left = MOST_PRINTED


def _forward_output(stream: IO[bytes], output: _Output) -> None:
    with stream:
        while printed := os.read(stream.fileno(), MOST_PRINTED):
            left, output.left = output.left, output.left - len(printed)
            if left > 0:
                sys.stderr.write(printed[:left].decode(errors="replace"))
                if output.left <= 0:
                    print(f"\n(more than {MOST_PRINTED} bytes are not shown)", file=sys.stderr)


def _end_process(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    connection.close()


def _describe_exit(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "closed the connections of its process"
    if status >= 0:
        return f"ended its process (exit status {status})"
    return f"ended its process (signal {signal.Signals(-status).name})"


def serve(descriptor: int) -> None:
    """Answer the requests of the parent, in the main thread, until it closes the connection."""
    connection, parent = Connection(descriptor), os.dup(0)
    os.set_inheritable(descriptor, False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # for functions that read their input
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    server = _Server(connection)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = ("done", getattr(server, method)(*arguments))
        except GdpoTuneError as error:
            answer = ("raised", error)
        except (Exception, SystemExit) as error:  # a user's class may raise anything
            _logger.debug("a task raised", exc_info=True)
            kind = TrialFailure if method == "score" else TaskFileError
            reason = task_files.describe_error(error)
            answer = ("raised", kind(f"{server.task}: {method}() raised {reason}"))
        try:
            server.send(*answer)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            reason = (
                f"{server.task}: {method}() gives what cannot be sent to another process ({error})"
                "\n    fix: give columns texts, numbers, lists and mappings"
            )
            server.send("raised", TaskFileError(reason))


def _end_with_parent(parent: int) -> None:
    """Wait until the parent has gone, however it ended."""
    while os.read(parent, 1):
        pass
    os.killpg(0, signal.SIGKILL)


class _Server:
    """What the process does for its parent."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._process = connection, os.getpid()
        self.task = ""
        self._seed = b""
        self._built: Any = None

    def send(self, *message: Any) -> None:
        """Send to the parent, but not from a fork that a reward function made and forgot."""
        if os.getpid() != self._process:
            os._exit(0)
        self._connection.send(message)

    def build(self, task: str, settings: Sequence[Any], others: Mapping[str, Any]) -> Any:
        """Build the task and return what is asked of it most."""
        self.task = task
        sys.path.insert(0, str(Path(task_files.split_task_file(task)[0]).parent))
        built = self._built = task_files.build_in_this_process(task, *settings, **others)
        return {
            "rewards": tuple(built.rewards),
            "metrics": tuple(built.metrics),
            "instructions": built.instructions,
            "ranges": {**getattr(built, "ranges", {})},
            "places": {**getattr(built, "places", {})},
            "time_limit": float(getattr(built, "time_limit", TIME_LIMIT)),
        }

    def problems(self, *arguments: Any) -> Any:
        """Return problems of the task."""
        return self._built.problems(*arguments)

    def environment(self) -> Any:
        """Return provenance of the task."""
        return self._built.environment()

    def enter(self) -> None:
        """Enter the task, which may refuse its settings."""
        self._built.__enter__()

    def score(
        self,
        problems: Sequence[bytes],
        completions: list[str],
        lengths: list[int],
        context: CallContext | None,
        finished: Mapping[str, CallResult],
        lost: Mapping[str, Mapping[int | None, str]],
    ) -> Scores:
        """Judge N completions; each has its own copy of its problem."""
        task = self._built
        # Random draws depend on the batch alone, so that a trial that resumes repeats them.
        self._seed = hashlib.sha256(repr(completions).encode(errors="replace")).digest()
        if isinstance(task, RewardFunctionTask):
            task.load_functions()  # without a limit: reward models may have to be downloaded
            task.calls = CallRecord(finished, lost, self._begin, self._end)
        else:
            self._begin("", None)
        known = {} if context is None or not takes_context(task) else {"context": context}
        return task.score(list(map(pickle.loads, problems)), completions, lengths, **known)

    def _begin(self, function: str, row: int | None) -> None:
        place = self._seed + f"/{function}/{row}".encode()
        seed = int.from_bytes(hashlib.sha256(place).digest()[:4], "big")
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(seed)
        self.send("begin", function, row)

    def _end(self, function: str, result: CallResult) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind would hit the next function
        self.send("end", function, result)
