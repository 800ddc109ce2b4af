"""Train one policy, without a search.

    python -m gdpo_tune.train --from runs/code:knee --steps 500
    python -m gdpo_tune.train --from runs/code --pick "max correctness where length >= 0.9"
    python -m gdpo_tune.train --from runs/code:knee --recipe code_qwen
    python -m gdpo_tune.train search_spaces/code.yaml --set space.group_size=8 ...

The first three train a trial of a sweep again, at any budget: its knee, the best in an
objective (`runs/code:max_correctness`), the best under conditions, a trial by its number, or its
checkpoint (`runs/code:7@40`), which is trained up to that step. Of a merge, the training begins at
its weights, with the parameters of its largest part. With --recipe, or a --set that
changes policy, data or lengths, what does not carry over comes from there. The last one trains a
file that has one value for every parameter. Each ends with held-out metrics and the directory of a
policy that `from_pretrained` loads. After an interruption or a crash, run the same command to
resume.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.core.errors import NoSignalError, UsageError
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.system import clear_rendezvous, stop_on_signals

if TYPE_CHECKING:
    from gdpo_tune.core.trial_config import TrialConfig
    from gdpo_tune.core.trials import Measurement
    from gdpo_tune.results.retrain import TrainingRequest
    from gdpo_tune.spec import SweepSpec

REQUEST, RESULT, LOCK = "request.json", "result.json", "train.lock"
"""Files in the directory of a training: its request, its result, and the lock of its process."""
CONTENT = "content.json"
"""File in that directory with what decides the result, as it was at each start that changed it."""


def build_parser() -> cli.Parser:
    """Build the command line."""
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
    text = "resume although the task's file, data, policy or versions have changed"
    parser.flag("--accept-changes", text)
    add("--threads", type=cli.integer(1), help="CPU threads (default: resources.cpus)")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Train as `arguments` say, or show the result, and return the exit status.

    Raises:
        UsageError: the directory holds another training, what decides its result has changed, or
            another process trains there.
    """
    options = build_parser().parse_args(arguments)
    for option in ("pick", "recipe"):
        if getattr(options, option) and options.source is None:
            build_parser().error(f"--{option} requires --from")

    from gdpo_tune.display.training import print_result
    from gdpo_tune.ledger.trial_encoding import decode_estimates
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
    cli.outlive_readers()
    for line in asked.lines:
        print(line)
    config = build_trial_config(asked, seed=options.seed, out=options.out, threads=options.threads)
    words = [word for word in arguments if word != "--accept-changes"]
    command = shlex.join(["python", "-m", "gdpo_tune.train", *words])
    with cli.hold_directory(config.directory, LOCK):
        config = record_request(asked.spec, config)
        status, config = _prepare_start(asked, config, accept=options.accept_changes)
        if not status:
            _compare_content(config, accept=options.accept_changes)
            if (config.directory / RESULT).exists():
                print("already finished: nothing was started")
            else:
                status = _train_to_end(asked, config)
    if status:
        print(f"Interrupted. Resume with:\n  {command}", file=sys.stderr)
        return status
    encoded = json.loads((config.directory / RESULT).read_text(encoding="utf-8"))
    columns = {name: decode_estimates(encoded[name]) for name in ("validation", "test")}
    print_result(asked.spec.list_objectives(), columns)
    print(f"policy: {config.directory / encoded['checkpoint']}")
    print(f"steps:  {config.directory / 'steps.jsonl'}")
    return 0


def _prepare_start(
    asked: TrainingRequest, config: TrialConfig, *, accept: bool
) -> tuple[int, TrialConfig]:
    """Train the supervised start that a file asks for, unless a sweep has made it.

    Return the exit status, and the configuration of a training that begins there.
    """
    if asked.spec.start is None or config.start is not None:
        return 0, config
    own = asked.spec.build_start_config(asked.params, config.seed, config.directory / "start")
    own.directory.mkdir(exist_ok=True)
    own = record_request(asked.spec, replace(own, threads=config.threads, model=config.model))
    _compare_content(own, accept=accept)
    if not (own.directory / RESULT).exists() and (status := _train_to_end(asked, own)):
        return status, config
    result = json.loads((own.directory / RESULT).read_text(encoding="utf-8"))
    return 0, replace(config, start=own.directory / result["checkpoint"])


def record_request(spec: SweepSpec, config: TrialConfig) -> TrialConfig:
    """Write the request into the directory, or compare it with the one that the directory has.

    Return the config with the date for chat templates that the request records.

    Raises:
        UsageError: the directory holds another training.
    """
    from gdpo_tune.spec.model import list_decisive_values, list_differences

    file, key = config.directory / REQUEST, "model.template_date"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    day = config.model.template_date or earlier.get(key) or date.today().isoformat()
    config = replace(config, model=config.model.replace(template_date=day))
    values = list_decisive_values(spec)
    free = ("objectives.", "space.", "sandbox.")  # they may change while it is interrupted
    wanted = {name: value for name, value in values.items() if not name.startswith(free)}
    wanted |= {f"params.{name}": value for name, value in config.params.items()}
    wanted |= {"seed": config.seed, "sharded": config.sharded, key: day}
    wanted = json.loads(json.dumps(wanted))
    if not earlier:
        write_atomically(file, json.dumps(wanted, indent=1))
    changed = list_differences({key: day, **(earlier or wanted)}, wanted)
    if changed:
        raise UsageError(
            f"{config.directory} holds another training: {'; '.join(changed)}\n"
            "    fix: choose another --out, or ask for the same"
        )
    return config


def _compare_content(config: TrialConfig, *, accept: bool) -> None:
    """Refuse to resume with other content than before, or write it into the directory's record.

    Raises:
        IdentityError: as `compare_starts`.
    """
    from gdpo_tune.core import content

    file = config.directory / CONTENT
    starts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    start = config.supervised.file if config.supervised else str(config.start or "")
    facts = content.measure_content(config, start)
    ways = "choose another --out to begin anew, or --accept-changes to resume"
    starts = content.compare_starts(starts, facts, config.directory, ways, accept=accept)
    write_atomically(file, json.dumps(starts, indent=1))


def _train_to_end(asked: TrainingRequest, config: TrialConfig) -> int:
    from gdpo_tune.display.training import TrainingDisplay
    from gdpo_tune.ledger.trial_encoding import encode_outcome
    from gdpo_tune.results.wording import explain_dead_start
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

    from gdpo_tune.training import train
    from gdpo_tune.training.processes import train_in_processes

    clear_rendezvous()  # that of a launcher, which knows nothing of our processes
    requested: list[int] = []  # exit status of the signal that asked to stop
    with TrainingDisplay(config.training.steps) as display:

        def report(measurement: Measurement, checkpoint: Path | None) -> None:
            display(measurement, checkpoint)
            if requested:
                raise SystemExit

        try:
            with stop_on_signals(requested.append):
                if workers == 1:
                    outcome = train(config, resume=resume, report=report)
                else:
                    outcome = train_in_processes(config, workers, resume=resume, report=report)
        except SystemExit:
            if not requested:
                raise
            return requested[0]
        except NoSignalError as error:
            raise NoSignalError(explain_dead_start(str(error), config.directory)) from error
    encoded = encode_outcome(outcome, config.directory)
    write_atomically(config.directory / RESULT, json.dumps(encoded, indent=1))
    return 0


if __name__ == "__main__":
    cli.run_command(main)
