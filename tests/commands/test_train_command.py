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
from gdpo_tune.results.retrain import build_request_from_sweep, build_trial_config
from gdpo_tune.spec import load_spec
from gdpo_tune.training.checkpoints import write_checkpoint
from tests.support.tuning import SPACE, build_outcome, load_code_spec

FIXED = (
    *("space.normalization=grpo", "space.group_size=8", "space.learning_rate=1e-4"),
    *("space.reward_weights.format=0.5", "space.reward_weights.length=0.25"),
)
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


def run(*words, steps=3):
    """Train the file with fixed values."""
    return train.main([*FILE, "--steps", str(steps), *words])


def run_from(spec, pick, *words):
    """Train what a sweep has found."""
    return train.main(["--from", f"{spec.directory}:{pick}", *words])


def refuse(function, *arguments, error=UsageError):
    """Return the message of a request that is refused."""
    with pytest.raises(error) as caught:
        function(*arguments)
    return str(caught.value)


def interrupt():
    signal.raise_signal(signal.SIGTERM)


def test_a_file_with_fixed_values_is_trained(fake, tmp_path, capsys):
    assert run("--seed", "5", "--threads", "2") == 0
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
    with pytest.raises(SpecError, match=r"--set space\.learning_rate=9\.49e-05") as caught:
        train.main([str(SPACE), "--set", "space.normalization=gdpo"])
    names = ("group_size", "learning_rate", "reward_weights.format", "reward_weights.length")
    assert [problem.key for problem in caught.value.problems] == [f"space.{n}" for n in names]
    assert fake.configs == []


def test_the_same_command_on_a_finished_training_starts_nothing(fake, capsys):
    assert run(steps=2) == 0
    first = capsys.readouterr().out
    assert run(steps=2) == 0
    again = capsys.readouterr().out
    assert len(fake.configs) == 1
    assert "already finished" in again
    assert first.splitlines()[-8:] == again.splitlines()[-8:]


def test_another_training_in_the_same_directory_is_refused(fake, tmp_path):
    assert run("--out", "here", steps=2) == 0
    message = refuse(run, "--seed", "1", "--out", "here")
    assert "training.steps = 2, not 3" in message
    assert "seed = 0, not 1" in message
    lease = Lease(tmp_path / "held" / train.LOCK)  # another process trains there
    assert "--out" in refuse(run, "--out", "held", error=LedgerHeldError)
    lease.release()


def test_a_training_keeps_the_date_of_its_start(fake):
    """Source: open-unlearning#98: prompts that change overnight cannot be compared."""
    date = "2025-01-31"
    assert run("--set", f"model.template_date={date}", steps=1) == 0
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
    assert run(*resources, steps=2) == 0
    assert started == [(2, "4,5")]
    assert "step 2/2: rewards format 0.500" in capsys.readouterr().out


def test_a_signal_ends_the_training_and_the_same_command_resumes_it(fake, capsys):
    fake.actions[2] = interrupt
    assert run() == 143
    line = capsys.readouterr().err.strip().splitlines()[-1].strip()
    assert line.startswith("python -m gdpo_tune.train ")
    assert line.endswith("--steps 3")
    assert run() == 0
    assert fake.resumed == [None, "checkpoint-2"]
    assert "resumes from checkpoint-2" in capsys.readouterr().out


def test_a_training_resumes_with_another_policy_by_an_explicit_word_alone(fake, capsys):
    # Source: open-r1#450: a run that goes on with other content measures neither.
    shutil.copytree(POLICIES["embedded"], "policy")
    fake.actions[2] = interrupt
    words = ["--set", "policy=./policy", "--out", "here"]
    assert run(*words, steps=4) == 143
    settings = Path("policy/generation_config.json")
    settings.write_text(settings.read_text().replace("{", '{"min_p": 0.5, ', 1))
    with pytest.raises(UsageError, match=r"(?s)policy generation_config\.json: .*--accept-changes"):
        run(*words, steps=4)
    assert fake.resumed == [None]
    fake.actions[3] = interrupt
    assert run(*words, "--accept-changes", steps=4) == 143
    assert "--accept-changes" not in capsys.readouterr().err
    assert run(*words, steps=4) == 0
    (_, accepted) = json.loads(Path("here", train.CONTENT).read_text())
    assert accepted["changes"] == ["policy generation_config.json"]


