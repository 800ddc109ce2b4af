"""`train()`: bitwise reproducible, bitwise resumable, and every setting has an effect."""

import dataclasses
import json
import random
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from gdpo_tune.core import registry
from gdpo_tune.core.errors import DataError, NonFiniteError, NoSignalError, TrialFailure
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.task_info import order_prompts
from gdpo_tune.core.trial_files import REWARDS, ZERO_STD, read_completions, read_steps
from gdpo_tune.training import devices, step_reporter, train, worker_cache
from gdpo_tune.training.checkpoints import find_newest_checkpoint, read_checkpoint
from gdpo_tune.training.evaluation import Evaluator
from gdpo_tune.training.step_reporter import describe_dead_step
from gdpo_tune.training.trl_arguments import build_trainer_arguments
from tests.support import training as support
from tests.support.training import SETTINGS, ToyTask, have_same_weights, run, stop_after
from tests.support.trials import build_trial, get_results, run_metrics

pytestmark = pytest.mark.usefixtures("toy")


@pytest.fixture(scope="module")
def once(policy, tmp_path_factory):
    """Run each trial only the first time; return its reports and its outcome."""
    results = {}

    def run_once(training=SETTINGS, **changes):
        key = (training, tuple(changes.items()))
        if key not in results:
            directory = tmp_path_factory.mktemp("once") / "t"
            results[key] = run(build_trial(policy, directory, training=training, **changes))
        return results[key]

    return run_once


def metrics_of(reports) -> list[tuple[int, dict[str, float]]]:
    return [(m.step, dict(m.metrics)) for m, _ in reports]


def read_metrics(directory):
    return [(m.step, dict(m.metrics)) for m in read_steps(directory)]


def list_steps(reports) -> list[int]:
    return [m.step for m, _ in reports]


def list_saved(directory):
    return sorted(path.name for path in directory.glob("checkpoint-*"))


def test_a_trial_from_start_to_end(policy, tmp_path, once):
    reports, outcome = once()
    directory = outcome.checkpoint.parent
    assert list_steps(reports) == [1, 2, 3]
    figures = ("mean", "std", "frac_reward_zero_std", "share")
    names = "loss grad_norm entropy completions/mean_length completions/clipped_ratio reward "
    names += "frac_advantage_zero reward_std frac_reward_zero_std learning_rate "
    names += "clip_ratio/region_mean"
    assert set(reports[0][0].metrics) == {
        *(f"train/rewards/{name}/{figure}" for name in ToyTask.rewards for figure in figures),
        *(f"train/{name}" for name in names.split()),
    }
    validated = [m.step for m, _ in reports if "validation/hits" in m.metrics]
    assert validated == [2, 3], "every evaluate_every steps and at the last one"
    assert [path is not None for _, path in reports] == [False, True, True]
    last = reports[-1][0]
    assert last.validation == outcome.validation
    assert last.metrics["validation/hits"] == outcome.validation["hits"].mean
    assert [bool(m.validation) for m, _ in reports] == [False, True, True]
    assert last.cost.completions == outcome.cost.completions == 48
    assert [m.cost.evaluation_completions for m, _ in reports] == [0, 12, 24]
    assert outcome.cost.evaluation_completions == 36, "twice on validation prompts, once on test"
    assert 0 < last.cost.seconds <= outcome.cost.seconds
    assert 0 < last.cost.cpu_seconds <= outcome.cost.cpu_seconds
    assert tuple(outcome.test) == tuple(outcome.validation) == ToyTask.metrics
    config = build_trial(policy, tmp_path)
    assert outcome.environment == {"judge": "toy", **devices.describe_device(config)}
    assert outcome.checkpoint == directory / "checkpoint-3" == find_newest_checkpoint(directory)
    assert list_saved(directory) == ["checkpoint-2", "checkpoint-3"], "the one before, in case"
    files = [{file.name for file in (directory / f"checkpoint-{n}").iterdir()} for n in (2, 3)]
    assert "optimizer.pt" in files[0]
    assert files[0] - files[1] == {"optimizer.pt"}, "no training continues from the last one"
    assert read_metrics(directory) == metrics_of(reports)
    assert not have_same_weights(Path(policy), outcome.checkpoint)


