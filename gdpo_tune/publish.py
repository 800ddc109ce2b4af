"""Publish a policy of a sweep, or its whole front, on the Hub.

    python -m gdpo_tune.publish runs/code:knee --to USER/NAME --dry-run
    python -m gdpo_tune.publish runs/code:knee --to USER/NAME
    python -m gdpo_tune.publish runs/code --front --to USER/NAME

A policy gets a model card, written from the ledger, and `sweep.json` with the numbers of its sweep,
without prompts, completions, texts and what is about this machine. With --front each member whose
policy was kept gets a repository, the numbers get a data set, and a collection lists them. The same
command updates what it published, or continues.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import explain_write_errors
from gdpo_tune.core.text import format_count

if TYPE_CHECKING:
    from gdpo_tune.publishing.publication import Publication
    from gdpo_tune.publishing.repositories import RepositoryContent
    from gdpo_tune.results.picks import PickedCandidate


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__)
    parser.file(
        "source",
        "a candidate of a sweep: DIRECTORY:knee, DIRECTORY:7, DIRECTORY:merge-27, or DIRECTORY "
        "with --pick; with --front the sweep alone",
        metavar="SWEEP[:WHICH]",
    )
    parser.pick()
    parser.flag("--front", "publish every member of the front")
    parser.add_argument("--to", required=True, metavar="USER/NAME", help="name on the Hub")
    parser.flag("--private", "make new repositories and collections private")
    text = "licence of the policies, such as apache-2.0 (default: that of the untrained policy)"
    parser.add_argument("--license", metavar="ID", help=text)
    parser.flag("--dry-run", "write the directories, and upload nothing")
    text = "with --dry-run: directory for them (default: <storage>/<name>-published)"
    parser.add_argument("--out", type=cli.parse_directory, help=text)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Publish what `arguments` ask for and return the exit status."""
    options = build_parser().parse_args(arguments)

    if options.out is not None and not options.dry_run:
        raise UsageError("--out has an effect only with --dry-run: leave it out")
    publication, policies, missing = _choose_policies(options)
    for reason in missing:
        print(f"not published: {reason}")
    if options.dry_run:
        contents = _build_contents(publication, policies, missing)
        default = publication.sweep.spec.output_directory / f"{publication.spec.name}-published"
        directory = (options.out or default).expanduser()
        _write_directories(publication, contents, directory, options.private)
    else:
        _upload_all(publication, policies, missing, private=options.private)
    return 0


def _choose_policies(
    options: argparse.Namespace,
) -> tuple[Publication, list[PickedCandidate], list[str]]:
    from gdpo_tune.publishing.publication import check_published, list_members, open_publication
    from gdpo_tune.results.open_sweep import read_sweep, resolve_location, split_source
    from gdpo_tune.results.picks import parse_pick, pick_trial

    directory, pick = split_source(options.source, options.pick)
    if options.front and pick is not None:
        raise UsageError(f"--front publishes the whole front: leave {pick!r} out")
    if not options.front and pick is None:
        raise UsageError(
            f"{options.source}: which candidate?\n    fix: write {options.source}:knee, another "
            "choice after the colon or --pick, or --front for all"
        )
    parsed = None if pick is None else parse_pick(pick)
    location = resolve_location(directory)
    sweep = read_sweep(location, options.source, with_files=True)
    publication = open_publication(
        sweep, directory, options.to, options.license, is_front=options.front
    )
    if parsed is None:
        members, missing = list_members(publication)
        return publication, members, missing
    chosen = pick_trial(publication.sweep, parsed)
    print("\n".join(chosen.lines))
    check_published(publication, chosen)
    return publication, [chosen], []


def _build_contents(
    publication: Publication, policies: Sequence[PickedCandidate], missing: Sequence[str]
) -> list[RepositoryContent]:
    from gdpo_tune.publishing.repositories import build_front_repositories, build_model_repository

    if publication.is_front:
        return build_front_repositories(publication, policies, missing)
    return [build_model_repository(publication, policy) for policy in policies]


def _write_directories(
    publication: Publication, contents: Sequence[RepositoryContent], directory: Path, private: bool
) -> None:
    from gdpo_tune.publishing.repositories import check_directories, write_directory

    check_directories(contents, directory)
    print("dry run: nothing is uploaded")
    for each in contents:
        with _write_whole(publication, each, directory) as content:
            with explain_write_errors("the repository"):
                path = write_directory(content, directory)
            size = f"{format_count(len(content.files), 'file')}, {content.size / 1e6:.1f} MB"
        repository = content.repository
        words = ["hf", "upload", repository.id, str(path), ".", "--repo-type", repository.kind]
        visibility = "private" if private else "public"
        print(f"{repository.path} ({repository.kind}, {visibility}): {size}")
        print(f"  written: {path}")
        print(f"  upload it later: {shlex.join([*words, *(['--private'] if private else [])])}")


@contextmanager
def _write_whole(
    publication: Publication, content: RepositoryContent, directory: Path
) -> Generator[RepositoryContent]:
    """Yield a content whose policy is whole; that of an adapter is on disk within the block."""
    if content.adapter is None:
        yield content
        return

    from gdpo_tune.core.trials import find_start
    from gdpo_tune.publishing.record import collect_policy_files
    from gdpo_tune.results.open_sweep import fetch_policy
    from gdpo_tune.training.merging import write_whole_policy

    sweep, spec = publication.sweep, publication.sweep.spec
    start = fetch_policy(spec, find_start(sweep.records))
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".whole-", dir=directory) as place:
        write_whole_policy(
            *(content.adapter, Path(place), spec.policy, spec.model.revision, start),
            temperature=spec.training.evaluation_temperature,
        )
        yield content.add_policy(collect_policy_files(sweep, Path(place)).files)


def _upload_all(
    publication: Publication,
    policies: Sequence[PickedCandidate],
    missing: Sequence[str],
    *,
    private: bool,
) -> None:
    from gdpo_tune.publishing.hub import (
        check_cards,
        check_names,
        list_in_collection,
        log_in,
        upload,
    )

    api = log_in(publication.target)
    contents = _build_contents(publication, policies, missing)
    found = check_names(api, contents, private=private)
    check_cards(api, contents)
    place = publication.sweep.spec.output_directory
    for each in contents:
        with _write_whole(publication, each, place) as content:
            print(upload(api, content, found, private=private), flush=True)
    if publication.is_front:
        print(f"collection: {list_in_collection(api, publication, contents, private=private)}")


if __name__ == "__main__":
    cli.run_command(main)
