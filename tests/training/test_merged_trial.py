"""Trials that merge policies: evaluated bitwise as loaded, resumable, complete or absent."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil

import pytest
import torch

from gdpo_tune.core.errors import DiskFullError, TrialFailure
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trial_config import TrainedPart
from gdpo_tune.core.trial_files import ADAPTER_CONFIG, read_steps
from gdpo_tune.core.trials import Rung
from gdpo_tune.training import merging, train
from gdpo_tune.training.checkpoints import find_newest_checkpoint, read_checkpoint
from tests.support.merging import LORA, PLAIN, configure, merge, read_weights
from tests.support.training import (
    SETTINGS,
    ToyTask,
    run,
)

pytestmark = pytest.mark.usefixtures("toy")

HELD_OUT = SETTINGS.validation_prompts * SETTINGS.samples_per_prompt


class Killed(BaseException):
    """Stands for the death of the process: no code of the trial handles it."""


@pytest.mark.parametrize("model", [PLAIN, LORA], ids=["full", "lora"])
def test_trainings_and_merges_have_the_form_of_their_base(policy, trained, tmp_path, model):
    """Version 4 of Transformers reads `rope_theta` and no `rope_parameters`: vllm#42624."""
    if model.lora_rank:
        pytest.importorskip("peft")
    base = tmp_path / "base"
    shutil.copytree(policy, base)
    config, tokenizer = (base / name for name in ("config.json", "tokenizer_config.json"))
    settings = json.loads(config.read_text())
    settings |= settings.pop("rope_parameters")
    settings["torch_dtype"] = settings.pop("dtype")
    config.write_text(json.dumps(settings))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), **kind}))
    part = trained(0, model, str(base)) / "checkpoint-2"
    chosen = (TrainedPart(part, 0.5), TrainedPart(part, 0.5))
    merged = run(configure(str(base), tmp_path / "t", chosen, model))[1].checkpoint
    whole = merged
    if model.lora_rank:
        assert not (merged / "config.json").exists()
        whole = tmp_path / "w"
        whole.mkdir()
        merging.write_whole_policy(merged, whole, str(base), "", None, 1.0)
    for directory in (part, merged):
        assert json.loads((directory / tokenizer.name).read_text()).items() >= kind.items()
    for directory in (whole,) if model.lora_rank else (part, merged):
        written = json.loads((directory / "config.json").read_text())
        assert written == settings


@pytest.mark.parametrize("model", [PLAIN, LORA], ids=["full", "lora"])
def test_a_merge_is_evaluated_and_kept(policy, parts, tmp_path, model):
    if model.lora_rank:
        pytest.importorskip("peft")
    chosen = parts({0: 0.5, 1: 0.5}, model)
    config = configure(policy, tmp_path / "t", chosen, model)
    reports, outcome = run(config)
    ((measurement, path),) = reports
    assert (measurement.step, path, measurement.validation) == (0, None, outcome.validation)
    assert measurement.metrics["validation/hits"] == outcome.validation["hits"].mean
    assert [(m.step, m.metrics) for m in read_steps(config.directory)] == [(0, measurement.metrics)]
    assert outcome.checkpoint == tmp_path / "t" / "checkpoint-0"
    kept = read_checkpoint(outcome.checkpoint)
    assert (kept.step, kept.cost, kept.validation) == (0, measurement.cost, outcome.validation)
    assert measurement.cost.evaluation_completions == HELD_OUT
    assert (outcome.cost.completions, outcome.cost.evaluation_completions) == (0, 2 * HELD_OUT)
    assert not list(config.directory.glob(".unfinished*"))
    assert (outcome.checkpoint / ADAPTER_CONFIG).is_file() == bool(model.lora_rank)
    assert (outcome.checkpoint / "model.safetensors").is_file() != bool(model.lora_rank)
    if not model.lora_rank:
        direct = read_weights(merge(chosen, tmp_path / "m", policy))
        written = read_weights(outcome.checkpoint)
        assert all(torch.equal(direct[name], written[name]) for name in direct)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_a_merge_that_is_loaded_gives_the_same_metrics_bitwise(
    policy, parts, tmp_path, dtype, rank
):
    if rank:
        pytest.importorskip("peft")
    model = ModelSettings(lora_rank=rank, dtype=dtype)
    _, outcome = run(configure(policy, tmp_path / "t", parts({0: 0.5, 1: 0.5}, model), model))
    for merged in (outcome.checkpoint, shutil.copytree(outcome.checkpoint, tmp_path / "moved")):
        again = configure(str(merged), tmp_path / "again", (), model)
        if rank:  # an adapter alone
            alone = (TrainedPart(merged, 1.0),)
            again = configure(policy, tmp_path / f"again-{merged.name}", alone, model)
        _, loaded = run(again)
        assert (loaded.validation, loaded.test) == (outcome.validation, outcome.test)
    _, untrained = run(configure(policy, tmp_path / "untrained", (), model))
    assert untrained.test != outcome.test