def test_a_rung_is_evaluated_and_changes_nothing_else(once):
    plain, outcome = once()
    reports, with_rung = once(evaluate_at=(1,))
    assert [bool(m.validation) for m, _ in reports] == [True, True, True]
    assert reports[0][0].validation.keys() == outcome.validation.keys()
    assert get_results(with_rung) == get_results(outcome)
    assert metrics_of(reports)[1:] == metrics_of(plain)[1:]


class DrawingTask(ToyTask):
    """A task whose rewards draw from the global generators."""

    def score(self, problems, completions, lengths, *_):
        scores = super().score(problems, completions, lengths)
        drawn = [random.random() for _ in completions]
        return dataclasses.replace(scores, metrics={**scores.metrics, "hits": drawn})


def test_rewards_that_draw_numbers_are_seeded_without_a_training(policy, tmp_path, monkeypatch):
    support.register_toy_task(monkeypatch, DrawingTask)

    def evaluate(name, seed):
        outcome = run(build_trial(policy, tmp_path / name, seed=seed, train=False))[1]
        return outcome.validation["hits"], outcome.test["hits"]

    assert evaluate("a", 3) == evaluate("b", 3) != evaluate("c", 4)


def test_untrained_baseline_whose_objectives_are_unweighted(policy, tmp_path):
    reports, outcome = run(build_trial(policy, tmp_path / "t", train=False))
    assert reports == []
    assert outcome.checkpoint is None
    assert (outcome.cost.completions, outcome.cost.evaluation_completions) == (0, 24)
    assert tuple(outcome.test) == ToyTask.metrics
    weighted = build_trial(policy, tmp_path / "t", train=False, **{"reward_weights.hits": 0.1})
    assert run(weighted)[1].test == outcome.test


def test_another_architecture_is_trained_through_transformers(tmp_path):
    gpt2 = support.write_gpt2(tmp_path / "gpt2")
    first, again = (run(build_trial(gpt2, tmp_path / name)) for name in "ab")
    assert metrics_of(first[0]) == metrics_of(again[0])
    assert not have_same_weights(Path(gpt2), first[1].checkpoint)


def test_equal_configs_are_bitwise_equal_in_a_fresh_and_a_reused_process(
    policy, tmp_path, once, monkeypatch
):
    fresh, outcome = once()
    worker_cache.release_worker_cache()
    ToyTask.opened = 0
    between, _ = run(build_trial(policy, tmp_path / "between", seed=9))
    torch.rand(17)  # the process may have done anything else
    reused, again = run(build_trial(policy, tmp_path / "b"))
    assert ToyTask.opened == 1, "the second trial reuses the task"
    monkeypatch.setattr(worker_cache, "_COPIED_PARAMETERS", 0)  # too large to keep twice
    loaded, third = run(build_trial(policy, tmp_path / "c"))
    assert metrics_of(fresh) == metrics_of(reused) == metrics_of(loaded)
    assert metrics_of(between) != metrics_of(fresh), "another seed is another trial"
    assert get_results(outcome) == get_results(again) == get_results(third)
    assert have_same_weights(outcome.checkpoint, again.checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"training": SETTINGS.replace(length_limit=2)},
        {"sandbox": SandboxSettings(workers=2)},
        {"scoring": "released"},
        {"task": "toy again"},  # the first task is registered no more
    ],
)
def test_trials_that_share_nothing_get_a_cache_of_their_own(policy, tmp_path, monkeypatch, changes):
    built = []

    class ScoredTask(ToyTask):
        def __init__(self, *sections, scoring="strict"):
            super().__init__(*sections)
            built.append((self.settings, self.sandbox, scoring))

    support.register_toy_task(monkeypatch, ScoredTask)
    config = build_trial(policy, tmp_path)
    for _ in range(2):
        with worker_cache.open_worker_cache(config):
            pass
    if "task" in changes:
        monkeypatch.delitem(registry.TASKS, "toy")
        monkeypatch.setitem(registry.TASKS, "toy again", support.TARGET)
    other = dataclasses.replace(config, **changes)
    with worker_cache.open_worker_cache(other):
        assert (ToyTask.opened, ToyTask.closed) == (2, 1)
    scoring = changes.get("scoring", "strict")
    first, second = built
    assert first == (config.training, config.sandbox, "strict")
    assert second == (other.training, other.sandbox, scoring)


