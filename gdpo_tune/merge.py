"""Merge policies of a sweep toward a target.

    python -m gdpo_tune.merge runs/code --toward "length >= 0.6"
    python -m gdpo_tune.merge runs/code --toward "format >= 0.8" --prefer correctness=2,length=1
    python -m gdpo_tune.merge runs/code --weights 7=0.3,12@40=0.7

A merge is a weighted mean of the weights of trained policies: it costs an evaluation and no
training. The command chooses the one that best reaches the target, by a model of merges that each
of a few evaluations on validation prompts corrects. It evaluates the best on test prompts and
writes it as a policy that `from_pretrained` loads. The sweep stays as it is. After an interruption,
run the same command to resume.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune import cli
from gdpo_tune.core.errors import TrialFailure, UsageError
from gdpo_tune.core.system import clear_rendezvous

if TYPE_CHECKING:
    from gdpo_tune.core.trial_config import TrainedPart
    from gdpo_tune.core.trials import Outcome, Part
    from gdpo_tune.results.merge_request import MergeProgress, MergeRequest, MergeResult

LOCK = "merge.lock"
ADAPTERS, PARENTS = "adapters", "parents"
"""Directories in that of a merge: the adapters of `--adapters`, and copies from an object store."""


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__)
    add = parser.add_argument
    add("sweep", metavar="SWEEP", help="its directory, name under runs/, or address")
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
    text = "merges to evaluate on validation prompts at most (default: 4)"
    add("--evaluations", metavar="N", type=cli.integer(1, 1000), default=4, help=text)
    text = "write a set of LoRA adapters with weights, for servers that mix them, and no policy"
    parser.flag("--adapters", text)
    parser.flag("--dry-run", "print the first choice and its prediction alone")
    parser.overrides()
    add("--out", type=Path, help="directory (default: <storage>/<name>-merge-<target>)")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Merge as `arguments` say and return the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if bool(options.weights) == bool(options.toward or options.prefer):
        parser.error("write --toward, --prefer or both; or --weights alone")

    from gdpo_tune.display.training import print_choice
    from gdpo_tune.results.merge_request import build_merge_request

    request = build_merge_request(
        options.sweep, options.toward, options.prefer, options.weights, options.overrides
    )
    if options.adapters and not request.spec.model.lora_rank:
        raise UsageError(
            "--adapters: that sweep trained whole policies, and only adapters can be mixed at run "
            "time (model.lora_rank = 0)\n    fix: leave --adapters out"
        )
    if options.dry_run:
        if choice := request.choose():
            print_choice(request, choice)
        return 0
    name = f"{request.spec.name}-merge-{request.label}{'-adapters' * options.adapters}"
    directory = (options.out or request.spec.output_directory / name).expanduser().absolute()
    count = options.evaluations if request.wish else 1
    _merge_or_show(request, directory, count, adapters=options.adapters)
    return 0


def _merge_or_show(request: MergeRequest, directory: Path, count: int, *, adapters: bool) -> None:
    """Merge in `directory` after `count` evaluations, or show its result if it has one.

    Raises:
        UsageError: nothing reaches the target, the policies do not fit, the directory holds another
            merge, or another process merges there.
    """
    from gdpo_tune.display.training import print_merge
    from gdpo_tune.results.merge_request import MERGE_FILE, read_progress

    settings = request.list_decisive_settings(adapters=adapters)
    progress = read_progress(directory, settings)
    if progress.result is None:
        request.choose(progress.evaluations)  # refuses a target before any work
        cli.prepare_machine(request.spec)
        with cli.hold_directory(directory, LOCK):
            try:
                progress = _search(request, directory, settings, count)
            except UsageError:
                _delete_drafts(directory)  # evaluations that a later call can use stay
                if not (directory / MERGE_FILE).exists():
                    (directory / LOCK).unlink(missing_ok=True)
                    with suppress(OSError):  # it has other files
                        directory.rmdir()
                raise
    elif progress.result.most_evaluations < count:
        raise UsageError(
            f"{directory} has the best of {progress.result.most_evaluations} evaluations already\n"
            f"    fix: leave --evaluations {count} out, or choose another --out"
        )
    else:
        print("already finished: nothing was started")
    result = progress.result
    assert result is not None, "the search ends with one"
    place = directory / f"merge-{result.index + 1}"
    for path in sorted(place.iterdir()) if place.is_dir() else ():
        if result.policy == ADAPTERS and path.name.startswith("checkpoint-"):
            shutil.rmtree(path)
        else:
            path.replace(directory / path.name)
    _delete_drafts(directory)
    print_merge(request, progress, directory)


def _delete_drafts(directory: Path) -> None:
    for path in (*directory.glob("merge-*"), directory / PARENTS):
        shutil.rmtree(path, ignore_errors=True)


def _search(
    request: MergeRequest, directory: Path, settings: dict[str, Any], count: int
) -> MergeProgress:
    from gdpo_tune.display.training import print_evaluation
    from gdpo_tune.results.merge_request import read_progress, write_progress

    progress = read_progress(directory, settings)
    while len(progress.evaluations) < count and progress.result is None:
        done = progress.evaluations
        choice = request.choose(done)
        if choice is None:
            break
        place, whole = directory / f"merge-{len(done) + 1}", not settings["adapters"]
        outcome = _evaluate(request, choice.parts, place, whole=whole)
        evaluation = replace(choice, validation=outcome.validation, cost=outcome.cost)
        progress = replace(progress, evaluations=(*done, evaluation))
        write_progress(directory, settings, progress)
        print_evaluation(request, len(progress.evaluations), evaluation)
        best = request.find_best(progress.evaluations)
        for index in set(range(len(progress.evaluations))) - {best}:
            shutil.rmtree(directory / f"merge-{index + 1}", ignore_errors=True)
    if progress.result is None:
        best = request.find_best(progress.evaluations)
        found = progress.evaluations[best]
        if request.find_broken(found.validation):
            raise request.build_error("was found to", found, found.validation)
        result = _test(request, progress, best, directory, adapters=settings["adapters"])
        progress = replace(progress, result=replace(result, most_evaluations=count))
        write_progress(directory, settings, progress)
    return progress


def _test(
    request: MergeRequest, progress: MergeProgress, best: int, directory: Path, *, adapters: bool
) -> MergeResult:
    from gdpo_tune.core.trials import sum_costs
    from gdpo_tune.results.merge_request import MergeResult
    from gdpo_tune.training.checkpoints import create_draft
    from gdpo_tune.training.merging import write_mixture

    parts, place = progress.evaluations[best].parts, directory / f"merge-{best + 1}"
    outcome = _evaluate(request, parts, place, whole=not adapters, with_test=True)
    assert outcome.checkpoint is not None, "a merge is kept"
    if adapters:
        shutil.rmtree(place / ADAPTERS, ignore_errors=True)
        with create_draft(place) as draft:
            write_mixture([_find_part(request, part, directory) for part in parts], draft)
            draft.rename(place / ADAPTERS)
    others = [e.cost for i, e in enumerate(progress.evaluations) if i != best]
    return MergeResult(
        index=best,
        test=outcome.test,
        cost=sum_costs([*others, outcome.cost]),
        policy=ADAPTERS if adapters else outcome.checkpoint.name,
        parents=request.describe_parents(parts),
        environment=outcome.environment,
    )


def _evaluate(
    request: MergeRequest,
    parts: Sequence[Part],
    place: Path,
    *,
    whole: bool,
    with_test: bool = False,
) -> Outcome:
    from gdpo_tune.training import train
    from gdpo_tune.training.checkpoints import find_newest_checkpoint
    from gdpo_tune.training.merging import check_parts

    clear_rendezvous()  # a merge is made by one process
    resume = find_newest_checkpoint(place)
    trained = [_find_part(request, part, place.parent, fetch=resume is None) for part in parts]
    if resume is None:
        try:
            check_parts(trained)
        except TrialFailure as error:
            raise UsageError(f"these policies cannot be merged: {error}") from error
    config = request.build_config(place, trained, whole=whole)
    return train(config, resume=resume, report=lambda _step, _path: None, with_test=with_test)


def _find_part(
    request: MergeRequest, part: Part, directory: Path, *, fetch: bool = True
) -> TrainedPart:
    from gdpo_tune.core.trial_config import TrainedPart
    from gdpo_tune.ledger.sweep_store import SweepStore

    path = request.policies[part.trial, part.step].checkpoint
    assert path is not None, "a merge is chosen among the policies that exist"
    if request.spec.address and fetch:
        trial = path.parent.name
        store, copies = SweepStore(request.spec), directory / PARENTS / trial
        path = store.fetch_checkpoint(int(trial), path.name, copies)
    return TrainedPart(path, part.weight)


if __name__ == "__main__":
    cli.run_command(main)
