"""Write one training, or a merge, for another library, and a page of what will differ there.

    python -m gdpo_tune.export runs/code:knee --to verl
    python -m gdpo_tune.export runs/code --pick "max correctness where length >= 0.9" --to trl
    python -m gdpo_tune.export runs/code:knee --to verl --recipe code_qwen --reference-data
    python -m gdpo_tune.export runs/code:merge-27 --to mergekit
    python -m gdpo_tune.export fixed.yaml --to nemo-rl --set policy=Qwen/Qwen2.5-7B-Instruct
    python -m gdpo_tune.export runs/code:knee --collect runs/code-knee-verl

What the library would change or ignore without a warning is refused, with the reason. Under another
policy, other data or other lengths, values that do not carry over come from --set or --recipe. Once
the library has trained, --collect makes a policy of what it saved and compares the values of both.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.core.errors import PolicyError, UsageError
from gdpo_tune.core.files import HUB_ID, is_directory, is_file
from gdpo_tune.core.registry import EXPORTERS

if TYPE_CHECKING:
    from gdpo_tune.core.trial_config import TrialConfig
    from gdpo_tune.core.trials import Estimate
    from gdpo_tune.results.retrain import TrainingRequest

WITHOUT_GDPO = ("openrlhf", "prime-rl")
"""Libraries that know one reward per completion, so that they can only normalize a sum."""
TRAINED_STEPS = re.compile(r"(?:checkpoint-|global_step_|step_)(\d+)")
"""Steps in the names of checkpoints of the libraries."""
POLICY_FILES = ("adapter_model.safetensors", "model*.safetensors", "pytorch_model*.bin")
"""Patterns of the files of weights that `from_pretrained` reads."""


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__)
    parser.add_argument(
        "source",
        metavar="SWEEP[:WHICH]",
        help="a candidate of a sweep: DIRECTORY:knee, DIRECTORY:max_<objective>, DIRECTORY:<trial "
        "number>, DIRECTORY:7@40, DIRECTORY:merge-27, or DIRECTORY with --pick; or a file with one "
        "value for every parameter",
    )
    parser.pick()
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--to", type=_check_library, choices=sorted(EXPORTERS), help="the library that will train"
    )
    target.add_argument(
        "--collect",
        metavar="DIRECTORY",
        type=cli.parse_directory,
        help="make a policy of what the library saved in its export, or in any directory, and "
        "evaluate it as the sweep does; with the --set and --recipe of the export",
    )
    text = "where the machine that trains has the policy of the sweep (default: as it is here)"
    parser.add_argument("--base-model", metavar="NAME_OR_PATH", default="", help=text)
    data = parser.add_mutually_exclusive_group()
    text = "write a program that makes the prompts from their data set, in place of the prompts"
    data.add_argument("--reference-data", action="store_true", help=text)
    text = "write the prompts even if no licence is known that allows to pass them on"
    data.add_argument("--copy-data", action="store_true", help=text)
    parser.overrides()
    parser.recipe()
    text = "directory (default: <storage>/<name>-<which>-<library>)"
    parser.add_argument("--out", type=cli.parse_directory, help=text)
    return parser


def _check_library(name: str) -> str:
    if name in WITHOUT_GDPO:
        raise argparse.ArgumentTypeError(
            f"{name} knows one reward per completion and normalizes only their sum, so it cannot "
            f"express GDPO; choose from {', '.join(sorted(EXPORTERS))}"
        )
    return name


def main(arguments: Sequence[str]) -> int:
    """Write what `arguments` ask for and return the exit status."""
    options = build_parser().parse_args(arguments)
    if options.collect:
        return _collect(options)

    from gdpo_tune.exporters.page import PAGE
    from gdpo_tune.exporters.training_prompts import require_shareable
    from gdpo_tune.exporters.write_export import MERGERS, RUN, export_training
    from gdpo_tune.policies.load_policy import resolve_policy

    request = _load_request(options)
    policy = resolve_policy(request.spec.policy)
    base: str = options.base_model
    if base and not Path(base).is_absolute() and not HUB_ID.fullmatch(base):
        reason = "it is neither a whole path nor a Hub id"
        fix = "write org/name, or the path on the machine that trains"
        raise UsageError(f"--base-model {base}: {reason}\n    fix: {fix}")
    if is_directory(Path(policy)):  # the library works in the exported directory
        policy = str(Path(policy).absolute())
    if not options.copy_data and not options.reference_data and options.to not in MERGERS:
        require_shareable(request.spec.data)
    exported, directory = export_training(
        *(request, options.to, policy, options.out),
        references_data=options.reference_data,
        base_model=base,
    )
    for line in request.lines:
        print(line)
    print(f"what differs: {directory / PAGE}")
    print(f"install {exported.library}: {exported.install}")
    command = f"{exported.environment} bash {quote(str(directory / RUN))}"
    print(f"start it: {command.lstrip()}")
    if exported.training is not None:
        change = f"--collect {quote(str(directory))} in place of --to and --out"
        print(f"compare what it trained: the same command with {change}")
    return 0


def _collect(options: argparse.Namespace) -> int:
    """Make a policy of what a library trained, and compare it with the candidate.

    Both are judged by the sweep's task on its test prompts, with the seeds of the trial.
    """
    from gdpo_tune.analysis.front import subtract_estimates
    from gdpo_tune.core.trial_files import ADAPTER_CONFIG
    from gdpo_tune.display.training import print_result
    from gdpo_tune.results.picks import load_and_pick
    from gdpo_tune.results.retrain import build_trial_config

    request = _load_request(options)
    name = f"{request.spec.name}-{request.label}-collected"
    out = options.out or request.spec.output_directory / name
    config = build_trial_config(request, seed=None, out=out, threads=None)
    if config.directory.exists():
        raise UsageError(f"{config.directory} exists\n    fix: move it, or choose another --out")
    saved = find_saved_policy(options.collect)
    if not (saved / ADAPTER_CONFIG).is_file():
        config = replace(config, model=config.model.replace(lora_rank=0))
    cli.prepare_machine(request.spec)
    from gdpo_tune.training.trial import evaluate_policy

    policy = _write_policy(saved, config)
    test = evaluate_policy(config, policy, config.training.steps)
    values: Mapping[str, Estimate] = {}
    if request.name:
        found = load_and_pick(options.source, options.pick, "export")[1].configuration
        values = found.mean if found else {}
    apart = {n: subtract_estimates(test[n], value) for n, value in values.items() if n in test}
    print("\n".join(request.lines))
    columns = {"in the sweep": values, "collected": test, "difference": apart}
    print_result(request.spec.list_objectives(), columns)
    print(f"policy: {policy}")
    return 0


def _write_policy(saved: Path, config: TrialConfig) -> Path:
    from safetensors import SafetensorError

    from gdpo_tune.core.trial_files import ADAPTER, ADAPTER_CONFIG
    from gdpo_tune.core.trials import Cost
    from gdpo_tune.policies.adapters import join_adapter
    from gdpo_tune.policies.load_policy import load_policy
    from gdpo_tune.training.checkpoints import write_checkpoint
    from gdpo_tune.training.worker_cache import open_worker_cache

    is_adapter = (saved / ADAPTER_CONFIG).is_file()

    def fill(place: Path) -> None:
        target = place / ADAPTER if is_adapter else place
        target.mkdir(exist_ok=True)
        for pattern in (*POLICY_FILES, "*.index.json", "*config.json"):
            for file in saved.glob(pattern):
                shutil.copyfile(file, target / file.name)
        with open_worker_cache(config) as cache:
            model = cache.take_policy()
            if is_adapter:
                join_adapter(model, place).save_pretrained(place)
            cache.tokenizer.save_pretrained(place)
            cache.save_format(place)
        load_policy(str(place))

    # PEFT has no type of its own.
    unusable = (PolicyError, SafetensorError, RuntimeError, ValueError)
    try:
        return write_checkpoint(config.directory, config.training.steps, Cost(), fill).path
    except unusable as error:
        shutil.rmtree(config.directory, ignore_errors=True)
        detail = str(error.__cause__ or error).strip().rpartition("\n")[2].strip()
        reason = f"its weights are not those of {config.policy}, or are damaged: {detail}"
        fix = "name what was trained from that policy, to its end"
        raise UsageError(f"--collect {saved}: {reason}\n    fix: {fix}") from error


def find_saved_policy(directory: Path) -> Path:
    """Return where a library saved its last policy or adapter; shards are converted before.

    Weights without steps in their path come after every checkpoint.

    Raises:
        UsageError: there are none, or the library that converts them is not installed.
    """
    from gdpo_tune.exporters import library, nemo_rl, verl

    shards = {
        "model_world_size_*_rank_0.pt": verl.MERGE,
        "shard-*.safetensors": nemo_rl.CONSOLIDATE,
    }
    found = [
        (float(steps[-1]), not command, "adapter" in file.name, file.stat().st_mtime, file, command)
        for pattern, command in {**dict.fromkeys(POLICY_FILES, ""), **shards}.items()
        for file in directory.rglob(pattern)
        if (below := file.relative_to(directory)).parent != Path(library.POLICY_COPY)
        and (steps := TRAINED_STEPS.findall(f"{below}") or ["inf"])
        and "optimizer" not in below.parts
    ]
    if not found:
        reason = f"--collect {directory}: no weights of a policy are there"
        fix = "name the directory of an export whose training has ended, or that of a policy"
        raise UsageError(f"{reason}\n    fix: {fix}")
    *_, file, command = max(found)
    if not command:
        return file.parent
    target = directory / library.CONVERTED
    line = command.format(saved=quote(str(file.parent)), policy=quote(str(target)))
    print(line, flush=True)
    here = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    ended = subprocess.run(["bash", "-uc", line], env=here, capture_output=True, text=True)
    if ended.returncode:
        reason = ended.stderr.strip().rpartition("\n")[2]
        raise UsageError(
            f"--collect: {file.parent} holds shards, and their library cannot join them here: "
            f"{reason}\n    fix: where it is installed, run {line}"
            f"\n         then collect {target}"
        )
    return find_saved_policy(target)


def _load_request(options: argparse.Namespace) -> TrainingRequest:
    from gdpo_tune.exporters.write_export import MERGERS
    from gdpo_tune.results.retrain import build_request_from_file, build_request_from_sweep

    if not is_file(Path(options.source)):
        return build_request_from_sweep(
            options.source,
            options.overrides,
            options.pick,
            "export",
            to_run=options.collect is not None,
            merges=options.to in MERGERS,
            recipe=options.recipe,
        )
    for option in ("pick", "recipe"):
        if getattr(options, option):
            raise UsageError(f"{options.source} is a file: --{option} requires a sweep's directory")
    return build_request_from_file(options.source, options.overrides)


if __name__ == "__main__":
    cli.run_command(main)