class Stop(Exception):
    """Ends a trial from within its report."""


@pytest.mark.parametrize(
    ("stop", "passes"), support.mark_slow_cases(product((2, 3, 5), (1, 2)), [(2, 1), (5, 2)])
)
def test_a_resumed_trial_is_bitwise_equal(policy, tmp_path, once, stop, passes):
    # 6 steps of 4 prompts pass twice over 12 prompts, so a resume also crosses that boundary.
    settings = SETTINGS.replace(steps=6, lr_schedule="cosine", warmup_share=0.3)
    parameters = {"training": settings, "num_iterations": passes, "beta": 0.01}
    whole, expected = once(**parameters)
    config = build_trial(policy, tmp_path / "cut", **parameters)
    newest = stop_after(config, stop, Stop)
    start = read_checkpoint(newest)
    worker_cache.release_worker_cache()
    torch.rand(3)
    rest, outcome = run(config, resume=newest)
    if start.validation:
        rest = rest[1:]  # the measurement at the checkpoint, reported again
    assert metrics_of(rest) == metrics_of(whole)[start.step :]
    assert get_results(outcome) == get_results(expected)
    assert have_same_weights(outcome.checkpoint, expected.checkpoint)
    for count in ("completions", "evaluation_completions"):
        assert getattr(outcome.cost, count) == getattr(expected.cost, count)
    assert outcome.cost.seconds > start.cost.seconds
    assert read_metrics(config.directory) == metrics_of(whole)


def test_a_trial_that_stops_on_request_loses_no_step(policy, tmp_path, once):
    config = build_trial(policy, tmp_path)
    newest = stop_after(config, 1)
    assert read_checkpoint(newest).step == 1
    reports, outcome = run(config, resume=newest)
    assert list_steps(reports) == [2, 3]
    assert have_same_weights(outcome.checkpoint, once()[1].checkpoint)


def test_a_resumed_trial_reports_the_measurement_at_its_checkpoint_again(policy, tmp_path, once):
    config = build_trial(policy, tmp_path, evaluate_at=(1,))
    newest = stop_after(config, 1)
    assert newest == tmp_path / "checkpoint-1"
    reports, _ = run(config, resume=newest)
    again, path = reports[0]
    reported = once(evaluate_at=(1,))[0][0][0]
    assert reported.has_validation
    assert (again.step, again.validation, dict(again.metrics)) == (1, reported.validation, {})
    assert path == newest
    assert list_steps(reports) == [m.step for m in read_steps(tmp_path)] == [1, 2, 3]


def test_a_trial_that_died_after_its_last_step_reports_again_and_only_evaluates(
    policy, tmp_path, once
):
    whole, expected = once()
    config = build_trial(policy, tmp_path)
    newest = stop_after(config, 3, Stop)  # the report of that step never arrived
    reports, outcome = run(config, resume=newest)
    ((again, path),) = reports
    assert (again.step, again.validation) == (3, expected.validation)
    assert (dict(again.metrics), path) == ({}, newest)
    assert outcome.cost.evaluation_completions == expected.cost.evaluation_completions
    assert get_results(outcome) == get_results(expected)
    assert outcome.checkpoint == newest
    assert len(whole) == 3


