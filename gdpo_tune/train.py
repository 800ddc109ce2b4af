"""Train one policy, without a search.

    python -m gdpo_tune.train --from runs/code:knee --steps 500
    python -m gdpo_tune.train --from runs/code --pick "max correctness where length >= 0.9"
    python -m gdpo_tune.train --from runs/code:knee --recipe code_qwen
    python -m gdpo_tune.train search_spaces/code.yaml --set space.group_size=8 ...

The first three train a trial of a sweep again, at any budget: its knee, the best in an
objective (`runs/code:max_correctness`), the best under conditions, a trial by its number, or its
checkpoint (`runs/code:7@40`), which is trained up to that step. With --recipe, or a --set that
changes policy, data or lengths, what does not carry over comes from there. The last one trains a
file that has one value for every parameter. Each ends with held-out metrics and the directory of a
policy that `from_pretrained` loads. After an interruption or a crash, run the same command to
resume.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune import cli

if TYPE_CHECKING:
    from gdpo_tune.core.trial_config import TrialConfig
    from gdpo_tune.core.trials import Measurement
    from gdpo_tune.results.retrain import TrainingRequest

REQUEST, RESULT, LOCK = "request.json", "result.json", "train.lock"
"""Files in the directory of a training: its request, its result, and the lock of its process."""


def build_parser() -> cli.Parser:
    parser = cli.Parser(__name__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("space", metavar="FILE.yaml", nargs="?", help="the file to train")
    source.add_argument(
        "--from",
        metavar="SWEEP[:WHICH]",
        dest="source",
        help="a trial of a sweep, such as runs/code:knee, runs/code:max_<objective> or "
        "runs/code:<trial number>, or the sweep's directory with --pick",
    )
    parser.pick()
    parser.overrides()
    parser.recipe()
    add, seed = parser.add_argument, cli.integer(0, 2**32 - 1)
    add("--steps", type=cli.integer(1), help="training steps, instead of the file's")
    add("--seed", type=seed, help="seed (default: the trial's, or the file's)")
    add("--out", type=Path, help="directory (default: <storage>/<name>-<which>-<steps>)")
    add("--threads", type=cli.integer(1), help="CPU threads (default: resources.cpus)")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Train as `arguments` say and return the exit status."""
    options = build_parser().parse_args(arguments)
    for option in ("pick", "recipe"):
        if getattr(options, option) and options.source is None:
            build_parser().error(f"--{option} requires --from")

    from gdpo_tune.results.retrain import (
        build_request_from_file,
        build_request_from_sweep,
        build_trial_config,
    )

    overrides = list(options.overrides)
    if options.steps is not None:
        overrides.append(f"training.steps={options.steps}")
    if options.source is not None:
        asked = build_request_from_sweep(
            options.source, overrides, options.pick, recipe=options.recipe
        )
    else:
        asked = build_request_from_file(options.space, overrides)
    for line in asked.lines:
        print(line)
    config = build_trial_config(asked, seed=options.seed, out=options.out, threads=options.threads)
    command = shlex.join(["python", "-m", "gdpo_tune.train", *arguments])
    return train_or_show(asked, config, command)


def train_or_show(asked: TrainingRequest, config: TrialConfig, command: str) -> int:
    """Train in `config.directory`, or show its result if it has one; return the exit status.

    Raises:
        UsageError: the directory holds another training, or another process trains there.
    """
    from gdpo_tune.core.errors import UsageError
    from gdpo_tune.ledger.journal import Lease

    try:
        lease = Lease(config.directory / LOCK)
    except OSError as error:
        reason = f"{config.directory} cannot be used: {error}; choose another --out"
        raise UsageError(reason) from error
    try:
        write_request(config)
        if (config.directory / RESULT).exists():
            print("already finished: nothing was started")
        elif not train_to_end(asked, config):
            print(f"Interrupted. Resume with:\n  {command}", file=sys.stderr)
            return cli.INTERRUPTED
    finally:
        lease.release()
    print_training(asked, config)
    return 0


def write_request(config: TrialConfig) -> None:
    """Write the request into the directory, or compare it with the one that the directory has.

    Raises:
        UsageError: the directory holds another training.
    """
    import json

    from gdpo_tune.core.errors import UsageError
    from gdpo_tune.core.files import write_atomically
    from gdpo_tune.results.retrain import list_decisive_settings
    from gdpo_tune.spec.model import list_differences

    file, wanted = config.directory / REQUEST, list_decisive_settings(config)
    if not file.exists():
        write_atomically(file, json.dumps(wanted, indent=1))
        return
    changed = list_differences(json.loads(file.read_text(encoding="utf-8")), wanted)
    if changed:
        raise UsageError(
            f"{config.directory} holds another training: {'; '.join(changed)}\n"
            "    fix: choose another --out, or ask for the same"
        )


def train_to_end(asked: TrainingRequest, config: TrialConfig) -> bool:
    """Train to the end and write the result; return False if a signal stopped it before."""
    import json

    from gdpo_tune.core.files import write_atomically
    from gdpo_tune.core.signals import stop_on_signals
    from gdpo_tune.display.training import TrainingDisplay
    from gdpo_tune.ledger.trial_encoding import encode_outcome
    from gdpo_tune.training.checkpoints import find_checkpoint

    workers = asked.spec.resources.workers
    cli.prepare_machine(asked.spec, workers)
    found = find_checkpoint(config.directory)
    resume = found.newest
    print(f"{asked.note}, seed {config.seed}; {config.directory}", flush=True)
    if found.describe_damage():
        print(found.describe_damage(), flush=True)
    elif resume is not None:
        print(f"resumes from {resume.name}", flush=True)

    from gdpo_tune.core.rendezvous import clear_rendezvous
    from gdpo_tune.training import train
    from gdpo_tune.training.processes import train_in_processes

    clear_rendezvous()  # that of a launcher, which knows nothing of our processes
    with TrainingDisplay(config.training.steps) as display:
        stop = _Stop(display)
        try:
            with stop_on_signals(stop.request):
                if workers == 1:
                    outcome = train(config, resume=resume, report=stop)
                else:
                    outcome = train_in_processes(config, workers, resume=resume, report=stop)
        except SystemExit:
            if not stop.requested:
                raise
            return False
    encoded = encode_outcome(outcome, config.directory)
    write_atomically(config.directory / RESULT, json.dumps(encoded, indent=1))
    return True


def print_training(asked: TrainingRequest, config: TrialConfig) -> None:
    """Print held-out metrics and the path of the policy."""
    import json

    from gdpo_tune.display.training import print_result
    from gdpo_tune.ledger.trial_encoding import decode_estimates

    result = json.loads((config.directory / RESULT).read_text(encoding="utf-8"))
    goals = asked.spec.list_objectives()
    print_result(goals, decode_estimates(result["validation"]), decode_estimates(result["test"]))
    print(f"policy: {config.directory / result['checkpoint']}")
    print(f"steps:  {config.directory / 'steps.jsonl'}")


class _Stop:
    """Report function that ends the training after a signal."""

    def __init__(self, report: Callable[[Measurement, Path | None], None]) -> None:
        self.requested = False
        self._report = report

    def request(self) -> None:
        self.requested = True

    def __call__(self, measurement: Measurement, checkpoint: Path | None) -> None:
        self._report(measurement, checkpoint)
        if self.requested:
            raise SystemExit


if __name__ == "__main__":
    cli.run_command(main)
