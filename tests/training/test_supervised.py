"""The supervised start: a trial that learns from demonstrations, and those that begin at it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from gdpo_tune.core.errors import NonFiniteError
from gdpo_tune.core.settings import StartSettings, TrainingSettings
from gdpo_tune.core.trial_config import TrainedPart, TrialConfig
from gdpo_tune.core.trial_files import ADAPTER_CONFIG, read_steps
from gdpo_tune.core.trials import DEMONSTRATIONS
from gdpo_tune.policies.adapters import hash_policy, read_initial_policy
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training.processes import train_in_processes
from gdpo_tune.training.trial import build_start_trainer, load_for_evaluation
from gdpo_tune.training.worker_cache import build_worker_cache
from tests.support.merging import LORA, PLAIN, configure, load_weights
from tests.support.training import (
    SETTINGS,
    ToyTask,
    build_trial_config,
    have_same_weights,
    register_toy_task,
    run,
    stop_after,
)

START = StartSettings(steps=5, learning_rate=1e-2, completions_per_step=8)


class SolvedTask(ToyTask):
    """A toy task that knows answers: vowels."""

    def write_reference(self, problem):
        return "aeiou"[: 1 + len(problem.prompt) % 3]


@pytest.fixture(autouse=True)
def solved(toy, monkeypatch):
    register_toy_task(monkeypatch, SolvedTask)


def build_start(policy, directory, model=PLAIN, start=START, **training):
    steps = {"steps": start.steps, "completions_per_step": start.completions_per_step}
    settings = SETTINGS.replace(**steps, dead_steps=0, **training)
    config = build_trial_config(policy, directory, settings=settings)
    return dataclasses.replace(config, supervised=start, model=model)


@pytest.mark.parametrize("model", [PLAIN, LORA], ids=["full", "lora"])
def test_a_start_learns_its_demonstrations_and_is_kept_as_a_whole_policy(policy, tmp_path, model):
    rate = START.replace(steps=30, learning_rate=3e-2)
    reports, outcome = run(build_start(policy, tmp_path / "0", model, rate))
    losses = [step.metrics["train/loss"] for step in read_steps(tmp_path / "0")]
    assert len(losses) == len(reports) == 30
    assert losses[-1] < 0.7 * losses[0]
    assert not any(measurement.has_validation for measurement, _ in reports)
    untrained = run(dataclasses.replace(build_trial_config(policy, tmp_path / "1"), train=False))[1]
    assert outcome.validation["hits"].mean != untrained.validation["hits"].mean
    assert (outcome.cost.completions, outcome.cost.evaluation_completions) == (0, 24)
    assert outcome.environment[DEMONSTRATIONS] == "12 with 33 tokens to write"
    assert not (outcome.checkpoint / ADAPTER_CONFIG).exists()
    kept = load_file(outcome.checkpoint / "model.safetensors")
    assert kept.keys() == load_file(f"{policy}/model.safetensors").keys()
    assert not have_same_weights(outcome.checkpoint, policy)
    assert read_initial_policy(outcome.checkpoint) == hash_policy(load_policy(policy)[0])


def test_the_loss_is_that_of_completions_and_their_end_tokens(policy, tmp_path):
    config = build_start(policy, tmp_path / "0")
    cache = build_worker_cache(config)
    trainer = build_start_trainer(config, cache)
    batch = next(iter(trainer.get_train_dataloader()))
    held = cache.load_split("train")
    pairs = zip(held.problems, held.prompts, strict=True)
    prompts = {problem.prompt: ids for problem, ids in pairs}
    for ids, labels, mask in zip(
        batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
    ):
        length = int((labels == -100).logical_and(mask == 1).sum())
        text = cache.tokenizer.decode(ids[:length])
        assert ids[:length].tolist() == list(prompts[text])
        problem = next(one for one in held.problems if one.prompt == text)
        written = cache.tokenizer.encode(cache.task.write_reference(problem))
        assert labels[labels != -100].tolist() == [*written, cache.tokenizer.eos_token_id]
        assert ids[length : int(mask.sum())].tolist() == labels[labels != -100].tolist()
    logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    expected = torch.nn.functional.cross_entropy(
        logits.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    )
    loss = trainer.compute_loss(trainer.model, dict(batch))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_micro_batches_change_rounding_alone(policy, tmp_path):
    whole = run(build_start(policy, tmp_path / "0"))[1].checkpoint
    parts = run(build_start(policy, tmp_path / "1", micro_batch_size=6))[1].checkpoint  # 2 at once
    ours, theirs = (load_policy(str(path))[0].state_dict() for path in (whole, parts))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)


@pytest.mark.parametrize("model", [PLAIN, LORA], ids=["full", "lora"])
def test_a_resumed_start_has_the_weights_of_an_unbroken_one(policy, tmp_path, model):
    whole = run(build_start(policy, tmp_path / "whole", model))[1]
    config = build_start(policy, tmp_path / "cut", model)
    stopped = stop_after(config, 3)
    assert stopped.name == "checkpoint-3"
    resumed = run(config, resume=stopped)[1]
    assert have_same_weights(whole.checkpoint, resumed.checkpoint)
    assert whole.validation == resumed.validation
    again = run(config, resume=resumed.checkpoint)  # killed after its last step
    assert again[0] == []
    assert (again[1].validation, again[1].test) == (whole.validation, whole.test)


@pytest.mark.parametrize("model", [PLAIN, LORA], ids=["full", "lora"])
def test_a_start_is_evaluated_as_trials_begin_at_it(policy, tmp_path, model):
    config = build_start(policy, tmp_path / "0", model)
    start = run(config)[1].checkpoint
    judged = load_for_evaluation(config, build_worker_cache(config), start)[0].state_dict()
    begun = load_policy(policy, weights=start)[0].state_dict()
    assert judged.keys() == begun.keys()
    assert all(torch.equal(judged[name], begun[name]) for name in begun)


@pytest.mark.parametrize("model", [PLAIN, LORA], ids=["full", "lora"])
def test_trials_and_merges_begin_at_the_start(policy, tmp_path, model):
    start = run(build_start(policy, tmp_path / "0", model))[1].checkpoint
    parts = []
    for seed in (1, 2):
        config = build_trial_config(policy, tmp_path / str(seed), seed=seed, beta=0.1)
        config = dataclasses.replace(config, model=model, start=start)
        reports, outcome = run(config)
        assert reports[0][0].metrics["train/kl"] == pytest.approx(0, abs=1e-5)  # its reference
        assert reports[-1][0].metrics["train/kl"] > 1e-5
        assert read_initial_policy(outcome.checkpoint) == hash_policy(load_policy(str(start))[0])
        names = ("tokenizer.json", *(() if model.lora_rank else ("config.json",)))
        assert all((outcome.checkpoint / n).read_text() == (start / n).read_text() for n in names)
        parts.append(TrainedPart(outcome.checkpoint, 0.5))
    whole = dataclasses.replace(configure(policy, tmp_path / "m", tuple(parts), model), start=start)
    merge = run(whole)[1]
    if model.lora_rank:  # and is read with the start below it
        saved = json.loads((merge.checkpoint / "adapter_config.json").read_text())
        assert saved["base_model_name_or_path"] == str(start)
        found = load_weights(merge.checkpoint)
        theirs = [load_weights(part.checkpoint) for part in parts]
        for name, weight in found.items():
            mean = (theirs[0][name] + theirs[1][name]) / 2
            torch.testing.assert_close(weight, mean, atol=1e-6, rtol=0)
    assert read_initial_policy(merge.checkpoint) == read_initial_policy(parts[0].checkpoint)
    with pytest.raises(Exception, match="another initial policy"):
        run(dataclasses.replace(whole, directory=tmp_path / "n", start=None))


def test_a_loss_that_is_not_finite_ends_a_start(other_policy, tmp_path):
    model, tokenizer = load_policy(other_policy)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    with pytest.raises(NonFiniteError, match="loss is nan at step 1"):
        run(build_start(str(tmp_path / "broken"), tmp_path / "0"))


def test_steps_are_written_as_those_of_other_trials(policy, tmp_path):
    run(build_start(policy, tmp_path / "0"))
    rows = [json.loads(line) for line in (tmp_path / "0" / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    names = {"train/loss", "train/grad_norm", "train/learning_rate", "train/mean_token_accuracy"}
    assert rows[0]["metrics"].keys() >= names
    rates = [row["metrics"]["train/learning_rate"] for row in rows]
    assert rates[1] == pytest.approx(START.learning_rate)
    assert rates[-1] < rates[2]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_workers_train_one_start_together(tmp_path, sharded):
    counts = {"train_prompts": 16, "validation_prompts": 2, "test_prompts": 2, "dead_steps": 0}
    settings = TrainingSettings(steps=3, completions_per_step=8, **counts)
    config = TrialConfig("math", "embedded_math", 0, {}, settings, tmp_path / "one")
    config = dataclasses.replace(config, supervised=START.replace(steps=3, learning_rate=1e-4))
    whole = run(config)[1].checkpoint
    group = dataclasses.replace(config, directory=tmp_path / "two", sharded=sharded)
    shared = train_in_processes(group, 2, resume=None, report=lambda *_: None).checkpoint
    ours, theirs = (load_policy(str(path))[0].state_dict() for path in (whole, shared))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)
