"""What of a sweep may leave: everything that no rule names stays behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gdpo_tune.core.errors import NO_SIGNAL
from gdpo_tune.core.trial_files import KEPT
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger.opening import open_for_reading
from gdpo_tune.ledger.requests import ACTIONS
from gdpo_tune.results.public_record import CUT, PublicFilter, make_public
from gdpo_tune.spec import SweepSpec
from tests.support.published_sweeps import make_sweep
from tests.support.tuning import load_code_spec

CANARY = "kanarie"


@pytest.fixture
def public(tmp_path):
    return PublicFilter(load_code_spec(tmp_path, []))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", ""),
        ("kanarie", CUT),
        ("ValueError: cannot grade '</think>kanarie' of kanarie", "ValueError"),
        ("KanarieError: kanarie", CUT),
        ("FileNotFoundError: /home/anna/kanarie.bin (trainer.py, line 12)",
         "FileNotFoundError; trainer.py, line 12"),
        ("reward format raised for 75% of 8 completions, and at most 50% may fail; first: "
         "KeyError: 'kanarie' (kanarie.py, line 3)",
         "reward format; raised for 75% of 8 completions; KeyError"),
        ("reward kanarie raised for 75% of 8 completions", "raised for 75% of 8 completions"),
        ("loss is nan at step 3", "loss is nan at step 3"),
        ("kanarie of completion 3 is inf in training", CUT),
        ("format of completion 3 is inf kanarie", "format of completion 3 is inf"),
        (f"{NO_SIGNAL}every advantage was 0 in 10 steps in a row: kanarie is 1",
         f"{NO_SIGNAL}every advantage was 0 in 10 steps in a row"),
        ("out of memory: lower kanarie (Tried to allocate 2 GiB)", "out of memory"),
        ("stopped at the wide rung: others there span the front further: kanarie",
         "stopped at the wide rung: others there span the front further"),
        ("dominated on validation prompts by 7@40, merge-27",
         "dominated on validation prompts by 7@40, merge-27"),
        ("stopped by kanarie\nb", "stopped by someone"),
        ("after task kanarie.py and data a.csv changed (2026-11-25 12:00:00)",
         "after task changed (2026-11-25 12:00:00)"),
        ("data/kanarie.jsonl: 200 rows, 160 distinct prompts (train 112); 3 left out (kanarie)",
         "200 rows, 160 distinct prompts; 3 left out"),
        ("gp (16 trials of 5 parameters: kanarie)", "gp"),
    ],
)  # fmt: skip
def test_a_free_text_keeps_phrases_of_the_package_alone(public, text, kept):
    """`</think>` is no path, so it is not turned into `<think>` either."""
    assert public.cut(text) == kept
    assert public.cut(kept) == kept


def plant(value: Any) -> Any:
    """Return JSON with a canary in every text, and under a new name in every mapping."""
    if isinstance(value, str):
        return f"{value} {CANARY}"
    if isinstance(value, Mapping):
        planted = {name: plant(each) for name, each in value.items()}
        return {**planted, CANARY: CANARY, f"{CANARY}_number": 1, f"test/{CANARY}": 0.5}
    return [plant(each) for each in value] if isinstance(value, list) else value


def test_a_field_that_nobody_classified_does_not_leave(tmp_path):
    """Of every record that a ledger holds, at any depth."""
    spec = make_sweep(tmp_path)
    public, journal = PublicFilter(spec), open_for_reading(spec)
    records = list(journal.read_logs(0))
    journal.close()
    assert len(records) > 20
    for record in records:
        selected = public.select_record(plant(record))
        assert CANARY not in json.dumps(selected)
        for name in ("user_attr", "system_attr"):
            if name in record:
                unknown = {**record, name: {"warnings:0": "text", "notes": {"a": 1}}}
                assert public.select_record(unknown) is None


def test_texts_of_a_trial_and_metrics_of_its_steps(public):
    """A task may write anything into `environment`, a reward function log under any name."""
    environment = {
        "sandbox": "full",
        "prompts_left_out.train": "2 of 128",
        "resumed": "kanarie is damaged: the trial resumes from checkpoint-20",
        "device": "NVIDIA H100 80GB HBM3, 80 GiB, bfloat16",
        "versions": "torch 2.11.0+cu130, trl 1.16.0, vllm 0.24.0, driver 580.159.03",
        "vllm_runner": "V2",
        "note": CANARY,
        CANARY: "1",
    }
    record = TrialRecord(
        3, "search", "failed", {}, 0, "model", reason=CANARY, environment=environment
    )
    shown = public.select_trial(record)
    assert shown.reason == CUT
    assert shown.environment == {
        "sandbox": "full",
        "prompts_left_out.train": "2 of 128",
        "resumed": "the trial resumes from checkpoint-20",
        "device": "NVIDIA H100 80GB HBM3, 80 GiB, bfloat16",
        "versions": "torch 2.11.0+cu130, trl 1.16.0, vllm 0.24.0, driver 580.159.03",
        "vllm_runner": "V2",
    }
    hidden = {"device": CANARY, "versions": f"torch {CANARY}", "vllm_runner": f"V2 {CANARY}"}
    assert public.select(hidden) == {"device": "", "versions": "", "vllm_runner": ""}
    own = {f"train/{name}": 0.5 for name in KEPT}
    own |= {"validation/correctness": 1.0, "train/rewards/format/mean": 1.0}
    custom = {"train/kanarie": 1.0, "train/rewards/kanarie/mean": 1.0, "validation/kanarie": 1.0}
    assert public.select({**own, **custom}) == own


@pytest.mark.parametrize("action", [*ACTIONS, "kanarie"])
def test_every_action_of_a_request_leaves(public, action):
    kept = public.select({"action": action, "author": "anna"})
    assert kept == {"action": action if action in ACTIONS else "", "author": "someone"}


def test_every_key_of_a_sweep_file_is_classified(tmp_path):
    """A new key leaves only once somebody has put it here, or into `make_public`."""
    kept = {
        *("name", "task", "policy", "scoring", "objectives", "constraints", "space", "enqueue"),
        *("keep", "training", "model", "data", "sandbox", "rollout", "search", "resources"),
        "start",
    }
    emptied = {"tracking", "notify", "storage"}
    assert set(SweepSpec.model_fields) == kept | emptied
    data = tmp_path / CANARY / "kanarie.jsonl.gz"
    data.parent.mkdir()
    data.touch()
    keys = [f"data.source={data}", "data.layout=mbpp", "tracking.experiment=kanarie"]
    public = make_public(load_code_spec(tmp_path / CANARY, keys))
    assert CANARY not in public.dump_yaml()
    assert public.data.source == "data.jsonl.gz"
    assert set(public.data.model_dump()) == {
        *("source", "layout", "columns", "prompt_template", "config", "split", "validation"),
        *("test", "max_prompt_length"),
    }
    assert set(public.model.model_dump()) == {
        *("dtype", "gradient_checkpointing", "dropout", "lora_rank", "lora_alpha", "lora_targets"),
        *("revision", "instructions", "chat_template_kwargs", "template_date", "shared_prompts"),
        "attention",
    }