def test_checkpoints_that_may_become_candidates_stay(once):
    settings = SETTINGS.replace(steps=7)
    plain, expected = once(settings)
    reports, outcome = once(settings, keep_at=(1, 2))
    assert [m.step for m, path in reports if path] == [1, 2, 4, 6, 7]
    kept = [f"checkpoint-{step}" for step in (1, 2, 6, 7)]
    assert list_saved(outcome.checkpoint.parent) == kept
    assert metrics_of(reports) == metrics_of(plain)
    assert outcome.test == expected.test


def test_a_damaged_checkpoint_is_refused(policy, tmp_path):
    config = build_trial(policy, tmp_path / "t")
    newest = stop_after(config, 2, Stop)
    (newest / "optimizer.pt").unlink()
    with pytest.raises(TrialFailure, match=r"checkpoint-2 is incomplete \(optimizer.pt is missing"):
        run(config, resume=newest)


@pytest.mark.parametrize("reason", [SystemExit, KeyboardInterrupt, Stop])
def test_an_exception_of_report_passes_through_and_closes_the_cache(policy, tmp_path, reason):
    def report(*_):
        raise reason

    with pytest.raises(reason):
        train(build_trial(policy, tmp_path / "t"), resume=None, report=report)
    assert (ToyTask.opened, ToyTask.closed) == (1, 1)


def test_the_older_checkpoint_stays_until_the_newer_one_was_reported(policy, tmp_path):
    seen = []

    def report(measurement, path):
        if path is not None:
            seen.append(list_saved(path.parent))

    train(build_trial(policy, tmp_path / "t"), resume=None, report=report)
    assert seen == [["checkpoint-2"], ["checkpoint-2", "checkpoint-3"]]


class BrokenTask(ToyTask):
    """Its second batch has a reward of NaN."""

    batches = 0

    def score(self, problems, completions, lengths, *_):
        scores = super().score(problems, completions, lengths)
        BrokenTask.batches += 1
        if BrokenTask.batches == 2:
            scores.rewards["vowels"][3] = float("nan")
        return scores


def test_nan_from_the_task_ends_the_trial_with_a_reason(policy, tmp_path, monkeypatch):
    support.register_toy_task(monkeypatch, BrokenTask)
    with pytest.raises(NonFiniteError, match="reward vowels of completion 3 is nan at step 2"):
        run(build_trial(policy, tmp_path))
    assert [m.step for m in read_steps(tmp_path)] == [1]
    assert ToyTask.closed == 1


def test_group_size_has_to_divide_the_completions_of_a_step(policy, tmp_path):
    with pytest.raises(TrialFailure, match="group_size 5 does not divide completions_per_step 16"):
        run(build_trial(policy, tmp_path, group_size=5))


QUICK = SETTINGS.replace(steps=2, validation_prompts=2, test_prompts=2, samples_per_prompt=1)
SHORT = QUICK.replace(steps=1, test_prompts=12)


def test_long_prompts_are_counted_in_every_trial(policy, tmp_path):
    data = DataSettings(max_prompt_length=5)
    for name in ("first", "again, in the same process"):
        config = build_trial(policy, tmp_path / name, training=SHORT, data=data)
        left_out = {f"prompts_left_out.{split}": "3 of 12" for split in ("train", "test")}
        described = {"judge": "toy", **left_out, **devices.describe_device(config)}
        assert run(config)[1].environment == described


def test_prompts_that_leave_no_positions_for_a_completion_are_left_out(policy, tmp_path):
    """GPT-2 has no embedding beyond its positions, and vLLM refuses what is longer."""

    def train_with(positions: int):
        few = shutil.copytree(policy, tmp_path / f"policy {positions}")
        stored = json.loads((few / "config.json").read_text())
        stored["max_position_embeddings"] = positions
        (few / "config.json").write_text(json.dumps(stored))
        return run(build_trial(str(few), tmp_path / f"{positions}", training=SHORT))[1]

    outcome = train_with(5 + SHORT.max_completion_length)
    assert outcome.environment["prompts_left_out.train"] == "3 of 12"
    with pytest.raises(DataError, match=r"the 1 that \d+ positions .* lower training\.max_comp"):
        train_with(1 + SHORT.max_completion_length)


