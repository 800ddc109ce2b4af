"""Evaluate a policy on the test prompts of a sweep, and compare it with the knee of the sweep.

    python -m gdpo_tune.evaluate trained/elsewhere runs/code
    python -m gdpo_tune.evaluate runs/code:7
    python -m gdpo_tune.evaluate HuggingFaceTB/SmolLM2-135M-Instruct search_spaces/code.yaml

The policy is a directory that `from_pretrained` loads, such as one that another library has trained
with an export; an id on the Hub; the name of one that ships; or a candidate of a sweep. Task, data,
lengths and sandbox are those of the sweep, or of a file. Completions are sampled with another seed
than in the sweep, so the values of a candidate are free of the optimism of its choice; with the
seed of its trial they are those of the sweep, to the bit on a CPU. --json writes
{"policy": ..., "seed": ..., "test": {metric: {"mean", "se", "low", "high", "df"}}}.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import expand_path, explain_write_errors, is_file, write_atomically
from gdpo_tune.core.object_store import SPEC

if TYPE_CHECKING:
    from gdpo_tune.core.trial_config import TrialConfig
    from gdpo_tune.core.trials import Estimate, TrialRecord
    from gdpo_tune.results.open_sweep import Sweep
    from gdpo_tune.spec import SweepSpec

SEED = 0
"""Seed of completions that are sampled anew; those of trials are derived from `search.seed`."""

NAMES = {"untrained": "the untrained policy", "knee": "the knee"}
"""Title of a column, short enough for a terminal of 80 columns -> its name in a sentence."""


@dataclass(frozen=True)
class EvaluationRequest:
    """Request for one evaluation."""

    spec: SweepSpec
    sweep: Sweep | None
    """Sweep with which the policy is compared; None where a file is given."""
    config: TrialConfig
    checkpoint: Path | None = None
    """Checkpoint of a candidate of the sweep; None for a policy by its name or directory."""
    record: TrialRecord | None = None
    """The candidate; with the seed, the steps of its training decide what is sampled."""


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__)
    parser.add_argument("policy", metavar="POLICY", help="directory, id on the Hub, or SWEEP:WHICH")
    text = "whose test prompts are used; left out for a candidate of a sweep"
    parser.add_argument("source", metavar="SWEEP|FILE.yaml", nargs="?", help=text)
    text = f"seed of the completions (default: {SEED}; that of a trial repeats its values)"
    parser.add_argument("--seed", type=cli.integer(0, 2**32 - 1), default=SEED, help=text)
    parser.overrides()
    parser.file("--json", "file of the values", type=Path, metavar="OUT")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Evaluate the policy that `arguments` name, show the values, and return the exit status.

    Raises:
        UsageError, SpecError, PolicyError: there is no such policy, sweep or file, or a candidate
            was not kept; before anything is sampled.
    """
    options = build_parser().parse_args(arguments)
    cli.check_output("--json", options.json)
    with tempfile.TemporaryDirectory() as scratch:
        read_request = _read_candidate if options.source is None else _read_policy
        asked = read_request(options, Path(scratch))
        cli.prepare_machine(asked.spec)
        count = asked.spec.training.test_completions
        from gdpo_tune.results.retrain import list_changed_content

        if asked.sweep is not None:
            for line in list_changed_content(asked.sweep, asked.spec, len(asked.sweep.records)):
                print(line)
        print(f"{count:,} completions of test prompts, seed {options.seed}", flush=True)
        from gdpo_tune.training.trial import evaluate_policy

        step = asked.record and asked.record.last_step  # of a merge, and of a checkpoint, None
        values = evaluate_policy(asked.config, asked.checkpoint, step or 0)

    from gdpo_tune.analysis.front import find_untrained
    from gdpo_tune.display.training import print_result

    compared: dict[str, Mapping[str, Estimate]] = {}
    if asked.sweep is not None:
        front = asked.sweep.front
        others = {"untrained": find_untrained(front.baselines), "knee": front.knee}
        compared = {name: each.mean for name, each in others.items() if each is not None}
    print_result(asked.spec.list_objectives(), {"this policy": values, **compared})
    for line in _describe_differences(asked.spec, values, compared):
        print(line)
    if asked.record is not None and asked.record.seed != options.seed:
        print(f"--seed {asked.record.seed} repeats the values that the sweep has of it")
    if options.json:
        test = {name: asdict(estimate) for name, estimate in values.items()}
        content = {"policy": options.policy, "seed": options.seed, "test": test}
        with explain_write_errors("the values"):
            write_atomically(options.json, json.dumps(content, ensure_ascii=False))
    return 0


