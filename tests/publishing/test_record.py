"""The published numbers: those of the ledger, and nothing about the author's machine or data."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gdpo_tune.core.trials import Estimate
from gdpo_tune.publishing.record import OWN, build_record
from gdpo_tune.results.open_sweep import find_sweep
from tests.support.published_sweeps import MACHINE, PRIVATE, copy_stored_sweep, make_sweep

CANARY = "kanarie"
TASK = """
from gdpo_tune.rewards import answer, block_format, length
from gdpo_tune.tasks.custom import RewardFunctionTask

class Mine(RewardFunctionTask):
    reward_funcs = {"correctness": answer, "format": block_format, "length": length}

    def rows(self):
        return [{"prompt": f"{n} + 1", "answer": str(n + 1)} for n in range(20000)]
"""


def test_the_numbers_are_those_of_the_ledger_bit_for_bit(tmp_path):
    sweep = find_sweep(str(copy_stored_sweep(tmp_path / "runs")))
    numbers = json.loads(json.dumps(build_record(sweep), allow_nan=False))
    assert numbers["front"] == [member.name for member in sweep.front.members]
    assert numbers["knee"] == sweep.front.knee.name
    assert numbers["hypervolume"]["value"] == sweep.front.hypervolume
    assert len(numbers["trials"]) == len(sweep.records)
    for trial, record in zip(numbers["trials"], sweep.records, strict=True):
        assert (trial["number"], trial["role"]) == (record.number, record.role)
        assert trial["params"] == record.trained_params
        assert [part["weight"] for part in trial["parts"]] == [p.weight for p in record.parts]
        for split in ("validation", "test"):
            means = {name: e["mean"] for name, e in trial[split].items()}
            assert means == {name: e.mean for name, e in getattr(record, split).items()}
        assert trial["cost"]["completions"] == record.cost.completions


def test_a_field_leaves_only_if_it_is_listed(swept):
    """A new field of a trial or of the file is published only once somebody puts it here."""
    numbers = build_record(find_sweep(str(swept.directory)))
    assert set(numbers) == {
        *("task", "policy", "objectives", "training", "lora_rank", "versions", "hypervolume"),
        *("front", "knee", "trials"),
    }
    assert all(
        set(trial)
        == {
            *("number", "name", "role", "state", "proposer", "seed", "replicate_of", "feasible"),
            *("ends_at", "params", "parts", "cost", "validation", "test", "rungs"),
        }
        for trial in numbers["trials"]
    )
    assert all(isinstance(value, bool | int | float) for value in numbers["training"].values())


def test_no_word_about_the_authors_machine_is_published(swept):
    journal = (swept.directory / "ledger.journal").read_text()
    assert all(word in journal for word in ("gpu-box-17", MACHINE, "anna.b", "10.1.2.3"))
    text = json.dumps(build_record(find_sweep(str(swept.directory))))
    found = [w for w in (*PRIVATE, str(swept.directory), swept.storage) if w in text]
    assert not found


def test_texts_and_names_that_nobody_declared_stay_behind(swept):
    sweep = find_sweep(str(swept.directory))
    unknown = {CANARY: Estimate(0.5, 0.1)}

    def plant(record: Any) -> Any:
        params = {**record.params, CANARY: 1.0, "normalization": CANARY}
        return replace(
            record,
            params=params,
            reason=CANARY,
            content=CANARY,
            request=CANARY,
            address=f"s3://{CANARY}",
            environment={CANARY: CANARY},
            validation={**record.validation, **unknown},
            test={**record.test, **unknown},
            rungs=tuple(replace(rung, validation=unknown) for rung in record.rungs),
        )

    sessions = [{"ending": CANARY, "provenance": {"packages": {"torch": CANARY, CANARY: "1"}}}]
    planted = replace(sweep, records=[*map(plant, sweep.records)], sessions=sessions)
    assert CANARY not in json.dumps(build_record(planted))


@pytest.mark.parametrize("key", ["policy", "task"])
def test_a_policy_or_task_of_its_authors_own_has_no_name(tmp_path, key):
    (tmp_path / CANARY).mkdir()
    (tmp_path / CANARY / "mine.py").write_text(TASK)
    values = {"policy": f"{tmp_path}/{CANARY}", "task": f"{tmp_path}/{CANARY}/mine.py:Mine"}
    numbers = build_record(find_sweep(str(make_sweep(tmp_path, **{key: values[key]}).directory)))
    assert numbers[key] == OWN
    assert CANARY not in json.dumps(numbers)