def on(reward: str, other: str, threshold: float = 0.125) -> dict:
    """Return parameters: `reward` conditioned on `other`, at an eighth of its range by default."""
    return {f"conditioning.{reward}": other, f"conditioning_threshold.{reward}": threshold}


TWO_PASSES = {"num_iterations": 2, "learning_rate": 0.05}
NO_STD = {"normalization": "grpo_no_std"}
OVERLONG = {"length_shape": "overlong", "length_cache": 0.5}
PARAMETER_CHANGES = {
    "normalization": ({}, NO_STD),
    "group_size": ({}, {"group_size": 8}),
    "learning_rate": ({}, {"learning_rate": 3e-2}),
    "temperature": ({}, {"temperature": 0.6}),
    "beta": ({}, {"beta": 0.5}),
    "epsilon": (TWO_PASSES, {**TWO_PASSES, "epsilon": 0.01}),
    "epsilon_high": (TWO_PASSES, {**TWO_PASSES, "epsilon_high": 0.01}),
    "loss_type": ({}, {"loss_type": "grpo"}),
    "num_iterations": ({}, {"num_iterations": 2}),
    "gamma": ({}, {"gamma": 1.0}),
    "baseline": (NO_STD, {**NO_STD, "baseline": "leave_one_out"}),
    "prompt_selection": ({}, {"prompt_selection": "informative"}),
    "partial_credit": ({}, {"partial_credit": True}),
    "length_shape": ({}, {"length_shape": "ramp"}),
    "length_cache": (OVERLONG, {**OVERLONG, "length_cache": 0.9}),
    **{f"reward_weights.{k}": ({}, {f"reward_weights.{k}": 0.1}) for k in ToyTask.rewards},
}
for reward, other in (("hits", "vowels"), ("vowels", "hits"), ("length", "hits")):
    PARAMETER_CHANGES[f"conditioning.{reward}"] = ({}, on(reward, other))
for reward, other in (("hits", "vowels"), ("vowels", "hits"), ("length", "vowels")):
    changes = (on(reward, other), on(reward, other, 0.25))
    PARAMETER_CHANGES[f"conditioning_threshold.{reward}"] = changes


def test_the_lists_of_parameters_and_settings_are_complete():
    assert set(PARAMETER_CHANGES) == set(list_parameters(support.TOY))
    names = {*TrainingSettings.model_fields}
    changed = {*CHANGES, "dead_steps"}  # see `DeadTask`
    assert changed == names, "CHANGES says of each key what it changes in a training"


@pytest.mark.parametrize("name", PARAMETER_CHANGES)
def test_each_parameter_changes_training(once, name):
    base, changed = PARAMETER_CHANGES[name]
    reports, outcome = once(QUICK, **base)
    others, other = once(QUICK, **changed)
    assert not have_same_weights(outcome.checkpoint, other.checkpoint)
    assert metrics_of(reports) != metrics_of(others)
    assert outcome.cost.completions == other.cost.completions, "the budget is the same"
    assert list_steps(reports) == list_steps(others) == [1, 2]


def test_cispo_takes_the_upper_bound_and_the_others_the_distance(policy, tmp_path):
    for loss_type, bound in (("dapo", 0.28), ("cispo", 1.28)):
        config = build_trial(policy, tmp_path, loss_type=loss_type, epsilon_high=0.28)
        assert build_trainer_arguments(config, ToyTask.rewards).epsilon_high == bound


