"""The self-check of a trial's first batch: each fault that it must find, and what it leaves alone.

Each mend of `load_policy` and of the trainer is undone, and the trial must stop and name the part.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from gdpo_tune.core.errors import EngineDiedError, TrialFailure
from gdpo_tune.core.settings import ModelSettings, RolloutSettings
from gdpo_tune.core.trials import UNSHARED
from gdpo_tune.policies import load_policy as loading
from gdpo_tune.training import (
    fast_cpu,
    micro_batches,
    rollout,
    self_check,
    shared_prompts,
    trial,
    worker_cache,
    written_policy,
)
from tests.support.training import SETTINGS, write_gpt2
from tests.support.trials import build_trial, get_results, run_metrics

pytestmark = pytest.mark.usefixtures("toy")

ONE_STEP = SETTINGS.replace(steps=1)
PADDED = ModelSettings(shared_prompts="off")
DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1}


def run(policy, directory, **changes):
    """Train one step and return its metrics."""
    ((_, metrics),), _ = run_metrics(
        build_trial(policy, directory, **{"training": ONE_STEP, **changes})
    )
    return metrics


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_p", 0.9),
        ("suppress_tokens", [20, 21]),
        ("min_new_tokens", 4),
        ("sequence_bias", [[[5], 8.0]]),
    ],
)
def test_it_finds_a_generation_config_that_changes_draws(tmp_path, monkeypatch, key, value):
    # Source: trl#5783, verl#7270; the mend is `build_neutral_decoding`.
    policy = write_gpt2(tmp_path / "policy", {key: value, "do_sample": True})
    monkeypatch.setattr(
        loading, "build_neutral_decoding", lambda model, *_: model.generation_config
    )
    for module in (rollout, self_check):  # as of a policy that only Transformers can sample from
        monkeypatch.setattr(module, "keeps_simple_cache", lambda _: False)
    with pytest.raises(TrialFailure, match=r"the engine and a plain .* generation config"):
        run(policy, tmp_path / "trial")


@pytest.mark.parametrize(
    ("mended_in", "mend", "undone", "changes", "part"),
    [
        # Source: trl#3500, trl#3234
        (loading, "turn_off_dropout", lambda model: None, DROPOUT, "dropout"),
        # Source: trl#469, trl#6800
        (micro_batches, "needs_positions", lambda model: False, {}, "positions"),
    ],
)
def test_it_finds_dropout_and_positions_that_count_padding(
    tmp_path, monkeypatch, mended_in, mend, undone, changes, part
):
    policy = write_gpt2(tmp_path / "policy", **changes)
    monkeypatch.setattr(mended_in, mend, undone)
    with pytest.raises(TrialFailure, match=rf"the trainer and a plain forward pass .* {part}"):
        run(policy, tmp_path / "trial", model=PADDED)


def test_it_finds_a_fast_sampler_that_computes_another_policy(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(fast_cpu, "_rotate", lambda heads, cos, sin: heads)
    with pytest.raises(TrialFailure, match="the engine and a plain forward pass"):
        run(policy, tmp_path)


@pytest.mark.parametrize(
    ("engine", "model"),
    [("auto", ModelSettings()), ("transformers", ModelSettings(lora_rank=2, dtype="bfloat16"))],
)
def test_it_changes_no_result(policy, tmp_path, monkeypatch, engine, model):
    checked, own = [], trial.check_first_batch

    def spy(*arguments, **keywords):
        checked.append(arguments)
        own(*arguments, **keywords)

    settings = {"rollout": RolloutSettings(engine=engine), "model": model}
    monkeypatch.setattr(trial, "check_first_batch", spy)
    with_check = run(policy, tmp_path / "with", **settings)
    monkeypatch.setattr(trial, "check_first_batch", lambda *_, **__: None)
    without = run(policy, tmp_path / "without", **settings)
    steps = [{k: v for k, v in m.items() if "time" not in k} for m in (with_check, without)]
    assert len(checked) == 1
    assert steps[0] == steps[1]


CHECKPOINT = "a checkpoint of this training, loaded afresh, differs by"


@pytest.mark.parametrize(
    ("lora_rank", "lost", "message"),
    [
        (0, "mlp.down_proj", CHECKPOINT),
        (2, "mlp.down_proj", CHECKPOINT),
        (2, "whole", "the whole policy of this training, loaded afresh, differs by"),
    ],
)
def test_what_is_written_has_to_be_what_is_trained(
    policy, tmp_path, monkeypatch, lora_rank, lost, message
):
    """Source: unsloth#5345 and Automodel#1151, whose files lacked what had been trained."""
    own = written_policy.save_policy

    def lose(model, directory, *, whole, **options):
        kept = [(n, w, w.clone()) for n, w in model.named_parameters() if w.requires_grad]
        for name, weight, _ in kept:
            if lost in name or (lost == "whole") is whole is True:
                weight.zero_()
        own(model, directory, whole=whole, **options)
        for _, weight, value in kept:
            weight.copy_(value)

    model = ModelSettings(lora_rank=lora_rank)
    if lost != "whole":
        run(policy, tmp_path / "right", model=model)
    monkeypatch.setattr(worker_cache, "_cache", None)
    monkeypatch.setattr(written_policy, "save_policy", lose)
    with pytest.raises(TrialFailure, match=message):
        run(policy, tmp_path / "trial", model=model)
    assert not list((tmp_path / "trial").glob("*self-check*"))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_policy_that_keeps_its_dropout_passes(tmp_path, lora_rank):
    policy = write_gpt2(tmp_path / "policy", **DROPOUT)
    model = ModelSettings(dropout=True, lora_rank=lora_rank)
    assert math.isfinite(run(policy, tmp_path / "trial", model=model)["train/loss"])


