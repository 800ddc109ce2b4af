"""The supervised start: a trial that learns from demonstrations, and those that begin at it."""

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
from tests.support import training as support
from tests.support.merging import LORA, PLAIN, configure, load_weights
from tests.support.training import SETTINGS, ToyTask, have_same_weights, run
from tests.support.trials import build_trial, get_results

START = StartSettings(steps=5, learning_rate=1e-2, completions_per_step=8)
BOTH = pytest.mark.parametrize("model", [PLAIN, LORA], ids=["full", "lora"])


class SolvedTask(ToyTask):
    """A toy task that knows answers: vowels."""

    def write_reference(self, problem):
        return "aeiou"[: 1 + len(problem.prompt) % 3]


@pytest.fixture(autouse=True)
def solved(toy, monkeypatch):
    support.register_toy_task(monkeypatch, SolvedTask)


def build_start(policy, directory, model=PLAIN, start=START, **training):
    steps = {"steps": start.steps, "completions_per_step": start.completions_per_step}
    settings = SETTINGS.replace(**steps, dead_steps=0, **training)
    return build_trial(policy, directory, training=settings, supervised=start, model=model)


@pytest.fixture(scope="module")
def started(policy, tmp_path_factory):
    """Train a start only the first time; return its reports and its outcome."""
    results = {}

    def run_once(model=PLAIN):
        if model not in results:
            if model.lora_rank:
                pytest.importorskip("peft")
            results[model] = run(build_start(policy, tmp_path_factory.mktemp("start"), model))
        return results[model]

    return run_once


@BOTH
def test_a_start_learns_its_demonstrations_and_is_kept_as_a_whole_policy(policy, tmp_path, model):
    rate = START.replace(steps=30, learning_rate=3e-2)
    reports, outcome = run(build_start(policy, tmp_path / "0", model, rate))
    losses = [step.metrics["train/loss"] for step in read_steps(tmp_path / "0")]
    assert len(losses) == len(reports) == 30
    assert losses[-1] < 0.7 * losses[0]
    assert not any(measurement.has_validation for measurement, _ in reports)
    untrained = run(build_trial(policy, tmp_path / "1", train=False))[1]
    assert outcome.validation["hits"].mean != untrained.validation["hits"].mean
    assert (outcome.cost.completions, outcome.cost.evaluation_completions) == (0, 24)
    assert outcome.environment[DEMONSTRATIONS] == "12 with 33 tokens to write"
    assert not (outcome.checkpoint / ADAPTER_CONFIG).exists()
    kept = load_file(outcome.checkpoint / "model.safetensors")
    assert kept.keys() == load_file(f"{policy}/model.safetensors").keys()
    assert not have_same_weights(outcome.checkpoint, policy)
    assert read_initial_policy(outcome.checkpoint) == hash_policy(load_policy(policy)[0])


def test_the_loss_is_that_of_completions_and_their_end_tokens(policy, tmp_path):
    config = build_start(policy, tmp_path)
    cache = build_worker_cache(config)
    trainer = build_start_trainer(config, cache)
    batch = next(iter(trainer.get_train_dataloader()))
    held = cache.load_split("train")
    problems = {problem.prompt: problem for problem in held.problems}
    prompts = dict(zip(problems, map(list, held.prompts), strict=True))
    for ids, labels, mask in zip(
        batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
    ):
        length = int((labels == -100).logical_and(mask == 1).sum())
        text = cache.tokenizer.decode(ids[:length])
        assert ids[:length].tolist() == prompts[text]
        written = cache.tokenizer.encode(cache.task.write_reference(problems[text]))
        expected = [*written, cache.tokenizer.eos_token_id]
        assert labels[labels != -100].tolist() == expected
        assert ids[length : int(mask.sum())].tolist() == expected
    logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    expected = torch.nn.functional.cross_entropy(
        logits.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    )
    loss = trainer.compute_loss(trainer.model, dict(batch))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_micro_batches_change_rounding_alone(policy, tmp_path, started):
    whole = started()[1].checkpoint
    parts = run(build_start(policy, tmp_path, micro_batch_size=6))[1].checkpoint  # 2 at once
    ours, theirs = load_weights(whole), load_weights(parts)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)


@pytest.mark.system
@BOTH
def test_a_resumed_start_has_the_weights_of_an_unbroken_one(policy, tmp_path, started, model):
    whole = started(model)[1]
    config = build_start(policy, tmp_path, model)
    stopped = support.stop_after(config, 3)
    assert stopped.name == "checkpoint-3"
    resumed = run(config, resume=stopped)[1]
    assert have_same_weights(whole.checkpoint, resumed.checkpoint)
    assert whole.validation == resumed.validation
    reports, again = run(config, resume=resumed.checkpoint)  # killed after its last step
    assert reports == []
    assert get_results(again) == get_results(whole)


@BOTH
def test_a_start_is_evaluated_as_trials_begin_at_it(policy, tmp_path, started, model):
    start = started(model)[1].checkpoint
    config = build_start(policy, tmp_path, model)
    judged = load_for_evaluation(config, build_worker_cache(config), start)[0].state_dict()
    begun = load_policy(policy, weights=start)[0].state_dict()
    assert judged.keys() == begun.keys()
    assert all(torch.equal(judged[name], begun[name]) for name in begun)


@BOTH
def test_trials_and_merges_begin_at_the_start(policy, tmp_path, started, model):
    start, parts = started(model)[1].checkpoint, []
    for seed in (1, 2):
        fields = {"seed": seed, "beta": 0.1, "model": model, "start": start}
        reports, outcome = run(build_trial(policy, tmp_path / str(seed), **fields))
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
        first, second = (load_weights(part.checkpoint) for part in parts)
        for name, weight in load_weights(merge.checkpoint).items():
            mean = (first[name] + second[name]) / 2
            torch.testing.assert_close(weight, mean, atol=1e-6, rtol=0)
    assert read_initial_policy(merge.checkpoint) == read_initial_policy(parts[0].checkpoint)
    with pytest.raises(Exception, match="another initial policy"):
        run(dataclasses.replace(whole, directory=tmp_path / "n", start=None))


def test_a_loss_that_is_not_finite_ends_a_start(policy, tmp_path):
    model, tokenizer = load_policy(policy)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "broken")
    with pytest.raises(NonFiniteError, match="loss is nan at step 1"):
        run(build_start(str(tmp_path / "broken"), tmp_path / "0"))


def test_steps_are_written_as_those_of_other_trials(started):
    steps = read_steps(started()[1].checkpoint.parent)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    names = {"train/loss", "train/grad_norm", "train/learning_rate", "train/mean_token_accuracy"}
    assert steps[0].metrics.keys() >= names
    rates = [step.metrics["train/learning_rate"] for step in steps]
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
    ours, theirs = load_weights(whole), load_weights(shared)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)
