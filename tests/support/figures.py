"""Made-up sweeps of any size, for pictures and the terminal."""

import json
import random
from dataclasses import replace
from pathlib import Path

from gdpo_tune.analysis.replicates import choose_replicate
from gdpo_tune.core.trials import Cost, Estimate, Part, Role, TrialRecord
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.model import ObjectiveSpec
from tests.support.paths import ROOT
from tests.support.tuning import FIXED

SPACE = ROOT / "search_spaces" / "code.yaml"
OBJECTIVES = {
    "correctness": ObjectiveSpec(direction="maximize", reference=0.0),
    "format": ObjectiveSpec(direction="maximize", reference=0.0),
    "length": ObjectiveSpec(direction="maximize", reference=0.0),
    "mean_length": ObjectiveSpec(direction="minimize", reference=64.0),
}
NASTY = "<script>alert('x')</script> [bold]&amp; \"quoted\"\nsecond line </table>"


def make_spec(storage: Path, objectives: int = 3) -> SweepSpec:
    spec = load_spec(SPACE, [f"storage={storage}", *FIXED], "made_up")
    chosen = dict(list(OBJECTIVES.items())[:objectives])
    return spec.model_copy(update={"objectives": chosen})


def make_records(
    spec: SweepSpec, search: int, *, replicates: int = 0, failed: tuple[int, ...] = ()
) -> list[TrialRecord]:
    draw = random.Random(search)
    records = [_draw_trial(spec, 0, "untrained", _draw_params(draw), draw)]
    records.append(_draw_trial(spec, 1, "published", _draw_params(draw), draw))
    for number in range(2, 2 + search):
        state = "failed" if number in failed else "complete"
        records.append(_draw_trial(spec, number, "search", _draw_params(draw), draw, state=state))
    for _ in range(replicates):
        choice = choose_replicate(records, spec.list_objectives(), 2, replicates)
        assert choice is not None
        number = len(records)
        again = _draw_trial(spec, number, "replicate", choice.params, draw, of=choice.original)
        near = {
            name: Estimate(first.mean * draw.uniform(0.97, 1.03), first.se)
            for name, first in records[choice.original].test.items()
        }
        records.append(replace(again, test=near, validation=near))
    return records


def add_candidates(records: list[TrialRecord]) -> list[TrialRecord]:
    """Add a checkpoint of the first training, and a merge of the first two with a replicate.

    Both are on the front: the checkpoint is the best in the first objective.
    """
    first, second = [r.number for r in records if r.role == "search" and r.state == "complete"][:2]
    parts = (Part(first, 60, 0.25), Part(second, 60, 0.75))
    number = len(records)
    return [
        *records,
        _evaluate(records[first], number, "checkpoint", (Part(first, 40, 1.0),), 0.4),
        _evaluate(records[first], number + 1, "merge", parts, 0.81),
        replace(
            _evaluate(records[first], number + 2, "replicate", parts, 0.79),
            replicate_of=number + 1,
        ),
    ]


def _evaluate(
    parent: TrialRecord, number: int, role: Role, parts: tuple[Part, ...], value: float
) -> TrialRecord:
    """Return the record of an evaluation of `parts`; every share is near `value`."""
    test = {name: Estimate(5.0 if name == "mean_length" else value, 0.02) for name in OBJECTIVES}
    if role == "checkpoint":
        test["correctness"] = Estimate(0.99, 0.02)
    directory = parent.directory and parent.directory.parent / str(number)
    return replace(
        parent,
        number=number,
        role=role,
        parts=parts,
        params=parent.params if len(parts) == 1 else {},
        proposer="candidate",
        test=test,
        validation=test,
        feasible=True,
        cost=Cost(completions=0, seconds=2.0, cpu_seconds=2.0, evaluation_completions=512),
        directory=directory,
        checkpoint=directory and directory / "checkpoint-0",
        started=1000.0 + 15 * number,
        finished=1002.0 + 15 * number,
    )


def write_steps(record: TrialRecord, steps: int = 12) -> None:
    assert record.directory is not None
    record.directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(1, steps + 1):
        metrics = {}
        for index, reward in enumerate(("correctness", "format", "length")):
            metrics[f"train/rewards/{reward}/mean"] = step / steps
            metrics[f"train/rewards/{reward}/frac_reward_zero_std"] = 0.25
            metrics[f"train/rewards/{reward}/share"] = (0.5, 0.3, 0.2)[index]
        lines.append(json.dumps({"step": step, "metrics": metrics, "cost": {}}))
    (record.directory / "steps.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _draw_params(draw: random.Random):
    return {
        "normalization": draw.choice(["gdpo", "grpo", "grpo_no_std"]),
        "group_size": draw.choice([4, 8]),
        "learning_rate": 10 ** draw.uniform(-4.5, -3.5),
        "reward_weights.correctness": 1.0,
        "reward_weights.format": 10 ** draw.uniform(-1.3, 0.3),
        "reward_weights.length": 10 ** draw.uniform(-1.3, 0.3),
    }


def _draw_trial(spec, number, role, params, draw, *, state="complete", of=None):
    done = state == "complete"
    scale = {"mean_length": 40.0}
    test = {
        name: Estimate(draw.uniform(0.2, 0.9) * scale.get(name, 1.0), 0.02) for name in OBJECTIVES
    }
    seconds = draw.uniform(20, 40)
    directory = spec.directory / "trials" / str(number)
    return TrialRecord(
        number=number,
        role=role,
        state=state,
        params=params,
        seed=number,
        proposer="model",
        replicate_of=of,
        validation=test if done else {},
        test=test if done else {},
        feasible=draw.random() > 0.2 if done and role == "search" else True,
        cost=Cost(completions=3840, seconds=seconds, cpu_seconds=seconds),
        reason="" if done else NASTY,
        directory=directory,
        checkpoint=directory / "checkpoint-60" if done and role != "untrained" else None,
        started=1000.0 + 15 * number,
        finished=1000.0 + 15 * number + seconds,
    )
