"""`python -m gdpo_tune.train`: requests, directories, ends and resumption."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import gdpo_tune.spec.machine
import gdpo_tune.training
from gdpo_tune import cli, train
from gdpo_tune.core.content import Fact
from gdpo_tune.core.errors import (
    LedgerHeldError,
    NoSignalError,
    SpecError,
    TrialFailure,
    UsageError,
)
from gdpo_tune.core.locks import Lease
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.trial_files import Completion, append_step, write_completions
from gdpo_tune.core.trials import Cost, Measurement, Outcome, Part
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.retrain import (
    build_request_from_sweep,
    build_trial_config,
)
from gdpo_tune.spec import load_spec
from gdpo_tune.training.checkpoints import write_checkpoint
from tests.support.tuning import SPACE, build_outcome, load_code_spec

FIXED = [
    "space.normalization=grpo",
    "space.group_size=8",
    "space.learning_rate=1e-4",
    "space.reward_weights.format=0.5",
    "space.reward_weights.length=0.25",
]
FILE = [str(SPACE), *(word for override in FIXED for word in ("--set", override))]


class FakeTraining:
    """A fake `train()` that writes a checkpoint per step and calls `actions` by step."""

    def __init__(self) -> None:
        self.configs = []
        self.resumed = []
        self.actions: dict[int, object] = {}

    def __call__(self, config, *, resume, report) -> Outcome:
        self.configs.append(config)
        self.resumed.append(None if resume is None else resume.name)
        first = 0 if resume is None else int(resume.name.rpartition("-")[2])
        for step in range(first + 1, config.training.steps + 1):
            action = self.actions.pop(step, None)
            if callable(action):
                action()
            written = write_checkpoint(
                config.directory, step, Cost(), lambda directory: (directory / "x").touch()
            )
            measured = Measurement(step, {"train/rewards/format/mean": 0.5}, Cost(step))
            append_step(config.directory, measured)
            report(measured, written.path)
        result = build_outcome(0.7, test_shift=0.1)
        return Outcome(result.validation, result.test, result.cost, written.path, {})


@pytest.fixture
def fake(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(gdpo_tune.spec.machine, "check_resources", lambda spec: None)
    monkeypatch.setattr(cli, "preflight", lambda spec, tracked: {"sandbox": "fake"})
    training = FakeTraining()
    monkeypatch.setattr(gdpo_tune.training, "train", training, raising=False)
    return training


def test_a_file_with_fixed_values_is_trained(fake, tmp_path, capsys):
    arguments = [*FILE, "--steps", "3", "--seed", "5", "--threads", "2"]
    assert train.main(arguments) == 0
    (config,) = fake.configs
    assert config.params["normalization"] == "grpo"
    assert config.params["reward_weights.length"] == 0.25
    assert config.params["temperature"] == 1.0
    assert (config.training.steps, config.seed, config.threads) == (3, 5, 2)
    assert config.directory == tmp_path / "runs" / "code-train-3-seed5"
    printed = capsys.readouterr().out
    assert "step 3/3: rewards format 0.500" in printed
    assert "0.700 ± 0.010" in printed
    assert "0.800 ± 0.010" in printed
    assert f"policy: {config.directory / 'checkpoint-3'}" in printed


def test_all_parameters_without_a_fixed_value_are_listed(fake):
    with pytest.raises(SpecError) as caught:
        train.main([str(SPACE), "--set", "space.normalization=gdpo"])
    assert [problem.key for problem in caught.value.problems] == [
        "space.group_size",
        "space.learning_rate",
        "space.reward_weights.format",
        "space.reward_weights.length",
    ]
    assert "--set space.learning_rate=9.49e-05" in str(caught.value)
    assert fake.configs == []


def test_the_same_command_on_a_finished_training_starts_nothing(fake, capsys):
    assert train.main([*FILE, "--steps", "2"]) == 0
    first = capsys.readouterr().out
    assert train.main([*FILE, "--steps", "2"]) == 0
    again = capsys.readouterr().out
    assert len(fake.configs) == 1
    assert "already finished" in again
    assert first.splitlines()[-8:] == again.splitlines()[-8:]


def test_another_training_in_the_same_directory_is_refused(fake):
    out = ["--out", "here"]
    assert train.main([*FILE, "--steps", "2", *out]) == 0
    with pytest.raises(UsageError) as caught:
        train.main([*FILE, "--steps", "3", "--seed", "1", *out])
    assert "training.steps = 2, not 3" in str(caught.value)
    assert "seed = 0, not 1" in str(caught.value)


def test_a_training_keeps_the_date_of_its_start(fake):
    """Source: open-unlearning#98: prompts that change overnight cannot be compared."""
    date = "2025-01-31"
    assert train.main([*FILE, "--steps", "1", "--set", f"model.template_date={date}"]) == 0
    (config,) = fake.configs
    assert config.model.template_date == date
    undated = replace(config, model=config.model.replace(template_date=""))
    resumed = train.record_request(load_spec(SPACE, [*FIXED, "training.steps=1"]), undated)
    assert resumed.model.template_date == date