def test_a_checkpoint_is_linked_and_not_copied(policy, parts, trained, tmp_path):
    before = read_checkpoint(trained(0) / "checkpoint-1")
    _, outcome = run(configure(policy, tmp_path / "t", parts({0: 1.0}, step=1)))
    source, linked = before.path, outcome.checkpoint
    assert os.path.samefile(source / "model.safetensors", linked / "model.safetensors")
    names = {path.name for path in linked.iterdir()}
    assert "complete.json" in names
    assert not names & {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert read_checkpoint(source) == before, "the original stays as it was"
    shutil.rmtree(linked)
    assert read_checkpoint(source) == before


def test_the_adapter_of_a_candidate_is_linked(policy, parts, trained, tmp_path):
    pytest.importorskip("peft")
    (part,) = chosen = parts({0: 1.0}, LORA, step=1)
    _, outcome = run(configure(policy, tmp_path / "t", chosen, LORA))
    name = "adapter_model.safetensors"
    assert os.path.samefile(part.checkpoint / name, outcome.checkpoint / name)


def test_no_policy_stays_of_a_merge_that_is_stopped(policy, parts, tmp_path):
    config = configure(policy, tmp_path / "t", parts({0: 0.5, 1: 0.5}))

    def report(measurement, path):
        assert measurement.has_validation
        raise SystemExit

    with pytest.raises(SystemExit):
        train(config, resume=None, report=report)
    assert {path.name for path in config.directory.iterdir()} == {"steps.jsonl", "writer"}


def test_a_merge_that_was_measured_is_only_tested(policy, parts, tmp_path):
    chosen = parts({0: 0.5, 1: 0.5})
    reports, expected = run(configure(policy, tmp_path / "whole", chosen))
    first = reports[0][0]
    config = configure(policy, tmp_path / "t", chosen)
    known = dataclasses.replace(config, measured=Rung(0, first.validation, first.cost))
    again, outcome = run(known)
    assert again == []
    assert (outcome.validation, outcome.test) == (expected.validation, expected.test)
    assert outcome.cost.evaluation_completions == 2 * HELD_OUT
    assert outcome.environment.keys() == expected.environment.keys()


def test_a_merge_that_is_killed_before_its_report_starts_over(policy, parts, tmp_path):
    chosen = parts({0: 0.5, 1: 0.5})
    _, expected = run(configure(policy, tmp_path / "whole", chosen))
    config = configure(policy, tmp_path / "t", chosen)
    (config.directory / ".unfinished-draft").mkdir(parents=True)
    (config.directory / ".unfinished-draft" / "model.safetensors").write_bytes(b"half")

    def report(*_):
        raise Killed

    with pytest.raises(Killed):
        train(config, resume=None, report=report)
    assert find_newest_checkpoint(config.directory) is None
    _, outcome = run(config)
    assert (outcome.validation, outcome.test) == (expected.validation, expected.test)
    assert outcome.cost.evaluation_completions == 2 * HELD_OUT
    assert [m.step for m in read_steps(config.directory)] == [0]
    assert not list(config.directory.glob(".unfinished*"))


@pytest.mark.parametrize("model", [PLAIN, LORA], ids=["full", "lora"])
def test_a_merge_that_is_killed_in_its_test_evaluation_is_not_merged_again(
    policy, parts, tmp_path, monkeypatch, model
):
    if model.lora_rank:
        pytest.importorskip("peft")
    chosen = parts({0: 0.5, 1: 0.5}, model)
    _, expected = run(configure(policy, tmp_path / "whole", chosen, model))
    config = configure(policy, tmp_path / "t", chosen, model)
    with monkeypatch.context() as patch:
        patch.setattr("gdpo_tune.training.evaluation.write_completions", raise_killed)
        with pytest.raises(Killed):
            run(config)
    newest = find_newest_checkpoint(config.directory)
    assert newest == config.directory / "checkpoint-0"
    # Neither the parts nor a second evaluation on validation prompts are needed.
    moved = tuple(TrainedPart(tmp_path / "gone", part.weight) for part in chosen)
    reports, outcome = run(dataclasses.replace(config, parts=moved), resume=newest)
    ((again, path),) = reports
    assert (again.step, dict(again.metrics), path) == (0, {}, newest)
    assert again.validation == expected.validation
    assert (outcome.validation, outcome.test) == (expected.validation, expected.test)
    assert (outcome.checkpoint, outcome.cost.evaluation_completions) == (newest, 2 * HELD_OUT)


def raise_killed(*_):
    raise Killed


@pytest.mark.parametrize("failing", ["save_file", "split_torch_state_dict_into_shards"])
def test_a_full_disk_ends_a_merge_in_one_line_and_leaves_nothing(
    policy, parts, tmp_path, monkeypatch, failing
):
    config = configure(policy, tmp_path / "t", parts({0: 0.5, 1: 0.5}))

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(merging, failing, fail)
        with pytest.raises(DiskFullError, match="no space left for a merged policy in "):
            run(config)
    assert {path.name for path in config.directory.iterdir()} == {"writer"}
    assert run(config)[1].checkpoint is not None


def test_the_task_is_closed_after_a_refused_merge(policy, parts, tmp_path):
    ToyTask.opened = ToyTask.closed = 0
    with pytest.raises(TrialFailure, match="must sum to 1"):
        run(configure(policy, tmp_path / "t", parts({0: 0.5, 1: 0.6})))
    assert ToyTask.opened == ToyTask.closed == 1
