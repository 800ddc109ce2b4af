"""The published numbers: those of the ledger, and nothing of the author's; and the licence."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.settings import HeldOutData
from gdpo_tune.core.trials import Estimate
from gdpo_tune.publishing.card import describe_prompts
from gdpo_tune.publishing.publication import PACKAGE_LICENCE, find_licence
from gdpo_tune.publishing.record import OWN, build_record
from gdpo_tune.results.open_sweep import find_sweep
from tests.support.paths import ROOT
from tests.support.published_sweeps import copy_stored_sweep, make_sweep

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
    fields = {
        *("number", "name", "role", "state", "proposer", "seed", "replicate_of", "feasible"),
        *("ends_at", "params", "parts", "cost", "validation", "test", "rungs"),
    }
    assert all(set(trial) == fields for trial in numbers["trials"])
    assert all(isinstance(value, bool | int | float) for value in numbers["training"].values())
    assert numbers["versions"]["torch"] == "2.13.0"


@pytest.mark.parametrize(
    ("policy", "published"),
    [
        ("embedded", "embedded"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        (f"/home/{CANARY}/model", OWN),
        (f"{CANARY}/model", OWN),  # a directory, though it looks like an id
        (CANARY, OWN),
    ],
)
def test_a_policy_is_named_if_others_can_load_it(swept, tmp_path, monkeypatch, policy, published):
    (tmp_path / CANARY / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    sweep = find_sweep(str(swept.directory))
    record = build_record(replace(sweep, spec=sweep.spec.replace(policy=policy)))
    assert record["policy"] == published


def test_a_card_names_the_splits_of_a_data_set_that_prompts_are_from(swept):
    def describe(**data: Any) -> str:
        return describe_prompts(swept.replace(data=swept.data.replace(source="a/b", **data)))

    assert "huggingface.co/datasets/a/b) (split train): " in describe()
    held_out = {"validation": HeldOutData(split="dev"), "test": HeldOutData(source="c/d")}
    assert " (split train, dev, test): " in describe(**held_out)
    assert " (split train, test): " in describe(test=HeldOutData(split="test"))


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


# The licence


def test_policies_that_ship_have_the_licence_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"].lower() == PACKAGE_LICENCE
    assert find_licence("embedded_math", "", None).identifier == PACKAGE_LICENCE


def test_the_card_of_a_base_on_the_hub_has_its_licence(hub):
    card = "---\nlicense: other\nlicense_name: open-1\nlicense_link: LICENSE\n---\n# Base\n"
    hub.add("model:org/base", {"README.md": card.encode()})
    found = find_licence("org/base", "", None)
    assert (found.identifier, found.name, found.link) == ("other", "open-1", "LICENSE")
    assert found.source == "that of org/base"


TWO = b"---\nlicense: [mit, gpl-3.0]\n---\n"
UNKNOWN = [b"# no metadata", b"---\nlicense: unknown\n---\n", TWO, None]


@pytest.mark.parametrize("card", UNKNOWN)
def test_an_unknown_licence_is_asked_for(hub, card):
    hub.add("model:org/base", {} if card is None else {"README.md": card})
    with pytest.raises(UsageError, match=r"licence of org/base is unknown.*\n.*--license ID"):
        find_licence("org/base", "", None)
    assert find_licence("org/base", "", "mit").identifier == "mit"


def test_a_directory_has_the_licence_of_its_card(tmp_path):
    shutil.copytree(POLICIES["embedded"], tmp_path / "own")
    with pytest.raises(UsageError, match=r"it has no README\.md"):
        find_licence(str(tmp_path / "own"), "", None)
    (tmp_path / "own" / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    assert find_licence(str(tmp_path / "own"), "", None).identifier == "cc-by-4.0"


def test_a_licence_of_a_wrong_form_is_refused():
    with pytest.raises(UsageError, match="--license Apache 2: not an identifier"):
        find_licence("embedded", "", "Apache 2")