def test_a_commit_that_becomes_known_later_is_compared_from_then_on(fake, monkeypatch):
    monkeypatch.setattr("gdpo_tune.core.content.measure_content", lambda *_: facts)
    for digests in ({}, {"hub org/name": "1"}, {}):
        facts = {name: Fact(digest) for name, digest in digests.items()}
        assert run("--out", "here") == 0
    facts = {"hub org/name": Fact("2")}
    assert "hub org/name: 1, now 2" in refuse(run, "--out", "here")


def test_a_training_from_before_its_content_was_recorded_resumes(fake):
    fake.actions[2] = interrupt
    assert run("--out", "here") == 143
    Path("here", train.CONTENT).unlink()
    assert run("--out", "here") == 0
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


MEMORY = "out of memory: set a smaller training.micro_batch_size (auto)"


@pytest.mark.parametrize(
    ("reason", "refused", "resumed"),
    [
        ("loss is nan at step 2", "", ""),
        ("loss is nan at step 2", "training.mini_batch_size=8", ""),
        (MEMORY, "", "training.micro_batch_size=8"),
    ],
    ids=["as it is", "with other mini-batches", "with smaller micro-batches"],
)
def test_a_training_that_fails_says_why_and_resumes(fake, tmp_path, reason, refused, resumed):
    def fail():
        raise TrialFailure(reason)

    fake.actions[2] = fail
    assert reason in refuse(run, error=TrialFailure)
    assert not (tmp_path / "runs" / "code-train-3" / train.RESULT).exists()
    if refused:
        assert refused.partition("=")[0] in refuse(run, "--set", refused)
    assert run(*(["--set", resumed] if resumed else [])) == 0
    assert fake.resumed == [None, "checkpoint-1"]
    assert fake.configs[-1].training.micro_batch_size == (8 if resumed else "auto")


def test_a_training_without_a_signal_says_the_ways_on(fake, tmp_path):
    def fail():
        write_completions(tmp_path / "runs" / "code-train-3", [Completion("a", "b", {"format": 0})])
        raise NoSignalError("no signal: format is 0.000 for every completion")

    fake.actions[2] = fail
    ways = r"no signal: .*\n    b \(format 0\)\n.*ways on"
    with pytest.raises(NoSignalError, match=ways) as error:
        run()
    assert error.value.exit_status == 7


@pytest.mark.parametrize(
    ("gpus", "before", "after"),
    [("0", "0,1", ""), ("1", "2,3", "2"), ("0.5", None, "0")],
)
def test_a_training_sees_the_gpus_that_it_requests(fake, monkeypatch, gpus, before, after):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    run("--set", f"resources.gpus={gpus}", steps=1)
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