def test_a_process_that_computes_nan_is_found_wherever_it_stands(policy, tmp_path, monkeypatch):
    # Source: IEEE 754: every comparison with NaN is false, so `max` may pass over it.
    others = [{"trainer": 0.0, "engine": gap} for gap in (float("nan"), 0.0)]
    processes = SimpleNamespace(gather=lambda own: [own, *others])
    monkeypatch.setattr(self_check, "distributed", processes)
    with pytest.raises(TrialFailure, match=r"the engine and a plain .* differ by nan"):
        run(policy, tmp_path)


def test_a_vllm_that_samples_with_other_weights_is_found(policy, tmp_path, monkeypatch):
    own = trial.check_first_batch

    def add_log_probs(trainer, batch, **keywords):
        # As TRL returns those of vLLM.
        told = {"sampling_per_token_logps": torch.full(batch["completion_ids"].shape, -3.0)}
        own(trainer, batch | told, **keywords)

    monkeypatch.setattr(trial, "check_first_batch", add_log_probs)
    with pytest.raises(TrialFailure, match=r"the engine and a plain .* processed_logprobs"):
        run(policy, tmp_path)


def test_a_trainer_that_shares_prompts_wrongly_goes_on_with_padded_batches(tmp_path, monkeypatch):
    """As under an architecture whose attention asks for something that nobody knew of."""
    policy, attend_to_last = write_gpt2(tmp_path / "policy"), shared_prompts._attend_to_last

    def forget_prompt(query, key, value, *more):
        count = query.shape[2]
        return attend_to_last(query, key[:, :, -count:], value[:, :, -count:], *more)

    monkeypatch.setattr(shared_prompts, "_attend_to_last", forget_prompt)
    wrong, padded = (
        run_metrics(build_trial(policy, tmp_path / name, training=ONE_STEP, model=model))[1]
        for name, model in (("trial", ModelSettings()), ("padded", PADDED))
    )
    assert "its first batch differed by" in wrong.environment[UNSHARED]
    assert UNSHARED not in padded.environment, "it was wanted"
    assert get_results(wrong) == get_results(padded)


