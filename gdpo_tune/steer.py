"""Steer a running sweep.

    python -m gdpo_tune.steer runs/code stop 7
    python -m gdpo_tune.steer runs/code clone 7 learning_rate=2e-4
    python -m gdpo_tune.steer runs/code add normalization=gdpo reward_weights.format=0.5
    python -m gdpo_tune.steer runs/code trials 24
    python -m gdpo_tune.steer runs/code budget completions=100000 hours=8
    python -m gdpo_tune.steer runs/code pause
    python -m gdpo_tune.steer runs/code resume
    python -m gdpo_tune.steer runs/code list

The process that runs the sweep applies a request within a few seconds and records who asked for
it. A request is never lost and never applied twice, even if that process is killed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gdpo_tune import cli
from gdpo_tune.core.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from gdpo_tune.core.events import Request
    from gdpo_tune.results.steering import Steering

WAIT_SECONDS = 10.0
"""Seconds to wait for the driver's answer."""
MOST_DIGITS = 18
"""Most digits of a whole number."""
TRIAL, TRIALS = "the number of a trial", "a number of trials"


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__)
    parser.file("sweep", cli.SWEEP, metavar="SWEEP")
    actions = [*READERS, "list"]
    parser.add_argument("action", metavar="ACTION", choices=actions, help=", ".join(actions))
    text = "number of a trial, number of trials, or NAME=VALUE"
    parser.add_argument("words", metavar="ARGUMENT", nargs="*", help=text)
    parser.add_argument("--author", metavar="NAME", help="who asks (default: your user name)")
    parser.flag("--force", "with add and clone: allow values outside of the sweep's space")
    parser.flag("--no-wait", "return once the request is stored")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Send the request that `arguments` state and return the exit status."""
    options = build_parser().parse_intermixed_args(arguments)

    from gdpo_tune.results.steering import Steering

    steering = Steering(options.sweep)
    if options.action == "list":
        flags = {"--author": options.author, "--force": options.force, "--no-wait": options.no_wait}
        given = [*options.words, *(flag for flag, value in flags.items() if value)]
        if given:
            raise UsageError(f"list takes no argument: leave out {' '.join(given)}")
        _print_requests(steering)
        return 0
    content = READERS[options.action](options.words)
    if options.force:
        if options.action not in ("add", "clone"):
            raise UsageError(f"--force has no effect on {options.action}: leave it out")
        content["force"] = True
    request = steering.request(options.action, content, options.author)
    if options.no_wait:
        print(f"{request.text}: stored as request {request.id}")
        return 0
    return print_answer(steering, request)


def print_answer(steering: Steering, request: Request) -> int:
    """Print what became of a request that was stored, and return the exit status."""
    recorded = steering.wait(request.id, WAIT_SECONDS if steering.is_running else 0.0)
    if recorded is not None:
        print(f"{recorded.text}: {recorded.outcome}: {recorded.reason}")
        return ExitCode.DONE if recorded.outcome == "applied" else ExitCode.FAILED
    if steering.is_running:
        why = "the sweep has not answered yet, and applies it as soon as it can (see: list)"
    else:
        why = "no process works on the sweep, so it is applied when the sweep is run again"
    print(f"{request.text}: stored; {why}")
    return ExitCode.DONE


def _print_requests(steering: Steering) -> None:
    rows = [(request.asked, str(request)) for request in steering.list_requests()]
    rows += [
        (request.asked, f"{request.text}, asked by {request.author}: not applied yet")
        for request in steering.list_pending()
    ]
    for asked, text in rows:
        print(f"{datetime.fromtimestamp(asked).astimezone():%Y-%m-%d %H:%M:%S} {text}")
    if not rows:
        print("no requests")


def _refuse_rest(words: Sequence[str]) -> dict[str, Any]:
    if words:
        raise UsageError(f"{' '.join(words)}: nothing takes this; leave it out")
    return {}


def _read_number(words: Sequence[str], what: str) -> int:
    if not words or not words[0].isdecimal() or len(words[0]) > MOST_DIGITS:
        raise UsageError(f"write {what}{f', not {words[0][:MOST_DIGITS]}' if words else ''}")
    return int(words[0])


def _read_values(words: Sequence[str]) -> dict[str, Any]:
    from gdpo_tune.spec.document import read_scalar

    values: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not (name and sign and text):
            raise UsageError(f"{word}: write NAME=VALUE, such as learning_rate=2e-4")
        if name in values:
            raise UsageError(f"{name} is given twice")
        values[name] = read_scalar(text)
    return values


READERS: dict[str, Callable[[Sequence[str]], dict[str, Any]]] = {
    "stop": lambda words: {"trial": _read_number(words, TRIAL), **_refuse_rest(words[1:])},
    "add": lambda words: {"params": _read_values(words)},
    "clone": lambda words: {
        "trial": _read_number(words, TRIAL),
        "changes": _read_values(words[1:]),
    },
    "trials": lambda words: {"number": _read_number(words, TRIALS), **_refuse_rest(words[1:])},
    "budget": _read_values,
    "pause": _refuse_rest,
    "resume": _refuse_rest,
}
"""Action -> function that reads its arguments from the command line."""


if __name__ == "__main__":
    cli.run_command(main)
