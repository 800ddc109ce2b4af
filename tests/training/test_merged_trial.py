"""Trials that merge policies: evaluated bitwise as loaded, resumable, complete or absent."""

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
from tests.support.training import SETTINGS, ToyTask, run
from tests.support.trials import get_results

pytestmark = pytest.mark.usefixtures("toy")

HELD_OUT = SETTINGS.validation_prompts * SETTINGS.samples_per_prompt
BOTH = pytest.mark.parametrize("model", [PLAIN, LORA], ids=["full", "lora"])


class Killed(BaseException):
    """Stands for the death of the process: no code of the trial handles it."""


@pytest.fixture(scope="module")
def merged(policy, parts, tmp_path_factory):
    """Run the merge of two trials; return its parts, reports and outcome; each is run once."""
    results = {}

    def run_once(model=PLAIN):
        if model not in results:
            chosen = parts({0: 0.5, 1: 0.5}, model)
            directory = tmp_path_factory.mktemp("merged") / "t"
            results[model] = (chosen, *run(configure(policy, directory, chosen, model)))
        return results[model]

    return run_once


@BOTH
def test_trainings_and_merges_have_the_form_of_their_base(policy, trained, tmp_path, model):
    """Version 4 of Transformers reads `rope_theta` and no `rope_parameters`: vllm#42624."""
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
    whole = (part, merged)
    if model.lora_rank:
        assert not (merged / "config.json").exists()
        whole = (tmp_path / "w",)
        whole[0].mkdir()
        merging.write_whole_policy(merged, whole[0], str(base), "", None, 1.0)
    for directory in (part, merged):
        assert json.loads((directory / tokenizer.name).read_text()).items() >= kind.items()
    for directory in whole:
        assert json.loads((directory / "config.json").read_text()) == settings


@BOTH
def test_a_merge_is_evaluated_and_kept(policy, merged, tmp_path, model):
    chosen, reports, outcome = merged(model)
    ((measurement, path),) = reports
    directory = outcome.checkpoint.parent
    assert (measurement.step, path, measurement.validation) == (0, None, outcome.validation)
    assert measurement.metrics["validation/hits"] == outcome.validation["hits"].mean
    assert [(m.step, m.metrics) for m in read_steps(directory)] == [(0, measurement.metrics)]
    assert outcome.checkpoint.name == "checkpoint-0"
    kept = read_checkpoint(outcome.checkpoint)
    assert (kept.step, kept.cost, kept.validation) == (0, measurement.cost, outcome.validation)
    assert measurement.cost.evaluation_completions == HELD_OUT
    assert (outcome.cost.completions, outcome.cost.evaluation_completions) == (0, 2 * HELD_OUT)
    assert not list(directory.glob(".unfinished*"))
    assert (outcome.checkpoint / ADAPTER_CONFIG).is_file() == bool(model.lora_rank)
    assert (outcome.checkpoint / "model.safetensors").is_file() != bool(model.lora_rank)
    if not model.lora_rank:
        direct = read_weights(merge(chosen, tmp_path / "m", policy))
        written = read_weights(outcome.checkpoint)
        assert all(torch.equal(direct[name], written[name]) for name in direct)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_a_merge_that_is_loaded_gives_the_same_metrics_bitwise(
    policy, merged, tmp_path, dtype, rank
):
    model = ModelSettings(lora_rank=rank, dtype=dtype)
    _, _, outcome = merged(model)
    for number, place in enumerate(
        (outcome.checkpoint, shutil.copytree(outcome.checkpoint, tmp_path / "moved"))
    ):
        # an adapter alone is a part
        chosen = (policy, (TrainedPart(place, 1.0),)) if rank else (str(place), ())
        again = configure(chosen[0], tmp_path / f"{number}", chosen[1], model)
        assert get_results(run(again)[1]) == get_results(outcome)
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
    (part,) = chosen = parts({0: 1.0}, LORA, step=1)
    _, outcome = run(configure(policy, tmp_path / "adapter", chosen, LORA))
    name = "adapter_model.safetensors"
    assert os.path.samefile(part.checkpoint / name, outcome.checkpoint / name)


def test_a_merge_that_was_measured_is_only_tested(policy, merged, tmp_path):
    chosen, reports, expected = merged()
    first = reports[0][0]
    known = Rung(0, first.validation, first.cost)
    config = dataclasses.replace(configure(policy, tmp_path, chosen), measured=known)
    again, outcome = run(config)
    assert again == []
    assert get_results(outcome) == get_results(expected)
    assert outcome.cost.evaluation_completions == 2 * HELD_OUT
    assert outcome.environment.keys() == expected.environment.keys()


@pytest.mark.parametrize("reason", [Killed, SystemExit])
def test_a_merge_that_is_stopped_at_its_report_leaves_no_policy_and_starts_over(
    policy, merged, tmp_path, reason
):
    chosen, _, expected = merged()
    config = configure(policy, tmp_path / "t", chosen)
    (config.directory / ".unfinished-draft").mkdir(parents=True)
    (config.directory / ".unfinished-draft" / "model.safetensors").write_bytes(b"half")

    def report(measurement, _):
        assert measurement.has_validation
        raise reason

    with pytest.raises(reason):
        train(config, resume=None, report=report)
    assert {path.name for path in config.directory.iterdir()} == {"steps.jsonl", "writer"}
    assert find_newest_checkpoint(config.directory) is None
    _, outcome = run(config)
    assert get_results(outcome) == get_results(expected)
    assert outcome.cost.evaluation_completions == 2 * HELD_OUT
    assert [m.step for m in read_steps(config.directory)] == [0]
    assert not list(config.directory.glob(".unfinished*"))


@BOTH
def test_a_merge_that_is_killed_in_its_test_evaluation_is_not_merged_again(
    policy, merged, tmp_path, monkeypatch, model
):
    def kill(*_):
        raise Killed

    chosen, _, expected = merged(model)
    config = configure(policy, tmp_path / "t", chosen, model)
    with monkeypatch.context() as patch:
        patch.setattr("gdpo_tune.training.evaluation.write_completions", kill)
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
    assert get_results(outcome) == get_results(expected)
    assert (outcome.checkpoint, outcome.cost.evaluation_completions) == (newest, 2 * HELD_OUT)


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
    chosen = parts({0: 0.5, 1: 0.6})
    ToyTask.opened = ToyTask.closed = 0
    with pytest.raises(TrialFailure, match="must sum to 1"):
        run(configure(policy, tmp_path / "t", chosen))
    assert ToyTask.opened == ToyTask.closed == 1
