"""Write one training, or a merge, for another library, and a page of what will differ there.

    python -m gdpo_tune.export runs/code:knee --to verl
    python -m gdpo_tune.export runs/code --pick "max correctness where length >= 0.9" --to trl
    python -m gdpo_tune.export runs/code:knee --to verl --recipe code_qwen --reference-data
    python -m gdpo_tune.export runs/code:merge-27 --to mergekit
    python -m gdpo_tune.export fixed.yaml --to nemo-rl --set policy=Qwen/Qwen2.5-7B-Instruct

What the library would change or ignore without a warning is refused, with the reason. Under another
policy, other data or other lengths, values that do not carry over come from --set or --recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.core.registry import EXPORTERS

if TYPE_CHECKING:
    from gdpo_tune.results.retrain import TrainingRequest

WITHOUT_GDPO = ("openrlhf", "prime-rl")
"""Libraries that know one reward per completion, so that they can only normalize a sum."""


def build_parser() -> cli.Parser:
    parser = cli.Parser(__name__)
    parser.add_argument(
        "source",
        metavar="SWEEP[:WHICH]",
        help="a candidate of a sweep: DIRECTORY:knee, DIRECTORY:max_<objective>, DIRECTORY:<trial "
        "number>, DIRECTORY:7@40, DIRECTORY:merge-27, or DIRECTORY with --pick; or a file with one "
        "value for every parameter",
    )
    parser.pick()
    parser.add_argument(
        "--to", required=True, type=_check_library, choices=sorted(EXPORTERS), help="the library"
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument(
        "--reference-data",
        action="store_true",
        help="write a program that makes the prompts from their data set, in place of the prompts",
    )
    data.add_argument(
        "--copy-data",
        action="store_true",
        help="write the prompts even if no licence is known that allows to pass them on",
    )
    parser.overrides()
    parser.recipe()
    parser.add_argument(
        "--out",
        type=cli.parse_directory,
        help="directory (default: <storage>/<name>-<which>-<library>)",
    )
    return parser


def _check_library(name: str) -> str:
    """Refuse a library that cannot express GDPO, with the reason."""
    if name in WITHOUT_GDPO:
        raise argparse.ArgumentTypeError(
            f"{name} knows one reward per completion and normalizes only their sum, so it cannot "
            f"express GDPO; choose from {', '.join(sorted(EXPORTERS))}"
        )
    return name


def main(arguments: Sequence[str]) -> int:
    """Write what `arguments` ask for and return the exit status."""
    options = build_parser().parse_args(arguments)

    from gdpo_tune.core.files import is_directory
    from gdpo_tune.exporters.data_licence import require_shareable
    from gdpo_tune.exporters.differences_page import PAGE
    from gdpo_tune.exporters.write_export import MERGERS, RUN, export_training
    from gdpo_tune.policies.load_policy import resolve_policy

    request = _load_request(options)
    policy = resolve_policy(request.spec.policy)
    if is_directory(Path(policy)):  # the library works in the exported directory
        policy = str(Path(policy).absolute())
    if not options.copy_data and not options.reference_data and options.to not in MERGERS:
        require_shareable(request.spec.data)
    exported, directory = export_training(
        request, options.to, policy, options.out, references_data=options.reference_data
    )
    for line in request.lines:
        print(line)
    print(f"what differs: {directory / PAGE}")
    print(f"install {exported.library}: {exported.install}")
    command = f"{exported.environment} bash {quote(str(directory / RUN))}"
    print(f"start it: {command.lstrip()}")
    return 0


def _load_request(options: argparse.Namespace) -> TrainingRequest:
    """Return the training that is exported.

    Raises:
        UsageError: it does not exist, or `--pick` is given with a file.
    """
    from gdpo_tune.core.errors import UsageError
    from gdpo_tune.core.files import is_file
    from gdpo_tune.exporters.write_export import MERGERS
    from gdpo_tune.results.retrain import build_request_from_file, build_request_from_sweep

    if not is_file(Path(options.source)):
        return build_request_from_sweep(
            options.source,
            options.overrides,
            options.pick,
            "export",
            to_run=False,
            merges=options.to in MERGERS,
            recipe=options.recipe,
        )
    for option in ("pick", "recipe"):
        if getattr(options, option):
            reason = f"--{option} requires a sweep's directory"
            raise UsageError(f"{options.source} is a file: {reason}")
    return build_request_from_file(options.source, options.overrides)


if __name__ == "__main__":
    cli.run_command(main)
