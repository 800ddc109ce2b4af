"""Merge policies of a sweep toward a target.

    python -m gdpo_tune.merge runs/code --toward "length >= 0.6"
    python -m gdpo_tune.merge runs/code --toward "format >= 0.8" --prefer correctness=2,length=1
    python -m gdpo_tune.merge runs/code --weights 7=0.3,12@40=0.7

A merge is a weighted mean of the weights of trained policies: it costs an evaluation and no
training. The command chooses the one that is expected to meet the target best, and asks the sweep
for it, as `steer` does. A running sweep evaluates it once a slot is free, an interrupted one when
it is run again; of a finished one the command runs it. The merge is a trial of the sweep from then
on. After an interruption, run the same command to resume. Each further call evaluates another
merge, whose choice has learnt from those before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.core.errors import ExitCode

if TYPE_CHECKING:
    from gdpo_tune.core.trials import Estimate, TrialRecord
    from gdpo_tune.results.merge_request import RequestedMerge
    from gdpo_tune.results.open_sweep import Sweep


MAX_NAMED = 8
"""Other policies that are named, because they meet the target too."""


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__)
    add = parser.add_argument
    parser.file("sweep", cli.SWEEP, metavar="SWEEP")
    text = "what the merge has to meet, such as 'length >= 0.6, format >= 0.8'"
    add("--toward", metavar="CONDITIONS", default="", help=text)
    add(
        "--prefer",
        metavar="OBJECTIVE=WEIGHT,...",
        default="",
        help="objectives that it maximises beyond that, each divided by its span over the policies "
        "(default: those that --toward does not name, equally)",
    )
    text = "the merge itself: ends of trials (7) or checkpoints (12@40); the weights sum to 1"
    add("--weights", metavar="TRIAL=WEIGHT,...", default="", help=text)
    parser.flag("--dry-run", "print the merge, its prediction and its parents alone")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Ask for the merge that `arguments` describe, and return the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if bool(options.weights) == bool(options.toward or options.prefer):
        parser.error("write --toward, --prefer or both; or --weights alone")

    from gdpo_tune.core.trials import format_parts
    from gdpo_tune.ledger.requests import read_parts
    from gdpo_tune.results.merge_request import (
        RequestedMerge,
        choose_next_merge,
        parse_shares,
        parse_target,
    )
    from gdpo_tune.results.open_sweep import find_sweep, override_storage
    from gdpo_tune.results.steering import Steering
    from gdpo_tune.steer import print_answer
    from gdpo_tune.sweep import main as run_sweep

    steering, sweep = Steering(options.sweep), find_sweep(options.sweep)
    if options.weights:
        shares = parse_shares(options.weights, "--weights", "7=0.3,12@40=0.7")
        chosen = RequestedMerge(read_parts(sweep.records, shares), {}, ())
    else:
        target = parse_target(options.toward, options.prefer)
        chosen = choose_next_merge(sweep, target, options.sweep)
    print(f"merge: {format_parts(chosen.parts)}", flush=True)
    if options.dry_run:
        _print_values(sweep, chosen, {})
        return ExitCode.DONE
    merges = (r for r in sweep.records if r.role == "merge" and r.parts == chosen.parts)
    record = next((merge for merge in merges if merge.checkpoint), None)
    if record is None:
        request = steering.request_merge(chosen.parts)
        if steering.is_running or not _is_over(sweep):
            return print_answer(steering, request)
        if pause := steering.pause:
            print(
                f"{request.text}: stored; {pause.author} has paused the sweep: run\n"
                f"  python -m gdpo_tune.steer {quote(options.sweep)} resume\nand this command again"
            )
            return ExitCode.DONE
        storage = override_storage(sweep.spec.storage)
        words = [str(steering.file), "--name", sweep.spec.name, "--set", storage]
        if status := run_sweep(words):
            return status
        sweep = find_sweep(options.sweep)
        record = next((r for r in sweep.records if r.request == request.id), None)
        if record is None:  # refused: the sweep had changed meanwhile
            return print_answer(steering, request)
    return _print_result(sweep, chosen, record)


def _print_result(sweep: Sweep, chosen: RequestedMerge, record: TrialRecord) -> int:
    from gdpo_tune.core.text import format_estimate, format_first, format_number

    print(f"{record.name}: {' '.join(filter(None, [record.state, record.reason]))}")
    if record.state != "complete":
        return ExitCode.FAILED
    _print_values(sweep, chosen, {"validation": record.validation, "test": record.test})
    for limit in chosen.limits:
        estimate = record.test[limit.metric]
        verb = "holds" if limit.holds(estimate.mean) else "does not hold"
        bound = f"{limit.metric} {limit.op} {format_number(limit.limit)}"
        print(f"{bound} {verb} on test prompts: {format_estimate(estimate)}")
    others = [
        other.name
        for other in sweep.records
        if other.state == "complete" and other.feasible and not other.is_initial
        if other.replicate_of is None and other.number != record.number
        if all(limit.holds(other.test[limit.metric].mean) for limit in chosen.limits)
    ]
    if chosen.limits and others:
        print(f"these meet it on test prompts too: {format_first(others, MAX_NAMED)}")
    print(f"policy: {record.policy}")
    return ExitCode.DONE


def _is_over(sweep: Sweep) -> bool:
    from gdpo_tune.ledger import Ledger
    from gdpo_tune.tuning.plan import is_over

    with Ledger.open(sweep.spec, read_only=True) as ledger:
        return is_over(ledger.spec, ledger.get_records(), ledger.compute_hours())


def _print_values(
    sweep: Sweep, chosen: RequestedMerge, measured: Mapping[str, Mapping[str, Estimate]]
) -> None:
    """Print values of a merge beside those of its parts; `measured` is by split."""
    from gdpo_tune.core.text import abbreviate_parameter, format_estimate
    from gdpo_tune.display.tables import build_console, make_table

    rows = {"merge, predicted on validation": chosen.prediction} if chosen.prediction else {}
    rows |= {f"merge, {split}": estimates for split, estimates in measured.items()}
    for part in chosen.parts:
        record, name = sweep.records[part.trial], f"{part.trial}@{part.step}"
        rung = next(rung for rung in record.rungs if rung.step == part.step)
        rows[f"{name}, validation"] = rung.validation
        if part.step == record.last_step:
            rows[f"{name}, test"] = record.test
    metrics = dict.fromkeys([*sweep.spec.objectives, *chosen.prediction])
    table = make_table("")
    for metric in metrics:
        table.add_column(abbreviate_parameter(metric), no_wrap=True, justify="right")
    for title, estimates in rows.items():
        table.add_row(title, *(format_estimate(estimates.get(name)) for name in metrics))
    build_console().print(table)


if __name__ == "__main__":
    cli.run_command(main)
