"""What of a sweep may leave: no text of a trial or session, and only names that are declared."""

from __future__ import annotations

from gdpo_tune.core.errors import NO_SIGNAL
from gdpo_tune.core.trial_files import KEPT
from gdpo_tune.core.trials import UNCHANGED, TrialRecord
from gdpo_tune.results.public_record import (
    hide_texts,
    list_public_curves,
    list_public_versions,
    make_public,
)
from gdpo_tune.spec import SweepSpec
from tests.support.tuning import load_code_spec

CANARY = "kanarie"


def test_no_text_of_a_trial_leaves():
    """A task may write anything into `environment`, an exception quote anything."""
    texts = {"sandbox": CANARY, "device": CANARY, CANARY: "1", UNCHANGED: CANARY}
    record = TrialRecord(
        3, "search", "failed", {}, 0, "model", reason=CANARY, content=CANARY, environment=texts
    )
    shown = hide_texts(record)
    assert CANARY not in repr(shown)
    assert shown.is_unchanged
    silent = hide_texts(TrialRecord(3, "search", "failed", {}, 0, "model", reason=NO_SIGNAL + "x"))
    assert (silent.had_no_signal, silent.reason) == (True, f"{NO_SIGNAL}text left out")


def test_of_a_session_only_versions_leave():
    packages = {"torch": "2.13.0+cu130", "ray": f"2.0 {CANARY}", CANARY: "1.0", "trl": None}
    provenance = {"packages": packages, "python": "3.11.7", "machine": CANARY, "git": CANARY}
    session = {"ending": CANARY, "provenance": provenance, "incidents": [CANARY]}
    assert list_public_versions(session) == {"torch": "2.13.0+cu130", "python": "3.11.7"}
    assert list_public_versions({}) == {}


def test_curves_that_a_reward_function_logs_stay(tmp_path):
    """`log_metric` may be called with any name."""
    shown = list_public_curves(load_code_spec(tmp_path))
    own = {f"train/{name}" for name in KEPT}
    assert {*own, "validation/correctness", "train/rewards/format/mean"} <= shown
    assert not {"train/kanarie", "train/rewards/kanarie/mean", "validation/kanarie"} & shown


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