def _read_candidate(options: argparse.Namespace, scratch: Path) -> EvaluationRequest:
    from gdpo_tune.core.trials import find_start
    from gdpo_tune.results.open_sweep import fetch_policy, split_source
    from gdpo_tune.results.picks import load_and_pick
    from gdpo_tune.results.retrain import explain_missing_policy

    policy = options.policy
    location, which = split_source(policy, None)
    if which is None:
        if is_file(expand_path(policy) / SPEC):
            fix = f"name one of its candidates, such as {policy}:knee"
            raise UsageError(f"{policy}: a sweep, not a policy\n    fix: {fix}")
        raise UsageError(
            f"{policy}: on which prompts?\n    fix: name a sweep or a file after it: "
            f"python -m gdpo_tune.evaluate {policy} runs/code"
        )
    sweep, picked = load_and_pick(policy, None, "POLICY")
    record = picked.record
    checkpoint = fetch_policy(sweep.spec, record.checkpoint)
    if checkpoint is None:
        raise UsageError(explain_missing_policy(sweep, record, location))
    spec = _reload(sweep, options.overrides, free=("rollout.",))
    trained = sweep.records[record.parts[0].trial] if record.parts else record
    config = spec.build_trial_config(trained.params, options.seed, scratch)
    config = replace(config, start=fetch_policy(sweep.spec, find_start(sweep.records)))
    return EvaluationRequest(spec, sweep, config, checkpoint, record)


def _read_policy(options: argparse.Namespace, scratch: Path) -> EvaluationRequest:
    from gdpo_tune.results.open_sweep import is_space, locate_sweep, read_sweep, split_source
    from gdpo_tune.results.retrain import build_evaluation_config, override_policy
    from gdpo_tune.spec import load_spec

    policy, source, overrides = options.policy, options.source, options.overrides
    location, which = split_source(policy, None)
    if which is not None and is_file(expand_path(location) / SPEC):
        reason = "a candidate is evaluated on the prompts of its own sweep"
        raise UsageError(f"{policy}: {reason}\n    fix: leave out {source}, or name its directory")
    if any(override.startswith("policy=") for override in overrides):
        raise UsageError(f"--set policy: the policy is {policy}\n    fix: leave it out")
    sweep = None
    is_missing_file = source.endswith((".yaml", ".yml")) and not is_file(expand_path(source))
    if is_space(source) or is_missing_file:
        words = ["search.warm_start=[]", *overrides, *override_policy(policy)]
        spec = load_spec(source, words)
    else:
        sweep = read_sweep(locate_sweep(source), source)
        words = [*overrides, *override_policy(policy)]
        spec = _reload(sweep, words, free=("policy", "model.", "rollout."))
    config = build_evaluation_config(spec, policy, options.seed, scratch)
    return EvaluationRequest(spec, sweep, config)


def _reload(sweep: Sweep, overrides: Sequence[str], *, free: tuple[str, ...]) -> SweepSpec:
    """Return a sweep's file with overrides that leave what is measured as it was.

    Keys that begin with one of `free` may change.

    Raises:
        UsageError: other values would be compared with those of the sweep.
    """
    from gdpo_tune.spec.model import list_decisive_values, list_differences

    spec = sweep.reload(overrides)
    was, now = (
        {n: v for n, v in list_decisive_values(each).items() if not n.startswith(free)}
        for each in (sweep.spec, spec)
    )
    if changed := list_differences(was, now):
        raise UsageError(
            f"--set changes what is compared: {'; '.join(changed)}\n"
            "    fix: leave it out, or name a file in place of the sweep"
        )
    return spec


def _describe_differences(
    spec: SweepSpec, values: Mapping[str, Estimate], compared: Mapping[str, Mapping[str, Estimate]]
) -> list[str]:
    """Return how the policy differs from each other one, in intervals that hold together."""
    from gdpo_tune.analysis.front import subtract_estimates
    from gdpo_tune.core.text import format_number

    goals = [goal.name for goal in spec.list_objectives()]
    lines: list[str] = []
    for title, others in compared.items():
        parts: list[str] = []
        for name in (goal for goal in goals if goal in values and goal in others):
            gap = subtract_estimates(values[name], others[name], len(goals) * len(compared))
            low, high = format_number(gap.low), format_number(gap.high)
            parts.append(f"{name} {gap.mean:+.3f} ({low} to {high})")
        lines.append(f"against {NAMES[title]} (95 % for all): {', '.join(parts)}")
    return lines


if __name__ == "__main__":
    cli.run_command(main)
