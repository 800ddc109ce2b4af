"""Evaluate a policy on the test prompts of a sweep, and compare it with the sweep's front.

    python -m gdpo_tune.evaluate exported/code-knee runs/code
    python -m gdpo_tune.evaluate runs/code:7
    python -m gdpo_tune.evaluate HuggingFaceTB/SmolLM2-135M-Instruct search_spaces/code.yaml

The policy is a directory that `from_pretrained` loads, such as one that another library has trained
with an export; an id on the Hub; the name of one that ships; or a candidate of a sweep. Task, data,
lengths and sandbox are those of the sweep, or of a file. Completions are sampled anew, so a
candidate that the sweep chose for its values is measured without luck; with the seed of its trial,
its values are those of the sweep, to the bit on a CPU.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import explain_write_errors, is_file, write_atomically
from gdpo_tune.core.trial_files import ADAPTER_CONFIG

if TYPE_CHECKING:
    from gdpo_tune.core.trial_config import TrialConfig
    from gdpo_tune.core.trials import Estimate
    from gdpo_tune.results.open_sweep import Sweep
    from gdpo_tune.spec import SweepSpec

SEED = 0
"""Seed of completions that are sampled anew; those of trials are derived from `search.seed`."""


@dataclass(frozen=True)
class EvaluatedPolicy:
    """What is evaluated, and with what it is compared."""

    spec: SweepSpec
    sweep: Sweep | None
    """None where a file is given."""
    config: TrialConfig
    checkpoint: Path | None
    """Checkpoint of a candidate of the sweep; None for a policy by its name or directory."""
    step: int
    """Steps that a candidate was trained for; with the seed they decide what is sampled."""
    recorded_seed: int | None


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__)
    parser.add_argument("policy", metavar="POLICY", help="directory, id on the Hub, or SWEEP:WHICH")
    text = "its test prompts are used (default: the sweep of the candidate)"
    parser.add_argument("source", metavar="SWEEP|FILE.yaml", nargs="?", help=text)
    text = f"seed of the completions (default: {SEED}; that of a trial repeats its values)"
    parser.add_argument("--seed", type=cli.integer(0, 2**32 - 1), default=SEED, help=text)
    parser.overrides()
    parser.file("--json", "file of the values", type=Path, metavar="OUT")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Evaluate the policy that `arguments` name, show the values, and return the exit status.

    Raises:
        UsageError: there is no such policy or sweep, or a candidate was not kept.
    """
    options = build_parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        asked = _read_request(
            options.policy, options.source, options.overrides, options.seed, Path(scratch)
        )
        cli.prepare_machine(asked.spec)
        count = asked.spec.training.test_completions
        print(f"{count:,} completions of test prompts, seed {options.seed}", flush=True)
        from gdpo_tune.training.trial import evaluate_policy

        values = evaluate_policy(asked.config, asked.checkpoint, asked.step)
    compared = _list_compared(asked.sweep)

    from gdpo_tune.display.training import print_result

    print_result(asked.spec.list_objectives(), {"this policy": values, **compared})
    for line in _describe_differences(asked.spec, values, compared):
        print(line)
    if asked.recorded_seed is not None and options.seed != asked.recorded_seed:
        print(f"--seed {asked.recorded_seed} repeats the values that the sweep has of it")
    if options.json:
        encoded = {name: asdict(estimate) for name, estimate in values.items()}
        with explain_write_errors("the values"):
            write_atomically(options.json, json.dumps({"seed": options.seed, "test": encoded}))
    return 0


def _read_request(
    policy: str, source: str | None, overrides: Sequence[str], seed: int, scratch: Path
) -> EvaluatedPolicy:
    from gdpo_tune.core.trials import find_start
    from gdpo_tune.results.open_sweep import fetch_policy, is_space, read_sweep, split_source
    from gdpo_tune.results.picks import load_and_pick
    from gdpo_tune.results.retrain import explain_missing_policy
    from gdpo_tune.spec import load_spec

    location, which = split_source(policy, None)
    if source is None and which is None:
        raise UsageError(
            f"{policy}: on which prompts?\n"
            f"    fix: python -m gdpo_tune.evaluate {policy} runs/code, or FILE.yaml after it; or "
            "name a candidate of a sweep, such as runs/code:knee"
        )
    if source is None:
        sweep, picked = load_and_pick(policy, None, "POLICY")
        record = picked.record
        checkpoint = fetch_policy(sweep.spec, record.checkpoint)
        if checkpoint is None:
            raise UsageError(explain_missing_policy(sweep, record, location))
        spec = sweep.reload(overrides)
        trained = sweep.records[record.parts[0].trial] if record.parts else record
        config = spec.build_trial_config(trained.params, seed, scratch)
        config = replace(config, start=fetch_policy(sweep.spec, find_start(sweep.records)))
        # a merge, and a checkpoint, are evaluated as policies that were not trained
        step = record.last_step or 0 if record.is_training else 0
        return EvaluatedPolicy(spec, sweep, config, checkpoint, step, record.seed)
    is_adapter = is_file(Path(policy) / ADAPTER_CONFIG)
    words = [*overrides, *([] if is_adapter else [f"policy={json.dumps(policy)}"])]
    sweep = None if is_space(source) else read_sweep(source, source)
    spec = load_spec(source, words) if sweep is None else sweep.reload(words)
    params = dict.fromkeys(spec.space.domains, 0)  # their names switch optional rewards on
    config = spec.build_trial_config(params, seed, scratch)
    if is_adapter:  # Transformers alone loads one with its base
        rollout = config.rollout.replace(engine="transformers")
        model = config.model.replace(lora_rank=0, revision="")
        config = replace(config, policy=policy, rollout=rollout, model=model)
    return EvaluatedPolicy(spec, sweep, config, None, 0, None)


def _list_compared(sweep: Sweep | None) -> dict[str, Mapping[str, Estimate]]:
    """Return the values of the untrained policy and of the knee of a sweep, over their seeds."""
    from gdpo_tune.analysis.front import find_untrained

    if sweep is None:
        return {}
    front = sweep.front
    found = {"untrained": find_untrained(front.baselines), "knee": front.knee}
    return {name: each.mean for name, each in found.items() if each is not None}


def _describe_differences(
    spec: SweepSpec, values: Mapping[str, Estimate], compared: Mapping[str, Mapping[str, Estimate]]
) -> list[str]:
    """Return how the policy differs from each other one, in intervals that hold together."""
    from gdpo_tune.analysis.front import subtract_estimates
    from gdpo_tune.core.text import format_number

    goals = [goal.name for goal in spec.list_objectives()]
    lines: list[str] = []
    for title, others in compared.items():
        shared = [name for name in goals if name in values and name in others]
        parts: list[str] = []
        for name in shared:
            gap = subtract_estimates(values[name], others[name], len(goals) * len(compared))
            low, high = format_number(gap.low), format_number(gap.high)
            parts.append(f"{name} {gap.mean:+.3f} ({low} to {high})")
        lines.append(f"against the {title} (95 % for all): {', '.join(parts)}")
    return lines


if __name__ == "__main__":
    cli.run_command(main)
