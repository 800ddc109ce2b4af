"""Fields of TRL's GRPOConfig in a training: each arrives, has an effect, and is TRL's own."""

import dataclasses
import re

import pytest
from trl import GRPOConfig

from gdpo_tune.core.trl_fields import (
    ITERATIONS,
    NO_LIMIT,
    OWN_KEYS,
    REFUSALS,
    TRL_FIELDS,
    TRL_PREFIX,
)
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.training.trl_arguments import build_trainer_arguments
from tests.support.gradients import ROWS, assert_same_steps, run_two_steps
from tests.support.training import SETTINGS, ToyTask, have_same_weights, register_toy_task
from tests.support.trials import build_trial, compute, run_metrics

CHANGED = {
    "delta": 1.05,
    "importance_sampling_level": "sequence",
    "off_policy_mask_threshold": 1e-6,
    "use_bias_correction_kl": False,
    "mask_truncated_completions": True,
    "top_entropy_quantile": 0.3,
    "entropy_coef": 0.5,
    "weight_decay": 0.5,
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "adam_epsilon": 0.1,
}
QUICK = SETTINGS.replace(steps=2, validation_prompts=2, test_prompts=2, samples_per_prompt=1)
IN_THE_LOSS = [name for name in CHANGED if not name.startswith(("adam", "weight"))]


NEWER = ("activation_checkpointing", "activation_checkpointing_kwargs")
"""Fields of Transformers 5.24."""


def test_every_field_of_trl_is_taken_or_has_its_reason():
    """Source: the dataclass itself; a field that a newer TRL adds has no place yet."""
    fields = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    elsewhere = [
        name for names in (*OWN_KEYS.values(), *REFUSALS.values()) for name in names.split()
    ]
    taken = [name.removeprefix(TRL_PREFIX) for name in TRL_FIELDS]
    listed = [name for name in (*elsewhere, *taken) if name in fields or name not in NEWER]
    assert sorted(listed) == sorted(fields)
    assert {*CHANGED, ITERATIONS.removeprefix(TRL_PREFIX)} == {*taken}  # see test_turns.py
    for name, info in TRL_FIELDS.items():
        own = fields[name.removeprefix(TRL_PREFIX)].default
        no_limit = 10**9 if name == ITERATIONS else NO_LIMIT  # each has a token at least
        assert info.default == (no_limit if own is None else own)


def test_the_keys_to_write_instead_exist():
    for key in OWN_KEYS:
        section, _, name = key.partition(".")
        field = SweepSpec.model_fields[section]
        if section == "space":
            assert re.fullmatch(r"\w+", name)
        elif name:
            assert name in field.annotation.model_fields


@pytest.fixture(scope="module")
def toy_task():
    with pytest.MonkeyPatch.context() as patch:
        register_toy_task(patch)
        yield


@pytest.fixture(scope="module")
def trained(policy, toy_task, tmp_path_factory):
    """Train a trial that fields change, each setting once; return its newest checkpoint."""
    results = {}

    def train_once(**fields):
        key = tuple(fields.items())
        if key not in results:
            params = {f"{TRL_PREFIX}{name}": value for name, value in fields.items()}
            params |= {"num_iterations": 2, "learning_rate": 0.03, "beta": 0.5, "loss_type": "grpo"}
            params["training"] = QUICK
            config = build_trial(policy, tmp_path_factory.mktemp("trial"), **params)
            arguments = build_trainer_arguments(config, ToyTask.rewards)
            assert {name: getattr(arguments, name) for name in fields} == fields
            results[key] = run_metrics(config)[1].checkpoint
        return results[key]

    return train_once


@pytest.mark.parametrize("name", CHANGED)
def test_a_field_changes_a_training(trained, name):
    changed = trained(**{name: CHANGED[name]})
    assert not have_same_weights(changed, trained())


def test_fields_at_their_defaults_change_nothing(trained):
    """Source: arithmetic: no ratio and no difference reaches 1e30."""
    defaults = {n.removeprefix(TRL_PREFIX): info.default for n, info in TRL_FIELDS.items()}
    assert have_same_weights(trained(**defaults), trained())


@pytest.mark.parametrize("way", ["packed", "shared"])
@pytest.mark.parametrize("name", IN_THE_LOSS)
def test_a_field_of_the_loss_has_the_gradient_that_trl_computes(policy, tmp_path, whole, name, way):
    """Source: TRL's own pass over padded completions, which `padded` is."""
    changes = {"num_iterations": 2, "learning_rate": 0.3, "beta": 0.5, name: CHANGED[name]}
    with compute(way):
        run = run_two_steps(policy, tmp_path, ROWS, **changes)
    assert_same_steps(run, whole("padded", **changes), rel=1e-5)


@pytest.mark.parametrize("way", ["packed", "shared", "padded"])
def test_a_step_whose_completions_are_all_cut_changes_nothing(policy, tmp_path, way):
    """Source: TRL's field: a completion that was cut is not in the loss, so none is."""
    cut = {"mask_truncated_completions": True, "max_completion_length": 1, "learning_rate": 0.3}
    with compute(way):
        result = run_two_steps(policy, tmp_path, ROWS, **cut)
    assert [bool(gradient.any()) for gradient in result.kept.gradients] == [False, False]
