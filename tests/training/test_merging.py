"""Merges of trained policies: closed forms, and parts that are refused."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trial_config import TrainedPart
from gdpo_tune.core.trial_files import ADAPTER
from gdpo_tune.core.trials import Cost
from gdpo_tune.policies.adapters import hash_policy, read_initial_policy
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import merging
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.training.merging import check_parts, write_merge
from tests.support import merging as support
from tests.support.merging import LORA, load_weights, merge, merge_adapters, read_weights
from tests.support.training import run

pytestmark = pytest.mark.usefixtures("toy")


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


def assert_same(ours, theirs):
    assert ours.keys() >= theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def add_weights(shares, sources, name):
    return sum(share * source[name] for share, source in zip(shares, sources, strict=True))


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.25, 0.75), (0.2, 0.3, 0.5), (1.5, -0.5)])
def test_weights_are_interpolated(policy, parts, tmp_path, shares):
    chosen = parts(dict(enumerate(shares)))
    merged = read_weights(merge(chosen, tmp_path / "m", policy))
    sources = [read_weights(part.checkpoint) for part in chosen]
    assert merged.keys() == sources[0].keys()
    exact = [{name: tensor.double() for name, tensor in source.items()} for source in sources]
    for name, tensor in merged.items():
        assert_close(tensor, add_weights(shares, exact, name).float(), atol=1e-7, rtol=1e-6)
        assert not torch.equal(tensor, sources[0][name])
    model, tokenizer = load_policy(str(tmp_path / "m"))
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied weights stay tied"
    assert len(tokenizer) == 29


def test_a_merge_of_a_policy_with_itself_is_that_policy(policy, parts, tmp_path):
    (part,) = parts({0: 0.5})
    merged = read_weights(merge((part, part), tmp_path / "m", policy))
    assert_same(merged, read_weights(part.checkpoint))


ADAPTER_FILES = {
    "adapter_config.json", "adapter_model.safetensors", "generation_config.json",
    "initial_policy.json", "prompts.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
FILES = ADAPTER_FILES - {"adapter_config.json", "adapter_model.safetensors"}
FILES |= {"config.json", "model.safetensors"}


def list_names(directory):
    return {path.name for path in directory.iterdir()} - {"README.md"}


def test_a_merge_is_a_policy_without_the_state_of_a_training(policy, parts, trained, tmp_path):
    directory = merge(parts({0: 0.5, 1: 0.5}, step=1), tmp_path / "m", policy)
    assert list_names(directory) == FILES
    assert read_initial_policy(directory) == read_initial_policy(trained(0) / "checkpoint-2") != ""


def test_a_large_merge_is_written_to_several_files(policy, parts, tmp_path, monkeypatch):
    chosen = parts({0: 0.5, 1: 0.5})
    whole = read_weights(merge(chosen, tmp_path / "whole", policy))
    monkeypatch.setattr(merging, "LARGEST_FILE", "20KB")
    directory = merge(chosen, tmp_path / "m", policy)
    assert len(list(directory.glob("model-*-of-*.safetensors"))) > 2
    assert_same(AutoModelForCausalLM.from_pretrained(directory).state_dict(), whole)

    def replace_weights(target: Path) -> None:
        (target / "model.safetensors").unlink()
        for path in directory.glob("model*"):
            shutil.copy(path, target)

    again = tuple(
        support.write_copy(part, tmp_path / str(i), replace_weights)
        for i, part in enumerate(chosen)
    )
    assert_same(read_weights(merge(again, tmp_path / "again", policy)), whole)


def test_the_result_has_the_type_of_the_first_part_and_is_rounded_once(policy, parts, tmp_path):
    first, second = parts({0: 0.3, 1: 0.7})

    def halve(weights):
        weights.update({name: tensor.bfloat16() for name, tensor in weights.items()})

    coarse = support.write_copy(first, tmp_path / "coarse", edit_weights(halve))
    merged = read_weights(merge((coarse, second), tmp_path / "m", policy))
    ours, theirs = read_weights(coarse.checkpoint), read_weights(second.checkpoint)
    for name, tensor in merged.items():
        expected = 0.3 * ours[name].float() + 0.7 * theirs[name]
        assert torch.equal(tensor, expected.bfloat16())


@pytest.mark.parametrize("ranks", [(4, 4), (4, 2)])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.2, 0.8)])
def test_a_merge_of_adapters_is_the_merge_of_full_weights(policy, trained, tmp_path, ranks, shares):
    peft = pytest.importorskip("peft")
    chosen = tuple(
        TrainedPart(trained(seed, ModelSettings(lora_rank=rank)) / "checkpoint-2", share)
        for seed, (rank, share) in enumerate(zip(ranks, shares, strict=True))
    )
    directory = merge(chosen, tmp_path / "m", policy)
    merged, before = read_weights(directory), read_weights(Path(policy))
    sources = [load_weights(part.checkpoint) for part in chosen]
    for name, tensor in merged.items():
        assert_close(tensor, add_weights(shares, sources, name), atol=1e-6, rtol=0)
    assert_same(load_weights(merge_adapters(chosen, tmp_path / "alone")), merged)
    changed = [name for name in merged if not torch.equal(merged[name], before[name])]
    assert len(changed) == 14, "every linear module of two layers"
    config = json.loads((directory / ADAPTER / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (sum(ranks), sum(ranks))
    adapted = peft.PeftModel.from_pretrained(load_policy(policy)[0], str(directory / ADAPTER))
    state = adapted.merge_and_unload().state_dict()
    for name, tensor in merged.items():
        assert_close(state[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shares", [(1.0,), (0.3, 0.7)])
def test_a_merge_of_adapters_is_an_adapter_and_no_more(parts, tmp_path, shares):
    directory = merge_adapters(parts(dict(enumerate(shares)), LORA), tmp_path / "m")
    assert list_names(directory) == ADAPTER_FILES
    saved = load_file(directory / "adapter_model.safetensors")
    ranks = {w.shape[0] for name, w in saved.items() if ".lora_A." in name}
    assert ranks == {4 * len(shares)}
    assert sum(path.stat().st_size for path in directory.glob("*.safetensors")) < 60_000


def test_adapters_that_computed_in_bfloat16_are_rounded_to_it_once(policy, parts, tmp_path):
    coarse = LORA.replace(dtype="bfloat16")
    chosen = parts({0: 0.3, 1: 0.7}, coarse)

    def list_types(directory):
        return {w.dtype for w in load_file(directory / "adapter_model.safetensors").values()}

    assert [list_types(part.checkpoint) for part in chosen] == [{torch.bfloat16}] * 2
    (middle,) = parts({0: 1.0}, coarse, step=1)
    assert list_types(middle.checkpoint) == {torch.float32}, "a training continues from it"
    merged = load_weights(merge_adapters(chosen, tmp_path / "m"))
    sources = [load_weights(part.checkpoint) for part in chosen]
    for name, before in load_weights(Path(policy)).items():
        expected = add_weights((0.3, 0.7), sources, name)
        change = (expected - before).abs().max()
        assert (merged[name] - expected).abs().max() <= 2**-7 * change + 1e-7


@pytest.fixture
def write_whole(policy):
    """Write the merge of parts as a whole policy, a checkpoint of a step; return a part of it."""

    def write(parts, directory, step, share):
        def fill(target):
            write_merge(parts, target, lambda: load_policy(policy)[0])

        return TrainedPart(write_checkpoint(directory, step, Cost(), fill).path, share)

    return write


def test_whole_policies_of_earlier_trials_merge_as_their_adapters(parts, tmp_path, write_whole):
    chosen = parts({0: 0.5, 1: 0.5}, LORA)
    older = [write_whole((p,), tmp_path / str(i), 2, 0.5) for i, p in enumerate(chosen)]
    assert (older[0].checkpoint / "model.safetensors").is_file()
    assert (older[0].checkpoint / ADAPTER / "adapter_config.json").is_file()
    expected = load_weights(merge_adapters(chosen, tmp_path / "new"))
    for name, pair in {"older": tuple(older), "mixed": (older[0], chosen[1])}.items():
        directory = merge_adapters(pair, tmp_path / name)
        assert list_names(directory) == ADAPTER_FILES
        assert_same(load_weights(directory), expected)


def test_a_merge_of_adapters_can_be_merged_again(policy, parts, tmp_path, write_whole):
    half = write_whole(parts({0: 0.5, 1: 0.5}, LORA), tmp_path / "half", 0, 0.5)
    merged = read_weights(merge((half, *parts({2: 0.5}, LORA)), tmp_path / "m", policy))
    at_once = parts({0: 0.25, 1: 0.25, 2: 0.5}, LORA)
    expected = read_weights(merge(at_once, tmp_path / "direct", policy))
    for name, tensor in merged.items():
        assert_close(tensor, expected[name], atol=1e-6, rtol=0)


def test_middle_checkpoints_with_adapters_alone_are_merged(policy, parts, tmp_path):
    chosen = parts({0: 0.5, 1: 0.5}, LORA, step=1)
    assert not (chosen[0].checkpoint / "config.json").exists()
    directory, last, single = (
        merge(each, tmp_path / name, policy)
        for name, each in {
            "m": chosen,
            "last": parts({0: 1.0}, LORA),
            "single": parts({0: 1.0}, LORA, step=1),
        }.items()
    )
    assert list_names(directory) == list_names(last)
    assert load_policy(str(single))[0].num_parameters() > 0
    weight = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(read_weights(single)[weight], read_weights(directory)[weight])


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
    other = support.write_copy(second, tmp_path / "other", change)
    with pytest.raises(TrialFailure, match=message) as caught:
        check_parts((first, other))
    assert "\n" not in str(caught.value)


def test_two_initial_policies_of_one_architecture_are_refused(
    trained, parts, policy, other_policy, tmp_path
):
    (part,) = parts({0: 0.5})
    other = TrainedPart(trained(0, policy=other_policy) / "checkpoint-2", 0.5)
    with pytest.raises(TrialFailure, match="differ in their initial policy"):
        check_parts((part, other))
    config = support.configure(policy, tmp_path / "t", (dataclasses.replace(other, weight=1.0),))
    with pytest.raises(TrialFailure, match="from another initial policy than this sweep's"):
        run(config)


def test_the_digest_of_a_policy_does_not_depend_on_the_type_of_its_weights(policy, other_policy):
    digest = hash_policy(load_policy(policy)[0])
    assert hash_policy(load_policy(policy, torch.bfloat16)[0]) == digest
    assert hash_policy(load_policy(other_policy)[0]) != digest


def test_older_checkpoints_that_record_no_initial_policy_can_be_merged(parts, tmp_path):
    first, second = parts({0: 0.5, 1: 0.5})
    older = support.write_copy(
        second, tmp_path / "older", lambda path: (path / "initial_policy.json").unlink()
    )
    check_parts((first, older))


def test_integers_that_differ_are_refused(policy, parts, tmp_path):
    chosen = [
        support.write_copy(
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
    (full,), (adapter,) = parts({0: 0.5}), parts({0: 0.5}, LORA)
    message = f"{adapter.checkpoint} is an adapter and {full.checkpoint} has weights of its own"
    for chosen in ((full, adapter), (adapter, full)):
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
    damaged = support.write_copy(second, tmp_path / "damaged", lambda _: None)
    content = bytearray((damaged.checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged.checkpoint / "model.safetensors").write_bytes(content)
    config = support.configure(policy, tmp_path / "t", (first, damaged))
    with pytest.raises(TrialFailure, match=r"is damaged \(model.safetensors has other content\)"):
        run(config)
    assert not config.directory.exists()
