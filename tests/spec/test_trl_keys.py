"""Fields of TRL in `space:`: fixed, searched, refused with a reason, part of an identity."""

import pytest

from gdpo_tune.core.errors import SpecError
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.space import Choices, Fixed
from gdpo_tune.spec.spec_warnings import list_warnings
from tests.support.spec_cases import GOOD


def test_fields_are_fixed_or_searched_below_trl(load):
    spec = load("space.trl={weight_decay: 0.1, top_entropy_quantile: [0.2, 1.0]}")
    assert spec.space.domains["trl.weight_decay"] == Fixed(value=0.1)
    assert spec.space.domains["trl.top_entropy_quantile"] == Choices(choices=(0.2, 1.0))
    assert "trl.top_entropy_quantile" in spec.space.dimensions
    complete = spec.space.complete_baseline({})
    assert complete["trl.weight_decay"] == 0.1
    assert complete["trl.top_entropy_quantile"] == 1.0


def test_they_are_part_of_the_identity_where_they_change_something(load, tmp_path):
    plain, decayed = load(), load("space.trl.weight_decay=0.1")
    assert not any(name.startswith("trl.") for name in plain.space.domains)
    assert decayed.compute_identity() != plain.compute_identity()
    assert load("space.trl.weight_decay=0").compute_identity() == plain.compute_identity()
    path = tmp_path / "again.yaml"
    path.write_text(decayed.dump_yaml())
    assert load_spec(path).compute_identity() == decayed.compute_identity()


@pytest.mark.parametrize(
    ("written", "reason", "fix"),
    [
        ("{learning_rate: 1e-5}", "space.learning_rate decides it", "write space.learning_rate"),
        ("{max_steps: 9}", "training.steps decides it", "write training.steps instead"),
        ("{top_p: 0.9}", "another distribution than the one that is trained", "remove it"),
        ("{sync_ref_model: true}", "a resumed training would differ", "remove it"),
        ("{wait_decay: 1}", "no field of TRL's GRPOConfig", "did you mean 'weight_decay'"),
        ("{adam_beta1: 1.0}", "too large", "at most 0.9999"),
        ("{delta: 1}", "too small", "above 1"),
        ("{use_bias_correction_kl: maybe}", "unknown value", "use one of false, true"),
        ("0.1", "a group of parameters, not one", "write trl: {weight_decay: 0.1}"),
        (
            "{weight_decay: {range: [0, 1], when: {trl.adam_beta1: [0.8]}}}",
            "this sweep does not set it",
            "add trl.adam_beta1 to space:",
        ),
        ("{cast_lm_head_to_fp32: true}", "TRL casts no head that is tied", "remove it"),
    ],
)
def test_what_is_not_taken_says_why(load, written, reason, fix):
    with pytest.raises(SpecError) as caught:
        load(f"space.trl={written}", "model.dtype=float32")
    [problem] = caught.value.problems
    assert "trl" in problem.key
    assert reason in problem.reason
    assert fix in problem.fix


def test_a_field_stands_beside_a_bad_task(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(GOOD.replace("task: code", "task: cod"))
    with pytest.raises(SpecError) as caught:
        load_spec(path, ["space.trl.weight_decay=0.1"])
    assert all("trl" not in problem.key for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["space.trl.delta=2"], "space.trl.delta: with num_iterations = 1 every ratio is 1"),
        (
            ["space.trl.off_policy_mask_threshold=0.1"],
            "space.trl.off_policy_mask_threshold: with num_iterations = 1 no completion is",
        ),
        (["space.trl.use_bias_correction_kl=[true, false]"], "beta is 0, so it has no effect"),
        (
            ["space.trl.importance_sampling_level=sequence", "space.num_iterations=2"],
            "dapo add the ratio of a completion up once for each of its tokens",
        ),
    ],
)
def test_a_field_without_its_effect_is_warned_about(load, overrides, warning):
    assert any(warning in line for line in list_warnings(load(*overrides)))
    meant = ["space.num_iterations=2", "space.loss_type=grpo", "space.beta=0.1"]
    assert not any(warning in line for line in list_warnings(load(*overrides, *meant)))


def test_a_field_is_set_before_points_and_conditions_name_it(load):
    """A point or a condition may name a field at its default, where the space has it."""
    point = "enqueue=[{trl: {weight_decay: 0}}]"
    assert load("space.trl.weight_decay=0", point).enqueue == ({"trl.weight_decay": 0.0},)
    with pytest.raises(SpecError, match=r"enqueue\[0\].*this sweep does not set it"):
        load(point)
    when = "{weight_decay: {range: [0, 0.1], when: {trl.adam_beta1: 0.9}}, adam_beta1: 0.9}"
    assert "trl.weight_decay" in load(f"space.trl={when}").space.order


def test_the_name_of_a_field_alone_says_where_it_belongs(load):
    with pytest.raises(SpecError, match=r"write trl\.weight_decay"):
        load("space.weight_decay=0.1")