def test_several_workers_train_in_processes_of_their_own(fake, monkeypatch, capsys):
    started = []

    def start(config, workers, *, resume, report):
        started.append((workers, os.environ["CUDA_VISIBLE_DEVICES"]))
        return fake(config, resume=resume, report=report)

    monkeypatch.setattr("gdpo_tune.training.processes.train_in_processes", start)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    resources = ["--set", "resources={workers: 2, gpus: 1}", "--set", "model.dtype=float32"]
    assert train.main([*FILE, "--steps", "2", *resources]) == 0
    assert started == [(2, "4,5")]
    assert "step 2/2: rewards format 0.500" in capsys.readouterr().out


def test_a_directory_in_which_another_process_trains_is_refused(fake, tmp_path):
    lease = Lease(tmp_path / "here" / train.LOCK)
    with pytest.raises(LedgerHeldError, match="--out"):
        train.main([*FILE, "--out", "here"])
    lease.release()


def test_a_signal_ends_the_training_and_the_same_command_resumes_it(fake, capsys):
    fake.actions[2] = lambda: signal.raise_signal(signal.SIGTERM)
    arguments = [*FILE, "--steps", "4"]
    assert train.main(arguments) == 143
    captured = capsys.readouterr()
    line = captured.err.strip().splitlines()[-1].strip()
    assert line.startswith("python -m gdpo_tune.train ")
    assert line.endswith("--steps 4")
    assert train.main(arguments) == 0
    assert fake.resumed == [None, "checkpoint-2"]
    assert "resumes from checkpoint-2" in capsys.readouterr().out


def test_a_training_resumes_with_another_policy_by_an_explicit_word_alone(fake, capsys):
    # Source: open-r1#450: a run that goes on with other content measures neither.
    shutil.copytree(POLICIES["embedded"], "policy")
    fake.actions[2] = lambda: signal.raise_signal(signal.SIGTERM)
    arguments = [*FILE, "--steps", "4", "--set", "policy=./policy", "--out", "here"]
    assert train.main(arguments) == 143
    settings = Path("policy/generation_config.json")
    settings.write_text(settings.read_text().replace("{", '{"min_p": 0.5, ', 1))
    with pytest.raises(UsageError) as caught:
        train.main(arguments)
    assert "policy generation_config.json: " in str(caught.value)
    assert "--accept-changes" in str(caught.value)
    assert fake.resumed == [None]
    fake.actions[3] = lambda: signal.raise_signal(signal.SIGTERM)
    assert train.main([*arguments, "--accept-changes"]) == 143
    assert "--accept-changes" not in capsys.readouterr().err
    assert train.main(arguments) == 0
    (_, accepted) = json.loads(Path("here", train.CONTENT).read_text())
    assert accepted["changes"] == ["policy generation_config.json"]


def test_a_commit_that_becomes_known_later_is_compared_from_then_on(fake, monkeypatch):
    monkeypatch.setattr("gdpo_tune.core.content.measure_content", lambda *_: facts)
    arguments = [*FILE, "--steps", "4", "--out", "here"]
    for digests in ({}, {"hub org/name": "1"}, {}):
        facts = {name: Fact(digest) for name, digest in digests.items()}
        assert train.main(arguments) == 0
    facts = {"hub org/name": Fact("2")}
    with pytest.raises(UsageError, match="hub org/name: 1, now 2"):
        train.main(arguments)


def test_a_training_from_before_its_content_was_recorded_resumes(fake):
    fake.actions[2] = lambda: signal.raise_signal(signal.SIGTERM)
    arguments = [*FILE, "--steps", "4", "--out", "here"]
    assert train.main(arguments) == 143
    Path("here", train.CONTENT).unlink()
    assert train.main(arguments) == 0
    assert Path("here", train.CONTENT).exists()


