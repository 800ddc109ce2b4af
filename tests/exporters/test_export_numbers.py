"""The meaning of exported files, computed by the code of the libraries that are installed."""

import dataclasses
import itertools

import pytest
import torch
from transformers import get_scheduler
from trl import GRPOConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import DatasetMixtureConfig

from gdpo_tune.training import trl_arguments
from gdpo_tune.training.trl_arguments import build_trainer_arguments
from tests.support.export import export_to, make_recipe, make_request, parse_settings
from tests.support.export_batch import (
    NAMES,
    PARTS,
    SIZES,
    UNANIMOUS_G,
    build_exported_trainer,
    build_own_trainer,
    compute_step,
    draw_batch,
    draw_unanimous_batch,
)
from tests.support.export_comparison import (
    LOSSES,
    WAYS,
    assert_same_or_explained,
    find_row,
    measure_difference,
)
from tests.support.training import mark_slow_cases, write_policy

ON_CPU = ("model.dtype=float32", "model.gradient_checkpointing=off")
ACCUMULATION = ("gradient_accumulation_steps", "steps_per_generation")


def parse_with_trl(tmp_path, *overrides):
    """Return a file as `trl grpo --config` reads it, and the arguments of a trial."""
    request = make_request([*ON_CPU, *overrides])
    recipe = make_recipe(request=request, name=str(tmp_path / "out"))
    file = tmp_path / "grpo.yaml"
    file.write_text(export_to("trl", recipe).text)
    parser = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig))
    parsed = parser.parse_args_and_config(["--config", str(file)])
    config = request.spec.build_trial_config(request.params, request.seed, tmp_path / "trial")
    return parsed, build_trainer_arguments(config, tuple(reward.name for reward in recipe.rewards))


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "space.loss_type=cispo space.epsilon_high=0.28 space.beta=0.01",
        "training.micro_batch_size=16 space.num_iterations=2 training.warmup_share=0.2",
        "training.mini_batch_size=16 training.micro_batch_size=8 space.num_iterations=2 "
        "training.warmup_share=0.2",
        "training.lr_schedule=cosine space.loss_type=dr_grpo space.temperature=0.8",
    ],
)
def test_trl_reads_the_arguments_of_a_trial(tmp_path, overrides):
    (script, theirs, model, _), ours = parse_with_trl(tmp_path, *overrides.split())
    written = parse_settings(export_to("trl", make_recipe(*ON_CPU, *overrides.split())))
    shared = {field.name for field in dataclasses.fields(GRPOConfig)} & set(written)
    elsewhere = {"output_dir", "multi_objective_aggregation", "weight_decay", "reward_weights"}
    # A trial divides its mini-batches itself.
    elsewhere |= {"per_device_train_batch_size", *ACCUMULATION}
    size = ours.per_device_train_batch_size
    parts = theirs.gradient_accumulation_steps
    assert theirs.per_device_train_batch_size * parts == size
    assert theirs.steps_per_generation == parts * ours.steps_per_generation
    assert len(shared - elsewhere) > 15
    for name in sorted(shared - elsewhere):
        assert getattr(theirs, name) == getattr(ours, name), name
    largest = max(ours.reward_weights)
    assert theirs.reward_weights == [weight / largest for weight in ours.reward_weights]
    assert theirs.weight_decay == ours.weight_decay
    assert script.reward_funcs == [f"rewards.{name}_reward" for name in NAMES]
    assert model.model_name_or_path == make_recipe().policy


def test_a_trial_states_the_gradient_of_its_kl_whatever_the_default(tmp_path, monkeypatch):
    stated = {}

    def build(**arguments):
        stated.update(arguments)
        return GRPOConfig(**arguments)

    monkeypatch.setattr(trl_arguments, "GRPOConfig", build)
    request = make_request(["space.beta=0.01"])
    config = request.spec.build_trial_config(request.params, request.seed, tmp_path)
    build_trainer_arguments(config, NAMES)
    assert stated["use_bias_correction_kl"] is True


def test_trl_reads_adapters(tmp_path):
    (_, _, model, _), _ = parse_with_trl(tmp_path, "model.lora_rank=8")
    assert (model.use_peft, model.lora_r, model.lora_alpha) == (True, 8, 16)
    assert model.lora_target_modules == "all-linear"