class FollowingEngine:
    """A stand-in for TRL's `VLLMGeneration`: a copy of the policy, which a sync renews.

    Prompts that it has seen it answers with the weights of that time until a sync empties its
    cache. Faults are set by name.
    """

    def __init__(self, policy, fault=""):
        self.policy, self.fault = policy, fault
        self.copy = copy.deepcopy(policy).eval()
        self.max_completion_length = 8
        self.cached = {}
        self.syncs = 0

    def sync_weights(self):
        self.syncs += 1
        if self.fault == "no sync" or (self.fault == "one sync" and self.syncs > 1):
            return
        self.copy = copy.deepcopy(self.policy).eval()
        if self.fault == "half" and self.syncs == 1:
            self.copy.model.layers[1].load_state_dict(self.before)
        if self.fault != "stale cache":
            self.cached.clear()

    def generate(self, *, prompts, images, num_generations):
        self.before = copy.deepcopy(self.copy.model.layers[1].state_dict())
        completions, scores = [], []
        for prompt in prompts:
            weights = self.cached.setdefault(tuple(prompt), self.copy)
            drawn = torch.randint(2, 28, (self.max_completion_length,))
            logits = weights(torch.cat([torch.tensor(prompt), drawn])[None]).logits[0]
            told = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, drawn[:, None])
            completions.append(drawn.tolist())
            scores.append([[None if self.fault == "nan" else float(one)] for one in told])
        return prompts, completions, scores, None


PROMPTS = [[5, 6, 7], [3, 4]]


@pytest.fixture
def follower(policy):
    """Return a builder of a trainer whose engine has a fault."""

    def build(fault=""):
        model = loading.load_policy(policy)[0]
        return SimpleNamespace(
            args=SimpleNamespace(bf16=False),
            model=model,
            temperature=1.0,
            use_vllm=True,
            accelerator=Accelerator(cpu=True),
            vllm_generation=FollowingEngine(model, fault),
        )

    return build