def test_a_trial_that_is_trained_again_with_other_content_says_so(fake, tmp_path):
    spec = load_code_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        ledger.compare_content({"policy model.safetensors": Fact("a" * 32)})
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=7)
        ledger.complete(0, build_outcome(0.5))
    request = build_request_from_sweep(f"{spec.directory}:0", [])
    assert request.lines[-1].startswith("warning: what decides results is not what it was in ")
    assert "policy model.safetensors: aaaaaaaaaaaa, now" in request.lines[-1]


def test_a_training_that_fails_says_why_and_can_be_started_again(fake, tmp_path):
    def fail():
        raise TrialFailure("loss is nan at step 2")

    fake.actions[2] = fail
    with pytest.raises(TrialFailure, match="loss is nan"):
        train.main([*FILE, "--steps", "3"])
    assert not (tmp_path / "runs" / "code-train-3" / train.RESULT).exists()
    assert train.main([*FILE, "--steps", "3"]) == 0


def test_a_training_without_a_signal_says_the_ways_on(fake, tmp_path):

    def fail():
        write_completions(tmp_path / "runs" / "code-train-3", [Completion("a", "b", {"format": 0})])
        raise NoSignalError("no signal: format is 0.000 for every completion")

    fake.actions[2] = fail
    with pytest.raises(
        NoSignalError, match=r"no signal: .*\n    b \(format 0\)\n.*ways on"
    ) as error:
        train.main([*FILE, "--steps", "3"])
    assert error.value.exit_status == 7


def test_a_training_with_other_mini_batches_does_not_resume(fake, tmp_path):
    def fail():
        raise TrialFailure("loss is nan at step 2")

    fake.actions[2] = fail
    arguments = [*FILE, "--steps", "3"]
    with pytest.raises(TrialFailure):
        train.main(arguments)
    with pytest.raises(UsageError, match=r"training\.mini_batch_size"):
        train.main([*arguments, "--set", "training.mini_batch_size=8"])
    assert train.main(arguments) == 0


def test_a_training_that_ran_out_of_memory_resumes_with_smaller_micro_batches(fake):
    def fail():
        raise TrialFailure("out of memory: set a smaller training.micro_batch_size (auto)")

    fake.actions[2] = fail
    arguments = [*FILE, "--steps", "3"]
    with pytest.raises(TrialFailure, match="out of memory"):
        train.main(arguments)
    assert train.main([*arguments, "--set", "training.micro_batch_size=8"]) == 0
    assert fake.resumed == [None, "checkpoint-1"]
    assert fake.configs[-1].training.micro_batch_size == 8