@pytest.fixture(scope="module")
def compute_both(tmp_path_factory):
    """A function that returns what TRL computes from an export, what a trial does, the export."""
    directory = tmp_path_factory.mktemp("trl")
    policy = write_policy(directory / "policy")

    def compute(batch, *overrides):
        exported = export_to("trl", make_recipe(*SIZES, *overrides))
        settings = parse_settings(exported)
        theirs = build_exported_trainer(settings, batch, policy, directory / "theirs")
        ours = build_own_trainer(overrides, batch, policy, directory / "ours")
        return compute_step(theirs, batch), compute_step(ours, batch), exported

    return compute


MODES = ("gdpo", "grpo", "grpo_no_std", "grpo_batch")
QUICK = [("gdpo", "dapo"), ("gdpo", "cispo"), ("grpo_no_std", "dr_grpo")]


@pytest.mark.parametrize(("mode", "loss"), mark_slow_cases(itertools.product(MODES, LOSSES), QUICK))
def test_trl_computes_the_advantages_and_losses_of_the_trial(compute_both, mode, loss):
    for beta, way in itertools.product((0, 0.1), WAYS):
        overrides = (f"space.normalization={mode}", f"space.loss_type={loss}", *WAYS[way])
        batch = draw_batch(updated=way != "one update")
        theirs, ours, exported = compute_both(batch, *overrides, f"space.beta={beta}")
        assert ours.advantages.abs().max() > 0.3
        torch.testing.assert_close(theirs.advantages, ours.advantages, rtol=0, atol=1e-6)
        assert_same_or_explained(theirs, ours, exported)


def test_micro_batches_of_trl_change_bnpo(compute_both):
    overrides = ("space.loss_type=bnpo", *PARTS)
    theirs, ours, _ = compute_both(draw_batch(), *overrides)
    row = find_row("trl", "loss_type bnpo averages over", *overrides)
    assert f"{100 * measure_difference(theirs, ours):.0f} % (measured)" in row


@pytest.mark.parametrize("mode", MODES)
def test_a_reward_that_trl_does_not_score(compute_both, mode):
    theirs, ours, _ = compute_both(draw_batch(missing=True), f"space.normalization={mode}")
    difference = float((theirs.advantages - ours.advantages).abs().max())
    row = find_row("trl", "missing reward (`None`)", f"space.normalization={mode}")
    if row:
        assert 0.2 < difference < 0.55
    else:
        assert difference < 1e-6


def test_a_group_of_equal_rewards_in_trl(compute_both):
    overrides = (f"space.group_size={UNANIMOUS_G}",)
    theirs, ours, _ = compute_both(draw_unanimous_batch(), *overrides)
    dead = ours.advantages == 0
    assert dead.sum() >= len(dead) / 2
    size = f"up to {theirs.advantages[dead].abs().max():.4f}"
    assert size in find_row("trl", "zero-variance groups", *overrides)


@pytest.mark.parametrize(
    "kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_trl_weights_what_vllm_rounds(compute_both, kind):
    engine = ("rollout.engine=vllm", "resources.gpus=1", "rollout.importance_sampling_cap=1.1")
    batch = draw_batch(rounded=True)
    theirs, ours, _ = compute_both(batch, *engine, f"rollout.importance_sampling={kind}")
    assert measure_difference(theirs, ours) < 1e-5
    plain = dataclasses.replace(batch, sampled=batch.old)
    _, unweighted, _ = compute_both(plain, *engine)
    assert measure_difference(unweighted, ours) > 1e-2


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.2])
def test_nemo_rl_has_the_learning_rate_of_transformers(shape, warmup):
    overrides = ("training.steps=20", f"training.lr_schedule={shape}")
    recipe = make_recipe(*overrides, f"training.warmup_share={warmup}")
    written = parse_settings(export_to("nemo-rl", recipe))["policy"]["scheduler"]
    names = {"constant": "constant_with_warmup"}
    ours = names.get(shape, shape), recipe.warmup_optimizer_steps
    assert record_rates(lambda optimizer: build_nemo_scheduler(optimizer, written)) == (
        pytest.approx(record_rates(lambda o: get_scheduler(ours[0], o, ours[1], 20)), abs=1e-7)
    )


def build_nemo_scheduler(optimizer, written):
    """Build the scheduler as nemo_rl/models/automodel/setup.py does."""

    def build(entry):
        name = entry["name"].rpartition(".")[2]
        return getattr(torch.optim.lr_scheduler, name)(optimizer, **entry["kwargs"])

    assert isinstance(written, list), "OmegaConf merges no mapping with the list of the parent"
    *parts, last = written
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer, [build(part) for part in parts], last["milestones"]
    )


def record_rates(build) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build(optimizer)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates
