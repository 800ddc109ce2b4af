"""Merges of trained policies: closed forms, refusals, and trials that evaluate a merge."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gdpo_tune.core.errors import DiskFullError, TrialFailure
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.steps import read_steps
from gdpo_tune.core.trials import Cost, TrainedPart
from gdpo_tune.policies.initial_policy import read_initial_policy
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import merging, train, worker_cache
from gdpo_tune.training.checkpoints import find_newest_checkpoint, read_checkpoint, write_checkpoint
from gdpo_tune.training.lora import ADAPTER
from gdpo_tune.training.merging import check_parts, write_merge
from tests.support.training import (
    SETTINGS,
    ToyTask,
    build_trial_config,
    register_toy_task,
    write_policy,
)

PLAIN, LORA = ModelSettings(), ModelSettings(lora_rank=4)
QUICK = dataclasses.replace(SETTINGS, steps=2, checkpoint_every=1)
HELD_OUT = SETTINGS.validation_prompts * SETTINGS.samples_per_prompt


class Killed(BaseException):
    """Stands for the death of the process: no code of the trial handles it."""


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    register_toy_task(monkeypatch)
    worker_cache.release_worker_cache()
    yield
    worker_cache.release_worker_cache()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def trained(policy, tmp_path_factory):
    """Return the directory of a trial that trained the policy; each is trained once."""
    directories = {}

    def train_once(seed: int, model: ModelSettings = PLAIN, policy: str = policy) -> Path:
        key = seed, model, policy
        if key not in directories:
            directories[key] = tmp_path_factory.mktemp("trained") / "t"
            config = build_trial_config(policy, directories[key], seed=seed, settings=QUICK)
            config = dataclasses.replace(config, model=model, keep_at=(1,))
            train(config, resume=None, report=lambda *_: None)
        return directories[key]

    return train_once


@pytest.fixture
def parts(trained):
    """Return parts by seed and weight; the weight of one alone is 1."""

    def build(shares: dict[int, float], model: ModelSettings = PLAIN, step: int = 2):
        return tuple(
            TrainedPart(trained(seed, model) / f"checkpoint-{step}", share)
            for seed, share in shares.items()
        )

    return build


def configure(policy, directory: Path, parts, model: ModelSettings = PLAIN):
    config = build_trial_config(policy, directory, settings=QUICK)
    return dataclasses.replace(config, train=False, parts=parts, model=model)


def run(config, resume=None):
    reports = []
    outcome = train(config, resume=resume, report=lambda m, path: reports.append((m, path)))
    return reports, outcome


def merge(parts, directory: Path, policy: str) -> Path:
    directory.mkdir(parents=True)
    check_parts(parts)
    write_merge(parts, directory, lambda: load_policy(policy)[0])
    return directory


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    weights = [load_file(path) for path in sorted(directory.glob("model*.safetensors"))]
    return {name: tensor for file in weights for name, tensor in file.items()}


def write_copy(part: TrainedPart, directory: Path, change) -> TrainedPart:
    """Write a complete checkpoint with the files of a part, changed."""

    def fill(target):
        shutil.copytree(
            part.checkpoint, target, dirs_exist_ok=True, ignore=lambda *_: {"complete.json"}
        )
        change(target)

    return dataclasses.replace(part, checkpoint=write_checkpoint(directory, 2, Cost(), fill).path)


def edit_json(name: str, **values):
    def change(directory: Path):
        content = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**content, **values}))

    return change


def edit_weights(edit):
    def change(directory: Path):
        weights = load_file(directory / "model.safetensors")
        edit(weights)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    return change


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.25, 0.75), (0.2, 0.3, 0.5), (1.5, -0.5)])
def test_weights_are_interpolated(policy, parts, tmp_path, shares):
    chosen = parts(dict(enumerate(shares)))
    merged = read_weights(merge(chosen, tmp_path / "m", policy))
    sources = [read_weights(part.checkpoint) for part in chosen]
    assert merged.keys() == sources[0].keys()
    for name, tensor in merged.items():
        expected = sum(s * w[name].double() for s, w in zip(shares, sources, strict=True))
        torch.testing.assert_close(tensor, expected.float(), atol=1e-7, rtol=1e-6)
        assert not torch.equal(tensor, sources[0][name])
    model, tokenizer = load_policy(str(tmp_path / "m"))
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied weights stay tied"
    assert len(tokenizer) == 29


def test_a_merge_of_a_policy_with_itself_is_that_policy(policy, parts, tmp_path):
    (part,) = parts({0: 0.5})
    merged = read_weights(merge((part, part), tmp_path / "m", policy))
    theirs = read_weights(part.checkpoint)
    assert all(torch.equal(merged[name], theirs[name]) for name in theirs)


def test_a_merge_is_a_policy_without_the_state_of_a_training(policy, parts, trained, tmp_path):
    directory = merge(parts({0: 0.5, 1: 0.5}, step=1), tmp_path / "m", policy)
    assert {path.name for path in directory.iterdir()} == {
        "config.json", "generation_config.json", "initial_policy.json", "model.safetensors",
        "prompts.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert read_initial_policy(directory) == read_initial_policy(trained(0) / "checkpoint-2") != ""


def test_a_large_merge_is_written_to_several_files(policy, parts, tmp_path, monkeypatch):
    chosen = parts({0: 0.5, 1: 0.5})
    whole = read_weights(merge(chosen, tmp_path / "whole", policy))
    monkeypatch.setattr(merging, "LARGEST_FILE", "20KB")
    directory = merge(chosen, tmp_path / "m", policy)
    assert len(list(directory.glob("model-*-of-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)
    again = tuple(
        write_copy(part, tmp_path / str(i), lambda target: replace_weights(directory, target))
        for i, part in enumerate(chosen)
    )
    read = read_weights(merge(again, tmp_path / "again", policy))
    assert all(torch.equal(read[name], whole[name]) for name in whole)


def replace_weights(source: Path, target: Path) -> None:
    (target / "model.safetensors").unlink()
    for path in source.glob("model*"):
        shutil.copy(path, target)


def test_the_result_has_the_type_of_the_first_part_and_is_rounded_once(policy, parts, tmp_path):
    first, second = parts({0: 0.3, 1: 0.7})

    def halve(weights):
        weights.update({name: tensor.bfloat16() for name, tensor in weights.items()})

    coarse = write_copy(first, tmp_path / "coarse", edit_weights(halve))
    merged = read_weights(merge((coarse, second), tmp_path / "m", policy))
    ours, theirs = read_weights(coarse.checkpoint), read_weights(second.checkpoint)
    for name, tensor in merged.items():
        expected = 0.3 * ours[name].float() + 0.7 * theirs[name]
        assert torch.equal(tensor, expected.bfloat16())


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(4, 4), (4, 2)])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.2, 0.8)])
def test_a_merge_of_adapters_is_the_merge_of_full_weights(policy, trained, tmp_path, ranks, shares):
    pytest.importorskip("peft")
    chosen = tuple(
        TrainedPart(trained(seed, ModelSettings(lora_rank=rank)) / "checkpoint-2", share)
        for seed, (rank, share) in enumerate(zip(ranks, shares, strict=True))
    )
    directory = merge(chosen, tmp_path / "m", policy)
    merged, before = read_weights(directory), read_weights(Path(policy))
    sources = [read_weights(part.checkpoint) for part in chosen]
    for name, tensor in merged.items():
        expected = sum(s * w[name] for s, w in zip(shares, sources, strict=True))
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=0)
    changed = [name for name in merged if not torch.equal(merged[name], before[name])]
    assert len(changed) == 14, "every linear module of two layers"
    config = json.loads((directory / ADAPTER / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (sum(ranks), sum(ranks))
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(load_policy(policy)[0], str(directory / ADAPTER))
    state = adapted.merge_and_unload().state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(state[name], tensor, atol=1e-6, rtol=0)


def test_a_merge_of_adapters_can_be_merged_again(policy, parts, tmp_path):
    pytest.importorskip("peft")
    chosen = parts({0: 0.5, 1: 0.5}, LORA)
    half = write_checkpoint(
        tmp_path / "half", 0, Cost(), lambda target: write_into(chosen, target, policy)
    )
    (third,) = parts({2: 0.5}, LORA)
    merged = read_weights(merge((TrainedPart(half.path, 0.5), third), tmp_path / "m", policy))
    expected = read_weights(
        merge(parts({0: 0.25, 1: 0.25, 2: 0.5}, LORA), tmp_path / "direct", policy)
    )
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)


def write_into(parts, target: Path, policy: str) -> None:
    write_merge(parts, target, lambda: load_policy(policy)[0])


def test_middle_checkpoints_with_adapters_alone_are_merged(policy, parts, tmp_path):
    pytest.importorskip("peft")
    chosen = parts({0: 0.5, 1: 0.5}, LORA, step=1)
    assert not (chosen[0].checkpoint / "config.json").exists()
    directory = merge(chosen, tmp_path / "m", policy)
    last = merge(parts({0: 1.0}, LORA), tmp_path / "last", policy)
    assert {path.name for path in directory.iterdir()} == {path.name for path in last.iterdir()}
    single = merge(parts({0: 1.0}, LORA, step=1), tmp_path / "single", policy)
    assert load_policy(str(single))[0].num_parameters() > 0
    assert not torch.equal(
        read_weights(single)["model.layers.0.mlp.up_proj.weight"],
        read_weights(directory)["model.layers.0.mlp.up_proj.weight"],
    )


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            edit_weights(lambda w: w.update({"model.norm.weight": torch.ones(31)})),
            r"weight model.norm.weight is 32 in \S+ and 31 in \S+: merge policies that",
        ),
        (
            edit_weights(lambda w: w.pop("model.norm.weight")),
            r"checkpoint-2 has a weight model.norm.weight and \S+ has none: merge policies",
        ),
        (
            edit_json("config.json", num_attention_heads=8),
            r"differ in their architecture \(num_attention_heads in config.json\)",
        ),
        (
            edit_json("tokenizer.json", added_tokens=[]),
            r"differ in their tokenizer \(added_tokens in tokenizer.json\)",
        ),
        (
            edit_json("prompts.json", instructions=True),
            r"differ in their prompt format \(instructions in prompts.json\)",
        ),
        (
            edit_json("initial_policy.json", sha256="f00"),
            r"differ in their initial policy \(sha256 in initial_policy.json\)",
        ),
    ],
)
def test_policies_that_do_not_fit_are_refused(parts, tmp_path, change, message):
    first, second = parts({0: 0.5, 1: 0.5})
    other = write_copy(second, tmp_path / "other", change)
    with pytest.raises(TrialFailure, match=message) as caught:
        check_parts((first, other))
    assert "\n" not in str(caught.value)


def test_two_initial_policies_of_one_architecture_are_refused(trained, parts, policy, tmp_path):
    model, tokenizer = load_policy(policy)
    with torch.no_grad():
        model.model.norm.weight += 0.1
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    (part,) = parts({0: 0.5})
    other = TrainedPart(trained(0, policy=str(tmp_path / "other")) / "checkpoint-2", 0.5)
    with pytest.raises(TrialFailure, match="differ in their initial policy"):
        check_parts((part, other))
    config = configure(policy, tmp_path / "t", (dataclasses.replace(other, weight=1.0),))
    with pytest.raises(TrialFailure, match="from another initial policy than this sweep's"):
        run(config)


def test_older_checkpoints_that_record_no_initial_policy_can_be_merged(parts, tmp_path):
    first, second = parts({0: 0.5, 1: 0.5})
    older = write_copy(
        second, tmp_path / "older", lambda path: (path / "initial_policy.json").unlink()
    )
    check_parts((first, older))


def test_integers_that_differ_are_refused(policy, parts, tmp_path):
    chosen = [
        write_copy(
            part,
            tmp_path / str(number),
            edit_weights(lambda w, n=number: w.update(count=torch.tensor([n]))),
        )
        for number, part in enumerate(parts({0: 0.5, 1: 0.5}))
    ]
    merged = read_weights(merge([chosen[0]] * 2, tmp_path / "same", policy))
    assert merged["count"].tolist() == [0]
    with pytest.raises(TrialFailure, match="count has no fractions and differs between"):
        merge(chosen, tmp_path / "m", policy)


def test_an_adapter_and_full_weights_are_refused(parts):
    pytest.importorskip("peft")
    (full,), (adapter,) = parts({0: 0.5}), parts({0: 0.5}, LORA)
    for chosen in ((full, adapter), (adapter, full)):
        message = f"{adapter.checkpoint} is an adapter and {full.checkpoint} has weights of its own"
        with pytest.raises(TrialFailure, match=re.escape(message)):
            check_parts(chosen)


def test_weights_that_do_not_sum_to_1_are_refused(parts):
    with pytest.raises(TrialFailure, match=r"must sum to 1: 0.5 \+ 0.4 = 0.9"):
        check_parts(parts({0: 0.5, 1: 0.4}))
    with pytest.raises(TrialFailure, match="no weight"):
        check_parts(())


def test_a_missing_or_damaged_checkpoint_is_refused(policy, parts, tmp_path):
    first, second = parts({0: 0.5, 1: 0.5})
    missing = dataclasses.replace(second, checkpoint=tmp_path / "checkpoint-9")
    with pytest.raises(TrialFailure, match="checkpoint-9 is incomplete"):
        check_parts((first, missing))
    damaged = write_copy(second, tmp_path / "damaged", lambda _: None)
    content = bytearray((damaged.checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged.checkpoint / "model.safetensors").write_bytes(content)
    config = configure(policy, tmp_path / "t", (first, damaged))
    with pytest.raises(TrialFailure, match=r"is damaged \(model.safetensors has other content\)"):
        run(config)
    assert not config.directory.exists()


# --- trials ---------------------------------------------------------------------------------------


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
    assert (outcome.checkpoint / ADAPTER).is_dir() == bool(model.lora_rank)
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
        _, loaded = run(configure(str(merged), tmp_path / "again", (), model))
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


def test_the_end_of_a_trial_with_an_adapter_is_linked_with_it(policy, parts, tmp_path):
    pytest.importorskip("peft")
    _, outcome = run(configure(policy, tmp_path / "t", parts({0: 1.0}, LORA), LORA))
    assert (outcome.checkpoint / ADAPTER / "adapter_model.safetensors").is_file()


def test_no_policy_stays_of_a_merge_that_is_stopped(policy, parts, tmp_path):
    config = configure(policy, tmp_path / "t", parts({0: 0.5, 1: 0.5}))

    def report(measurement, path):
        assert measurement.has_validation
        raise SystemExit

    with pytest.raises(SystemExit):
        train(config, resume=None, report=report)
    assert {path.name for path in config.directory.iterdir()} == {"steps.jsonl", "writer"}


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
