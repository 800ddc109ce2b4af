"""Write one training for another library, and a page of what will differ there.

    python -m gdpo_tune.export runs/code:knee --to verl
    python -m gdpo_tune.export runs/code --pick "max correctness where length >= 0.9" --to trl
    python -m gdpo_tune.export fixed.yaml --to nemo-rl --set policy=Qwen/Qwen2.5-7B-Instruct

What the library would change or ignore without a word is refused, with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.core.registry import EXPORTERS, load

if TYPE_CHECKING:
    from gdpo_tune.exporters.base import Exported
    from gdpo_tune.results.retrain import Request


def parser() -> argparse.ArgumentParser:
    """The command line, without importing anything heavy: `--help` answers at once."""
    parser = argparse.ArgumentParser(
        prog="python -m gdpo_tune.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="SWEEP[:WHICH]",
        help="a trial of a sweep: FOLDER:knee, FOLDER:max_<objective>, FOLDER:<trial number>, or "
        "FOLDER with --pick; or a file with one value for every parameter",
    )
    cli.add_pick_argument(parser)
    parser.add_argument("--to", required=True, choices=sorted(EXPORTERS), help="the library")
    cli.add_override_argument(parser)
    parser.add_argument(
        "--out", type=Path, help="folder (default: <storage>/<name>-<which>-<library>)"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Write what `arguments` ask for and return the exit status."""
    options = parser().parse_args(arguments)

    from gdpo_tune.exporters.differences_page import PAGE, page
    from gdpo_tune.exporters.recipe import recipe_of
    from gdpo_tune.policies.load_policy import policy_folder

    asked = _asked(options)
    name = f"{asked.spec.name}-{asked.label}"
    recipe = recipe_of(
        asked.spec,
        asked.params,
        asked.seed,
        policy=policy_folder(asked.spec.policy),
        name=name,
        note=asked.note,
        schedule=asked.schedule,
    )
    exported: Exported = load(EXPORTERS[options.to])(recipe)
    folder: Path = options.out or asked.spec.beside / f"{name}-{options.to}"
    goals = asked.spec.objective_list()
    _write(folder, {exported.file: exported.text, PAGE: page(recipe, exported, goals)})
    for line in asked.told:
        print(line)
    print(f"{exported.library}: {folder / exported.file}")
    print(f"what you supply, and what differs: {folder / PAGE}")
    print(f"in {exported.place}, start it with: {exported.command}")
    return 0


def _asked(options: argparse.Namespace) -> Request:
    """The training that is meant.

    Raises:
        UsageError: there is none, or it is not one.
    """
    from gdpo_tune.core.errors import UsageError
    from gdpo_tune.results.retrain import from_file, from_sweep

    if not Path(options.source).is_file():
        source, overrides = options.source, options.overrides
        return from_sweep(source, overrides, options.pick, "export", to_run=False)
    if options.pick is not None:
        raise UsageError(f"{options.source} is a file: --pick goes with a sweep's folder")
    return from_file(options.source, options.overrides)


def _write(folder: Path, texts: dict[str, str]) -> None:
    """Write every file, or none if one of them is there with another content.

    Raises:
        UsageError: somebody may have edited that one.
    """
    from gdpo_tune.core.errors import UsageError
    from gdpo_tune.core.files import write_whole, writing

    with writing("the export"):
        for name, text in texts.items():
            file = folder / name
            if file.exists() and file.read_bytes() != text.encode():
                raise UsageError(
                    f"{file} is there with another content, which may be your work\n"
                    "    fix: choose another --out, or remove it"
                )
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(folder / name, text)


if __name__ == "__main__":
    cli.run(main)