def test_the_kl_is_that_from_the_untrained_policy(once):
    first, second = (m.metrics["train/kl"] for m, _ in once(QUICK, beta=0.5)[0])
    assert first == pytest.approx(0, abs=1e-6)
    assert second > 1e-4


def rates(reports, _):
    return [m.metrics["train/learning_rate"] for m, _ in reports]


def evaluations(reports, _):
    return [m.step for m, _ in reports if "validation/hits" in m.metrics]


def checkpoints(reports, _):
    return [m.step for m, path in reports if path]


def longest(reports, _):
    return max(m.metrics["train/completions/mean_length"] for m, _ in reports)


def training(reports, _):
    return [{k: v for k, v in m.metrics.items() if "train/" in k} for m, _ in reports]


def on_validation(_, outcome):
    return outcome.validation


CHANGES = {
    "steps": (2, lambda reports, _: list_steps(reports), [1, 2, 3], [1, 2]),
    "completions_per_step": (32, lambda _, outcome: outcome.cost.completions, 48, 96),
    "micro_batch_size": (4, training, None, None),  # rounding; more: test_micro_batches
    "mini_batch_size": (4, training, None, None),
    "max_completion_length": (2, longest, None, 2.0),
    "length_limit": (2, on_validation, None, None),
    "lr_schedule": ("linear", rates, [0.01] * 3, [0.01, 0.01 * 2 / 3, 0.01 / 3]),
    "warmup_share": (0.6, rates, [0.01] * 3, [0.0, 0.005, 0.01]),
    "max_grad_norm": (1e-3, training, None, None),
    "optimizer": ("adamw_8bit", training, None, None),
    "train_prompts": (5, training, None, None),
    "validation_prompts": (3, on_validation, None, None),
    "test_prompts": (3, lambda _, outcome: outcome.test, None, None),
    "samples_per_prompt": (3, on_validation, None, None),
    "evaluation_temperature": (0.0, on_validation, None, None),
    "evaluate_every": (1, evaluations, [2, 3], [1, 2, 3]),
    "checkpoint_every": (1, checkpoints, [2, 3], [1, 2, 3]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_has_its_effect(once, name):
    if name == "optimizer":
        pytest.importorskip("torchao", reason="needs the extra adam8bit")
    value, measure, expected, expected_changed = CHANGES[name]
    before = measure(*once())
    after = measure(*once(SETTINGS.replace(**{name: value})))
    assert before != after
    if expected is not None:
        assert before == pytest.approx(expected)
    if expected_changed is not None:
        assert after == pytest.approx(expected_changed)


def test_threads(policy, tmp_path):
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            run(build_trial(policy, tmp_path, train=False, threads=threads))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_training_order_repeats_no_prompt_within_a_pass():
    order = order_prompts(10, 25, seed=3)
    assert len(order) == 25
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[:10] != order[10:20]
    assert order == order_prompts(10, 25, seed=3)
    assert order != order_prompts(10, 25, seed=4)


def test_gpu_metrics_are_stored_with_each_step(policy, tmp_path, monkeypatch):
    seen = {"train/gpu_utilisation": 0.5, "train/gpu_memory_gib": 3.0}
    monkeypatch.setattr(step_reporter, "read_gpu_metrics", lambda: dict(seen))
    (_, reported), *_ = run_metrics(build_trial(policy, tmp_path, training=SHORT))[0]
    ((_, stored),) = read_metrics(tmp_path)
    for metrics in (reported, stored):
        assert {name: metrics[name] for name in seen} == seen


class DeadTask(ToyTask):
    """Every reward is equal, as of a policy that never meets the format."""

    equal = frozenset(ToyTask.rewards)

    def score(self, problems, completions, lengths, *_):
        scores = super().score(problems, completions, lengths)
        constant = {name: [0.2] * len(lengths) for name in self.equal}
        return dataclasses.replace(scores, rewards={**scores.rewards, **constant})


@pytest.fixture
def dead(policy, tmp_path, monkeypatch):
    """Build a trial of the task that teaches nothing."""
    support.register_toy_task(monkeypatch, DeadTask)
    settings = SETTINGS.replace(steps=4, dead_steps=2, checkpoint_every=1)

    def build(name="t", params=(), **changes):
        training = settings.replace(**changes)
        return build_trial(policy, tmp_path / name, training=training, **dict(params))

    return build


def test_a_training_without_a_signal_ends_early_with_examples(dead):
    """Source: arithmetic: advantages of 0 have a gradient of 0, at every step."""
    config = dead()
    with pytest.raises(NoSignalError, match=r"no signal: .* 2 steps in a row: hits is 0\.200 for"):
        run(config)
    assert [step.step for step in read_steps(config.directory)] == [1, 2]
    examples = read_completions(config.directory)
    assert len({example.prompt for example in examples}) == 3
    assert examples[0].metrics == pytest.approx(dict.fromkeys(ToyTask.rewards, 0.2))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "a has no value"),
        ({"mean": 0.2, "std": 0.0}, "a is 0.200 for every completion"),
        ({"mean": 0.2, "std": 0.1, ZERO_STD: 1.0}, "a is equal within each group"),
        ({"mean": 0.2, "std": 0.1, ZERO_STD: 0.5}, "a varies, but its advantages cancel"),
    ],
)
def test_a_dead_step_is_described_by_its_rewards(values, reason):
    metrics = {f"train/{REWARDS}a/{name}": value for name, value in values.items()}
    text = describe_dead_step(metrics, {"a": 1.0, "b": 0.0}, 3)
    assert text == f"every advantage was 0 in 3 steps in a row: {reason}"