@pytest.fixture
def candidates(searched):
    """That sweep with a checkpoint of trial 1, its merge with trial 2, and replicates of each."""
    last = searched.training.steps
    half = (Part(1, last // 2, 0.5), Part(2, last, 0.5))
    with Ledger.open(searched) as ledger:
        params = ledger.get_record(1).params
        ledger.start(params, "checkpoint", "candidate", 90, parts=[Part(1, last // 2, 1.0)])
        ledger.start({}, "merge", "candidate", 91, parts=half)
        ledger.start(params, "replicate", "replicate", 92, replicate_of=1)
        ledger.start(params, "replicate", "candidate", 93, 4, parts=[Part(6, last // 2, 1.0)])
        for number, value in ((4, 0.95), (5, 0.8), (6, 0.9), (7, 0.95)):
            ledger.complete(number, build_outcome(value, 0.95, 0.5))
    return searched


@pytest.mark.parametrize(
    ("sweep", "words", "seed", "weight", "steps", "name", "line"),
    [
        ("searched", "knee --steps 3", 72, 0.3, 3, "knee-3", ""),
        ("searched", "max_correctness --steps 3", 71, 0.2, 3, "max_correctness-3", ""),
        ("searched", "max_format --steps 3", 73, 0.4, 3, "max_format-3", ""),
        ("searched", "1 --steps 3", 71, 0.2, 3, "trial-1-3", ""),
        # A checkpoint is the same training up to its step, and other steps are those of its trial.
        ("candidates", "1@30", 71, 0.2, 30, "trial-1-step-30-30",
         "checkpoint 1@30 of {}, 30 of 60 steps"),
        ("candidates", "1@30 --steps 40", 71, 0.2, 40, "trial-1-step-30-40",
         "1@30 has 30 steps: with 40 this is trial 1"),
        # A replicate of a checkpoint is trained with the seed of its part.
        ("candidates", "7", 92, 0.2, 30, "trial-7-30", ""),
    ],
)  # fmt: skip
def test_a_trial_of_a_sweep_is_trained_again(
    fake, request, tmp_path, capsys, sweep, words, seed, weight, steps, name, line
):
    spec = request.getfixturevalue(sweep)
    assert run_from(spec, *words.split()) == 0
    (config,) = fake.configs
    assert config.params["reward_weights.format"] == pytest.approx(weight)
    assert (config.seed, config.start) == (seed, None)
    training = config.training
    assert (training.length_limit, training.steps, training.warmup_share) == (20, steps, 0.0)
    assert config.directory == tmp_path / f"sweep-{name}"
    assert line.format(spec.directory) in capsys.readouterr().out


def test_a_pick_by_conditions_is_trained_under_its_trial_number(fake, searched, capsys):
    directory, choice = str(searched.directory), "max correctness where format >= 0.5"
    assert train.main(["--from", directory, "--pick", choice, "--steps", "1"]) == 0
    assert run_from(searched, choice, "--steps", "1") == 0
    (config,) = fake.configs
    assert (config.seed, config.directory.name) == (72, "sweep-trial-2-1")
    sentence = f"chosen by {choice!r}: trial 2: correctness 0.700 ± 0.010, format 0.700 ± 0.010"
    assert capsys.readouterr().out.count(sentence) == 2


def test_a_checkpoint_keeps_the_length_of_the_warm_up(fake, tmp_path):
    spec = load_code_spec(tmp_path, ["training.warmup_share=0.1"])
    with Ledger.open(spec) as ledger:
        params = spec.space.complete_baseline({})
        ledger.start(params, "search", "model", seed=7)
        ledger.complete(0, build_outcome(0.9, 0.9, 0.5))
        for step in (5, 20):
            ledger.start(params, "checkpoint", "candidate", 8, parts=[Part(0, step, 1.0)])
    assert run_from(spec, "0@20") == 0
    (config,) = fake.configs
    assert round(config.training.warmup_share * config.training.steps) == 6
    with pytest.raises(UsageError, match=r"training.warmup_share = 0.1: .* depends on all 60"):
        run_from(spec, "0@5")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("1@30 --set training.lr_schedule=cosine", "30 steps alone would be another training"),
        ("knee --set space.group_size=4", "has no effect"),
    ],
)
def test_what_a_sweep_decides_cannot_be_overridden(fake, candidates, words, message):
    assert message in refuse(run_from, candidates, *words.split())
    assert not fake.configs


def keep_policy(record):
    """Write the files of a record's policy, as a sweep that keeps it does."""
    policy = record.directory / "checkpoint-0"
    shutil.copytree(POLICIES["embedded"], policy)
    return policy


@pytest.fixture
def merged(candidates):
    """The policy of a merge of that sweep whose largest part is trial 2."""
    with Ledger.open(candidates) as ledger:
        parts = [Part(1, 30, 0.25), Part(2, 60, 0.75)]
        ledger.start({}, "merge", "candidate", 94, parts=parts)
        policy = keep_policy(ledger.get_record(8))
        ledger.complete(8, replace(build_outcome(0.99, 0.95, 0.5), checkpoint=policy))
    return policy


@pytest.mark.parametrize("pick", ["merge-8", "8", "max_correctness"])
def test_a_merge_is_trained_from_its_weights(fake, searched, merged, capsys, pick):
    assert run_from(searched, pick, "--steps", "5") == 0
    (config,) = fake.configs
    assert config.start == merged
    assert (config.seed, config.training.steps) == (72, 5)
    assert config.params["reward_weights.format"] == pytest.approx(0.3)
    printed = capsys.readouterr().out
    line = "begins at its weights, with the parameters of its largest part, trial 2"
    assert printed.count(line) == 1
    assert f"trial 2 of {searched.directory}, from the weights of merge-8" in printed


def test_a_training_from_a_merge_is_resumed_from_the_same_weights(fake, searched, merged):
    for _ in range(2):
        assert run_from(searched, "merge-8", "--steps", "5") == 0
    assert len(fake.configs) == 1
    (merged / "model.safetensors").write_bytes(b"other")
    assert "start model.safetensors" in refuse(run_from, searched, "merge-8", "--steps", "5")


def test_under_another_policy_a_merge_gives_its_parameters_alone(candidates):
    source = f"{candidates.directory}:merge-5"  # without the weights of the merge
    request = build_request_from_sweep(source, [], recipe="code_qwen", to_run=False)
    assert request.start is None
    assert request.params["reward_weights.format"] == pytest.approx(0.3)
    assert "this training begins at Qwen/" in request.lines[-3]


@pytest.mark.parametrize("pick", ["merge-5", "5"])
def test_a_merge_without_weights_is_refused_with_what_makes_it(fake, candidates, pick):
    place = candidates.directory
    assert refuse(run_from, candidates, pick).splitlines() == [
        f"{place}: merge-5: its policy was not kept (keep: front)",
        "    fix: choose another candidate, or make it again:",
        f"         python -m gdpo_tune.train --from {place}:1@30",
        f"         python -m gdpo_tune.train --from {place}:2",
    ]
    for trial, step in ((1, 30), (2, 60)):
        (place / "trials" / str(trial) / f"checkpoint-{step}").mkdir(parents=True)
    last = refuse(run_from, candidates, pick).splitlines()[-1]
    assert last == f"         python -m gdpo_tune.merge {place} --weights 1@30=0.5,2=0.5"
    assert not fake.configs


def test_a_merge_of_adapters_is_refused(fake, tmp_path):
    spec = load_code_spec(tmp_path, ["model.lora_rank=4"])
    with Ledger.open(spec) as ledger:
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=7)
        ledger.complete(0, build_outcome(0.9, 0.9, 0.5))
        ledger.start({}, "merge", "candidate", 8, parts=[Part(0, 30, 0.5), Part(0, 60, 0.5)])
        policy = keep_policy(ledger.get_record(1))
        ledger.complete(1, replace(build_outcome(0.99, 0.95, 0.5), checkpoint=policy))
    assert "a training begins at whole weights" in refuse(run_from, spec, "merge-1")


def test_the_sweep_is_not_modified(searched):
    before = {f: f.read_bytes() for f in searched.directory.rglob("*") if f.is_file()}
    source = f"{searched.directory}:knee"
    request = build_request_from_sweep(source, ["training.lr_schedule=cosine"])
    config = build_trial_config(request, seed=None, out=Path("o"), threads=None)
    assert config.training.lr_schedule == "cosine"
    assert before == {f: f.read_bytes() for f in searched.directory.rglob("*") if f.is_file()}


@pytest.mark.parametrize("source", ["runs/code", ":knee", "runs/code:"])
def test_a_source_without_directory_or_pick_is_refused(fake, source):
    assert "runs/code:knee, runs/code:max_correctness" in refuse(train.main, ["--from", source])


def test_another_policy_is_trained_with_the_values_that_are_asked_for(fake, searched, capsys):
    policy = ["--set", f"policy={POLICIES['embedded']}"]
    message = refuse(run_from, searched, "1", *policy)
    assert not fake.configs
    assert "choose values, for example " in message
    values = message.partition("for example ")[2].splitlines()[0].split()
    short = ["--set", "training.max_completion_length=60", "--set", "training.length_limit=20"]
    assert run_from(searched, "1", *policy, *values, *short) == 0
    (config,) = fake.configs
    assert (config.policy, config.seed) == (str(POLICIES["embedded"]), 71)
    assert config.params["learning_rate"] == 1e-6
    assert config.params["reward_weights.format"] == pytest.approx(0.2)
    assert config.training.completions_per_step == 512
    assert "does not carry over to another policy" in capsys.readouterr().out


def test_the_request_is_written_as_json(fake, tmp_path):
    run("--out", "here", steps=1)
    request = json.loads((tmp_path / "here" / train.REQUEST).read_text())
    assert request["params.reward_weights.format"] == 0.5
    assert request["training.steps"] == 1
    assert "directory" not in request


def test_a_file_with_a_start_trains_that_first_and_once(fake, tmp_path):
    words = ["--set", "start={steps: 2}", "--out", "here"]
    fake.actions[1] = interrupt
    assert [run(*words) for _ in range(3)] == [143, 0, 0]
    own, _, config = fake.configs
    assert (own.supervised.steps, own.training.steps, own.start) == (2, 2, None)
    assert own.directory == tmp_path / "here" / "start"
    assert (config.supervised, config.training.steps) == (None, 3)
    assert config.start == own.directory / "checkpoint-2"
    with pytest.raises(UsageError, match=r"another training: .*start.steps = 2, not 4"):
        run(*words, "--set", "start={steps: 4}")


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
    message = refuse(build_request_from_sweep, f"{spec.directory}:0", [])
    assert "trial 0 is the supervised start" in message