def copy_weights(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def assert_same_weights(model, before):
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_an_engine_that_follows_passes_and_leaves_no_trace(follower):
    trainer = follower()
    before = copy_weights(trainer.model)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    self_check.check_following(trainer, PROMPTS)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_weights(trainer.model, before)
    assert_same_weights(trainer.vllm_generation.copy, before)
    assert trainer.vllm_generation.max_completion_length == 8


@pytest.mark.parametrize("fault", ["no sync", "one sync", "half", "stale cache", "nan"])
def test_an_engine_that_does_not_follow_is_found(follower, fault):
    # Source: trl#5312, vllm#34186, vllm#42125, trl#6166.
    trainer = follower(fault)
    before = copy_weights(trainer.model)
    message = r"self-check of the engine: .*another policy.*changed .*, cached .*, restored "
    with pytest.raises(TrialFailure, match=message):
        self_check.check_following(trainer, PROMPTS)
    assert_same_weights(trainer.model, before)


def test_an_engine_is_believed_once_for_the_weights_that_are_trained(follower):
    trainer, followed = follower(), set()
    trainer.vllm_generation.llm = SimpleNamespace(engine=SimpleNamespace(followed=followed))
    for _ in range(2):
        self_check.check_following(trainer, PROMPTS)
        assert (trainer.vllm_generation.syncs, len(followed)) == (2, 1)
    trainer.model.model.norm.weight.requires_grad_(False)
    self_check.check_following(trainer, PROMPTS)
    assert (trainer.vllm_generation.syncs, len(followed)) == (4, 2)


def test_weights_that_change_nothing_are_refused(follower):
    trainer = follower()
    for name, weight in trainer.model.named_parameters():
        weight.requires_grad_("layers.1.input_layernorm" in name)
    with torch.no_grad():  # the rest of the layer drops what that norm returns
        trainer.model.model.layers[1].self_attn.o_proj.weight.zero_()
    trainer.vllm_generation.sync_weights()
    with pytest.raises(TrialFailure, match="noise on every trained weight moves"):
        self_check.check_following(trainer, PROMPTS)


def test_a_policy_that_noise_moves_little_is_no_fault_of_the_engine(follower, monkeypatch):
    """Small and random policies are moved by less than is wished for, however large the noise."""
    trainer = follower()
    monkeypatch.setattr(self_check, "_DOUBLINGS", 2)
    monkeypatch.setattr(self_check, "_NOISE", 0.01)
    with torch.no_grad(), self_check.change_weights(trainer, [([3, 4], [8, 9])]) as moved:
        assert self_check._LEAST_MOVED <= moved < self_check._MOVED
    self_check.check_following(trainer, PROMPTS)


PROCESS = SimpleNamespace(
    accelerator=SimpleNamespace(reduce=lambda sums: sums), _describe_step=lambda: "step 4"
)
"""A trainer as `StepJudge` sees it, of a single process."""


def judge_steps(gaps, weights=None):
    """Judge steps whose log-probabilities differ by these gaps."""
    judge, trained = self_check.StepJudge(), torch.full((3,), -1.0)
    return [judge.judge(PROCESS, trained + gap, trained, weights) for gap in gaps]


def test_rounding_and_a_single_bad_step_pass():
    gaps = [0.02, 0.09, -0.05, 0.4, 0.01, 0.4, 0.02]
    assert judge_steps(gaps) == pytest.approx([abs(gap) for gap in gaps])


@pytest.mark.parametrize("gaps", [[1e-6, 0.06, 0.06], [0.02, 0.11, -0.11], [0.0, 2.0, 5.6]])
def test_an_engine_that_loses_the_weights_is_found_after_two_steps(gaps):
    with pytest.raises(EngineDiedError, match=r"no longer follows the policy: .* at step 4"):
        judge_steps(gaps)
    judge_steps(gaps[:-1])


def test_a_correction_that_leaves_nothing_is_found():
    with pytest.raises(TrialFailure, match=r"leaves 5.0% of the samples .*(?s:.)*token_truncate"):
        judge_steps([0.01, 0.01], weights=torch.tensor([[0.1], [0.0]]))


def test_nan_of_the_engine_is_found_at_once_and_that_of_the_trainer_in_its_loss():
    for gap in (math.nan, -math.inf):
        with pytest.raises(
            EngineDiedError, match=r"3 of 3 log-probabilities of the engine are NaN"
        ):
            judge_steps([gap])
    bad = torch.tensor([math.nan])
    assert math.isnan(self_check.StepJudge().judge(PROCESS, bad, bad))


def sample_with_log_probs(monkeypatch, make):
    """Sample by an engine that tells log-probabilities, changed by `make`."""
    own, calls = rollout.sample_for_trainer, []

    def sample(prompts, trainer, **options):
        answer = own(prompts, trainer, **options)
        calls.append(None)
        rows = []
        with torch.no_grad():
            for pair in zip(answer["prompt_ids"], answer["completion_ids"], strict=True):
                exact = self_check.read_completions(trainer, [tuple(map(list, pair))])
                rows.append([make(value, len(calls)) for value in exact.tolist()])
        return {**answer, "logprobs": rows}

    monkeypatch.setattr(rollout, "sample_for_trainer", sample)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda value, step: value if step == 1 else value - 1, "no longer follows .* step 3"),
        (lambda value, step: value if step == 1 else None, "engine are NaN or infinite at step 2"),
    ],
)
def test_engines_are_judged_without_a_correction_too(policy, tmp_path, monkeypatch, make, expected):
    """TRL then computes no log-probabilities of the trainer before the loss."""
    sample_with_log_probs(monkeypatch, make)
    with pytest.raises(EngineDiedError, match=expected):
        run(policy, tmp_path, training=SETTINGS)


@pytest.mark.parametrize("size", [16, 3])  # also in micro-batches of different lengths
def test_the_difference_is_recorded_without_a_correction(policy, tmp_path, monkeypatch, size):
    sample_with_log_probs(monkeypatch, lambda value, _: value + 0.01)
    monkeypatch.setattr(self_check, "LIMITS", {torch.float32: 0.02})
    metrics = run(policy, tmp_path, training=ONE_STEP.replace(micro_batch_size=size))
    name = "train/sampling/sampling_logp_difference/mean"
    assert metrics[name] == pytest.approx(0.01, abs=1e-4)