@pytest.mark.parametrize(("failing", "kept"), [(2, 1), (4, 4)])
def test_a_last_step_is_kept_though_its_validation_fails(
    policy, tmp_path, monkeypatch, failing, kept
):
    """So that it is evaluated again, not trained again; an earlier step is repeated."""
    evaluate = Evaluator.evaluate

    def fail(self, model, split, step):
        if step == failing:
            raise TrialFailure("the judge is away")
        return evaluate(self, model, split, step)

    training = SETTINGS.replace(steps=4, evaluate_every=2, checkpoint_every=1)
    config = build_trial(policy, tmp_path / "t", training=training)
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", fail)
        with pytest.raises(TrialFailure, match="the judge is away"):
            run(config)
    checkpoint = find_newest_checkpoint(config.directory)
    assert read_checkpoint(checkpoint).step == kept
    reports, outcome = run(config, resume=checkpoint)
    assert outcome.validation.keys() >= {"hits"}
    assert 4 in list_steps(reports) or kept == 4


def test_the_count_of_dead_steps_outlives_an_interruption(dead):
    config = dead()
    with pytest.raises(NoSignalError):
        run(config, resume=stop_after(config, 1))
    assert [step.step for step in read_steps(config.directory)] == [1, 2]


def test_a_training_shorter_than_the_limit_has_no_signal_either(dead):
    with pytest.raises(NoSignalError):
        run(dead(steps=2, dead_steps=10))


def test_one_reward_with_a_signal_is_enough(dead, monkeypatch):
    monkeypatch.setattr(DeadTask, "equal", frozenset({"hits"}))
    assert "unchanged" not in run(dead())[1].environment
    # A weight of 0 takes that signal away.
    others = {"reward_weights.vowels": 0.0, "reward_weights.length": 0.0}
    with pytest.raises(NoSignalError):
        run(dead("u", others))


def test_a_policy_that_no_gradient_moved_is_marked(policy, dead):
    config = dead(dead_steps=0)
    _, outcome = run(config)
    assert outcome.environment["unchanged"] == "every gradient was 0"
    assert have_same_weights(Path(policy), outcome.checkpoint)
    # A run that resumes after the last step, for its evaluation alone, says the same.
    assert "unchanged" in run(config, resume=outcome.checkpoint)[1].environment