@pytest.mark.parametrize(
    ("gpus", "before", "after"),
    [("0", "0,1", ""), ("1", "2,3", "2"), ("0.5", None, "0")],
)
def test_a_training_sees_the_gpus_that_it_requests(fake, monkeypatch, gpus, before, after):
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    train.main([*FILE, "--steps", "1", "--set", f"resources.gpus={gpus}"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == after


# --- from a sweep ---------------------------------------------------------------------------------


@pytest.fixture
def searched(tmp_path):
    """A sweep with the untrained policy and three trials on its front."""
    spec = load_code_spec(tmp_path, ["training.length_limit=20"])
    values = [(0.1, 0.1), (0.9, 0.2), (0.7, 0.7), (0.2, 0.9)]
    with Ledger.open(spec) as ledger:
        for number, (correct, form) in enumerate(values):
            role = "untrained" if number == 0 else "search"
            params = spec.space.complete_baseline({"reward_weights.format": 0.1 * (number + 1)})
            ledger.start(params, role, "model", seed=70 + number)
            ledger.complete(number, build_outcome(correct, form, 0.5))
    return spec


@pytest.mark.parametrize(
    ("pick", "number", "label"),
    [
        ("knee", 2, "knee"),
        ("max_correctness", 1, "max_correctness"),
        ("max_format", 3, "max_format"),
        ("1", 1, "trial-1"),
    ],
)
def test_a_trial_of_a_sweep_is_trained_again(fake, searched, tmp_path, pick, number, label):
    source = f"{searched.directory}:{pick}"
    assert train.main(["--from", source, "--steps", "3"]) == 0
    (config,) = fake.configs
    assert config.params["reward_weights.format"] == pytest.approx(0.1 * (number + 1))
    assert config.seed == 70 + number
    assert config.training.length_limit == 20
    assert config.training.steps == 3
    assert config.directory == tmp_path / f"sweep-{label}-3"


def test_a_pick_by_conditions_is_trained_under_its_trial_number(fake, searched, capsys):
    directory, choice = str(searched.directory), "max correctness where format >= 0.5"
    assert train.main(["--from", directory, "--pick", choice, "--steps", "1"]) == 0
    assert train.main(["--from", f"{directory}:{choice}", "--steps", "1"]) == 0
    (config,) = fake.configs
    assert (config.seed, config.directory.name) == (72, "sweep-trial-2-1")
    sentence = f"chosen by {choice!r}: trial 2: correctness 0.700 ± 0.010, format 0.700 ± 0.010"
    assert capsys.readouterr().out.count(sentence) == 2


def add_candidates(spec):
    """Add a checkpoint of trial 1, a merge of it with trial 2, and a replicate of trial 1."""
    last = spec.training.steps
    half = (Part(1, last // 2, 0.5), Part(2, last, 0.5))
    with Ledger.open(spec) as ledger:
        params = ledger.get_record(1).params
        ledger.start(params, "checkpoint", "candidate", 90, parts=[Part(1, last // 2, 1.0)])
        ledger.start({}, "merge", "candidate", 91, parts=half)
        ledger.start(params, "replicate", "replicate", 92, replicate_of=1)
        ledger.start(params, "replicate", "candidate", 93, 4, parts=[Part(6, last // 2, 1.0)])
        for number, value in ((4, 0.95), (5, 0.8), (6, 0.9), (7, 0.95)):
            ledger.complete(number, build_outcome(value, 0.95, 0.5))


def test_a_checkpoint_is_the_same_training_up_to_its_step(fake, searched, tmp_path, capsys):
    add_candidates(searched)
    assert train.main(["--from", f"{searched.directory}:1@30"]) == 0
    (config,) = fake.configs
    assert config.seed == 71
    assert config.params["reward_weights.format"] == pytest.approx(0.2)
    assert (config.training.steps, config.training.warmup_share) == (30, 0.0)
    assert config.directory == tmp_path / "sweep-trial-1-step-30-30"
    assert f"checkpoint 1@30 of {searched.directory}, 30 of 60 steps" in capsys.readouterr().out


def test_a_replicate_of_a_checkpoint_is_trained_with_the_seed_of_its_part(fake, searched):
    add_candidates(searched)
    assert train.main(["--from", f"{searched.directory}:7"]) == 0
    (config,) = fake.configs
    assert (config.seed, config.training.steps) == (92, 30)
    assert config.params["reward_weights.format"] == pytest.approx(0.2)


def test_a_checkpoint_keeps_the_length_of_the_warm_up(fake, tmp_path):
    spec = load_code_spec(tmp_path, ["training.warmup_share=0.1"])
    with Ledger.open(spec) as ledger:
        params = spec.space.complete_baseline({})
        ledger.start(params, "search", "model", seed=7)
        ledger.complete(0, build_outcome(0.9, 0.9, 0.5))
        for step in (5, 20):
            ledger.start(params, "checkpoint", "candidate", 8, parts=[Part(0, step, 1.0)])
    assert train.main(["--from", f"{spec.directory}:0@20"]) == 0
    (config,) = fake.configs
    assert round(config.training.warmup_share * config.training.steps) == 6
    with pytest.raises(UsageError, match=r"training.warmup_share = 0.1: .* depends on all 60"):
        train.main(["--from", f"{spec.directory}:0@5"])


def test_another_course_of_a_checkpoint_is_refused(fake, searched):
    add_candidates(searched)
    words = ["--set", "training.lr_schedule=cosine"]
    with pytest.raises(UsageError, match="30 steps alone would be another training"):
        train.main(["--from", f"{searched.directory}:1@30", *words])
    assert not fake.configs


def test_other_steps_of_a_checkpoint_are_those_of_its_trial(fake, searched, capsys):
    add_candidates(searched)
    assert train.main(["--from", f"{searched.directory}:1@30", "--steps", "40"]) == 0
    (config,) = fake.configs
    assert (config.training.steps, config.seed, config.start) == (40, 71, None)
    assert "1@30 has 30 steps: with 40 this is trial 1" in capsys.readouterr().out


def keep_policy(record):
    """Write the files of a record's policy, as a sweep that keeps it does."""
    policy = record.directory / "checkpoint-0"
    shutil.copytree(POLICIES["embedded"], policy)
    return policy


def store_merge(spec):
    """Store a merge whose largest part is trial 2, and its policy."""
    add_candidates(spec)
    with Ledger.open(spec) as ledger:
        parts = [Part(1, 30, 0.25), Part(2, 60, 0.75)]
        ledger.start({}, "merge", "candidate", 94, parts=parts)
        outcome = build_outcome(0.99, 0.95, 0.5)
        policy = keep_policy(ledger.get_record(8))
        ledger.complete(8, replace(outcome, checkpoint=policy))
    return policy


@pytest.mark.parametrize("pick", ["merge-8", "8", "max_correctness"])
def test_a_merge_is_trained_from_its_weights(fake, searched, capsys, pick):
    policy = store_merge(searched)
    source = f"{searched.directory}:{pick}"
    assert train.main(["--from", source, "--steps", "5"]) == 0
    (config,) = fake.configs
    assert config.start == policy
    assert (config.seed, config.training.steps) == (72, 5)
    assert config.params["reward_weights.format"] == pytest.approx(0.3)
    printed = capsys.readouterr().out
    line = "begins at its weights, with the parameters of its largest part, trial 2"
    assert printed.count(line) == 1
    assert f"trial 2 of {searched.directory}, from the weights of merge-8" in printed


def test_a_training_from_a_merge_is_resumed_from_the_same_weights(fake, searched):
    policy = store_merge(searched)
    words = ["--from", f"{searched.directory}:merge-8", "--steps", "5"]
    assert train.main(words) == 0
    assert train.main(words) == 0
    assert len(fake.configs) == 1
    (policy / "model.safetensors").write_bytes(b"other")
    with pytest.raises(UsageError, match=r"start model\.safetensors"):
        train.main(words)


def test_under_another_policy_a_merge_gives_its_parameters_alone(searched):
    add_candidates(searched)  # without the weights of the merge
    source = f"{searched.directory}:merge-5"
    request = build_request_from_sweep(source, [], recipe="code_qwen", to_run=False)
    assert request.start is None
    assert request.params["reward_weights.format"] == pytest.approx(0.3)
    assert "this training begins at Qwen/" in request.lines[-3]


@pytest.mark.parametrize("pick", ["merge-5", "5"])
def test_a_merge_without_weights_is_refused_with_what_makes_it(fake, searched, pick):
    add_candidates(searched)
    place = searched.directory
    with pytest.raises(UsageError) as caught:
        train.main(["--from", f"{place}:{pick}"])
    assert str(caught.value).splitlines() == [
        f"{place}: merge-5: its policy was not kept (keep: front)",
        "    fix: choose another candidate, or make it again:",
        f"         python -m gdpo_tune.train --from {place}:1@30",
        f"         python -m gdpo_tune.train --from {place}:2",
    ]
    for part in (Part(1, 30, 0.5), Part(2, 60, 0.5)):
        (place / "trials" / str(part.trial) / f"checkpoint-{part.step}").mkdir(parents=True)
    with pytest.raises(UsageError) as caught:
        train.main(["--from", f"{place}:{pick}"])
    last = str(caught.value).splitlines()[-1]
    assert last == f"         python -m gdpo_tune.merge {place} --weights 1@30=0.5,2=0.5"
    assert not fake.configs


def test_a_merge_of_adapters_is_refused(fake, tmp_path):
    spec = load_code_spec(tmp_path, ["model.lora_rank=4"])
    with Ledger.open(spec) as ledger:
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=7)
        ledger.complete(0, build_outcome(0.9, 0.9, 0.5))
        ledger.start({}, "merge", "candidate", 8, parts=[Part(0, 30, 0.5), Part(0, 60, 0.5)])
        outcome = build_outcome(0.99, 0.95, 0.5)
        ledger.complete(1, replace(outcome, checkpoint=keep_policy(ledger.get_record(1))))
    with pytest.raises(UsageError, match="a training begins at whole weights"):
        train.main(["--from", f"{spec.directory}:merge-1"])


def test_the_sweep_is_not_modified(searched):
    before = {f: f.read_bytes() for f in searched.directory.rglob("*") if f.is_file()}
    request = build_request_from_sweep(
        f"{searched.directory}:knee", ["training.lr_schedule=cosine"]
    )
    config = build_trial_config(request, seed=None, out=Path("o"), threads=None)
    assert config.training.lr_schedule == "cosine"
    assert before == {f: f.read_bytes() for f in searched.directory.rglob("*") if f.is_file()}


@pytest.mark.parametrize("source", ["runs/code", ":knee", "runs/code:"])
def test_a_source_without_directory_or_pick_is_refused(fake, source):
    with pytest.raises(UsageError, match="runs/code:knee, runs/code:max_correctness"):
        train.main(["--from", source])


def test_another_policy_is_trained_with_the_values_that_are_asked_for(fake, searched, capsys):
    source, policy = f"{searched.directory}:1", f"policy={POLICIES['embedded']}"
    with pytest.raises(UsageError, match="choose values, for example") as caught:
        train.main(["--from", source, "--set", policy])
    assert not fake.configs
    values = str(caught.value).partition("for example ")[2].splitlines()[0].split()
    short = ["--set", "training.max_completion_length=60", "--set", "training.length_limit=20"]
    assert train.main(["--from", source, "--set", policy, *values, *short]) == 0
    (config,) = fake.configs
    assert (config.policy, config.seed) == (str(POLICIES["embedded"]), 71)
    assert config.params["learning_rate"] == 1e-6
    assert config.params["reward_weights.format"] == pytest.approx(0.2)
    assert config.training.completions_per_step == 512
    assert "does not carry over to another policy" in capsys.readouterr().out


def test_parameters_of_a_trial_cannot_be_overridden(fake, searched):
    with pytest.raises(UsageError, match="has no effect"):
        train.main(["--from", f"{searched.directory}:knee", "--set", "space.group_size=4"])


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [str(SPACE), "--from", "x:1"],
        [str(SPACE), "--pick", "knee"],
        [str(SPACE), "--steps", "0"],
        [str(SPACE), "--seed", "-1"],
        [str(SPACE), "--seed", "4294967296"],
    ],
)
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_the_request_is_written_as_json(fake, tmp_path):
    train.main([*FILE, "--steps", "1", "--out", "here"])
    request = json.loads((tmp_path / "here" / train.REQUEST).read_text())
    assert request["params.reward_weights.format"] == 0.5
    assert request["training.steps"] == 1
    assert "directory" not in request


def test_a_file_with_a_start_trains_that_first_and_once(fake, tmp_path):
    arguments = [*FILE, "--steps", "3", "--set", "start={steps: 2}", "--out", "here"]
    fake.actions[1] = lambda: signal.raise_signal(signal.SIGTERM)
    assert train.main(arguments) == 143
    assert train.main(arguments) == 0
    assert train.main(arguments) == 0
    own, _, config = fake.configs
    assert (own.supervised.steps, own.training.steps, own.start) == (2, 2, None)
    assert own.directory == tmp_path / "here" / "start"
    assert (config.supervised, config.training.steps) == (None, 3)
    assert config.start == own.directory / "checkpoint-2"
    with pytest.raises(UsageError, match=r"another training: .*start.steps = 2, not 4"):
        train.main([*arguments, "--set", "start={steps: 4}"])


def test_a_candidate_is_trained_again_from_the_start_of_its_sweep(fake, tmp_path):
    spec = load_code_spec(tmp_path, ["start={steps: 2}"])
    with Ledger.open(spec) as ledger:
        params = spec.space.complete_baseline({})
        directory = ledger.get_trial_directory(0)
        ledger.start(params, "start", "baseline", seed=6)
        kept = write_checkpoint(directory, 2, Cost(), lambda path: (path / "x").touch()).path
        ledger.complete(0, replace(build_outcome(0.3), checkpoint=kept))
        ledger.start(params, "search", "model", seed=7)
        ledger.complete(1, build_outcome(0.5))
    request = build_request_from_sweep(f"{spec.directory}:1", [])
    config = build_trial_config(request, seed=None, out=None, threads=None)
    assert config.start == kept
    other = build_request_from_sweep(f"{spec.directory}:1", ["model.dropout=true"])
    assert other.start is None  # it needs a start of its own
    with pytest.raises(UsageError, match="trial 0 is the supervised start"):
        build_request_from_sweep(f"{spec.directory}:0", [])
