"""Domains and the space that they form: what is active, what is complete."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_tune.core import registry
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.ledger.trial_encoding import convert_to_distribution
from gdpo_tune.spec.document import read_scalar
from gdpo_tune.spec.load import read_point
from gdpo_tune.spec.space import Choices, Fixed, Space, Uniform
from gdpo_tune.tasks import code
from tests.spec.test_shaping import DEFAULTS


@pytest.mark.parametrize(
    ("domain", "inside", "outside"),
    [
        (Fixed(value=1.0), [1, 1.0], [True, 2, "1"]),
        (Choices(choices=(4, 8)), [4, 8, 8.0], [6, "4", True]),
        (Choices(choices=(1, 2)), [1], [True]),
        (Uniform(low=0.5, high=2.0), [0.5, 1, 2.0], [0.49, 2.01, "1", True, math.nan, math.inf]),
        (Uniform(low=2, high=8, integer=True), [2, 8, 5], [1, 9, 2.5]),
        (Uniform(low=2, high=8, step=3, integer=True), [2, 5, 8], [3, 4]),
        (Uniform(low=0.1, high=0.4, step=0.1), [0.1, 0.2, 0.1 + 0.2, 0.4], [0.15, 0.05]),
        (Uniform(low=0.1, high=0.7, step=0.1), [0.1 + 6 * 0.1], [0.8, math.nan, math.inf, True]),
    ],
)
def test_contains(domain, inside, outside):
    assert all(domain.contains(value) for value in inside)
    assert not any(domain.contains(value) for value in outside)


@pytest.mark.parametrize(
    ("domain", "values", "middle"),
    [
        (Fixed(value="gdpo"), ("gdpo",), "gdpo"),
        (Choices(choices=(8, 4)), (8, 4), 8),
        (Choices(choices=("a", "b", "c")), ("a", "b", "c"), "b"),
        (Uniform(low=2, high=5, integer=True), (2, 3, 4, 5), 4),
        (Uniform(low=2, high=8, step=3, integer=True), (2, 5, 8), 5),
        (Uniform(low=2, high=5, log=True, integer=True), (2, 3, 4, 5), 3),
        (Uniform(low=0.0, high=1.0, step=0.25), (0, 0.25, 0.5, 0.75, 1), 0.5),
        (Uniform(low=0.1, high=0.7, step=0.1), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), 0.4),
        (Uniform(low=0.0, high=1.0, step=0.33333333334),
         (0, 0.33333333334, 0.66666666668, 1), 0.33333333334),
        (Uniform(low=1.0, high=3.0), None, 2.0),
        (Uniform(low=0.01, high=1.0, log=True), None, 0.1),
    ],
)  # fmt: skip
def test_values_and_their_middle(domain, values, middle):
    assert domain.list_values() == values
    assert domain.find_middle() == pytest.approx(middle)
    assert domain.contains(domain.find_middle())


numbers = st.floats(1e-6, 1e3, allow_nan=False)


@given(low=numbers, width=st.floats(1e-3, 10), steps=st.integers(1, 50))
def test_every_value_of_a_grid_is_contained(low, width, steps):
    domain = Uniform(low=low, high=low + steps * width, step=width)
    values = domain.list_values()
    assert values is not None
    assert len(values) == steps + 1
    assert all(domain.contains(value) for value in values)
    assert values[-1] == pytest.approx(domain.high)


decimals = st.decimals(0, 1000, allow_nan=False, places=3)


@given(decimals, decimals.filter(bool), st.integers(1, 50), st.integers(-9, 3))
def test_a_grid_has_the_numbers_that_decimal_arithmetic_gives(low, step, steps, exponent):
    """A grid is what a person writes: exact decimals, each of them rounded to a float once.

    Floats alone miss them: 0.1 + 2 * 0.1 is 0.30000000000000004 (IEEE 754; the tutorial of Python,
    "Floating-Point Arithmetic: Issues and Limitations"). Samplers of Optuna compute in that way.
    """
    low, step = low.scaleb(exponent), step.scaleb(exponent)
    written = [float(low + index * step) for index in range(steps + 1)]
    domain = Uniform(low=written[0], high=written[-1], step=float(step))
    assert domain.list_values() == tuple(written)
    computed = [float(low) + index * float(step) for index in range(steps + 1)]
    assert [domain.align(value) for value in computed] == written
    assert all(domain.contains(value) for value in computed)
    assert domain.align(float(low + step / 2)) == float(low + step / 2)
    distribution = convert_to_distribution(domain)
    assert (distribution.low, distribution.high) == (written[0], written[-1])


def test_a_value_of_a_grid_is_one_value_everywhere(load):
    """A condition, an enqueued point and a sampler's draw have the same float for 0.3."""
    drawn, grid = 0.1 + 2 * 0.1, "space.temperature={range: [0.1, 0.7], step: 0.1}"
    condition = f"space.learning_rate={{log: [1e-4, 1e-3], when: {{temperature: [{drawn}, 0.6]}}}}"
    spec = load(grid, condition, f"enqueue=[{{temperature: {drawn}}}]", "space.group_size=8")
    space = spec.space
    assert space.domains["learning_rate"].when == {"temperature": (0.3, 0.6)}
    assert spec.enqueue == ({"temperature": 0.3},)
    assert read_point(spec, {"temperature": drawn}) == {"temperature": 0.3}
    values = space.domains["temperature"].list_values()
    active = [v for v in values if "learning_rate" in space.select_active({"temperature": v})]
    assert active == [0.3, 0.6]
    rest = {"normalization": "gdpo", "reward_weights.format": 1.0, "learning_rate": 5e-4}
    completed = space.complete({**rest, "temperature": drawn})
    assert (completed["temperature"], completed["learning_rate"]) == (0.3, 5e-4)
    written = load(grid, condition.replace(str(drawn), "0.3"), "space.group_size=8")
    assert written.compute_identity() == spec.compute_identity()


@given(low=st.integers(1, 100), width=st.integers(1, 100), log=st.booleans())
def test_the_middle_of_a_range_is_contained(low, width, log):
    for integer in (True, False):
        domain = Uniform(low=low, high=low + width, log=log, integer=integer)
        assert domain.contains(domain.find_middle())


BETA = "space.beta={log: [1e-3, 1], when: {normalization: gdpo}}"
EPSILON = "space.epsilon={range: [0.1, 0.3], when: {num_iterations: 2}}"
ITERATIONS = "space.num_iterations={choices: [1, 2], when: {normalization: gdpo}}"


def test_order_puts_conditions_first(load):
    space = load(EPSILON, ITERATIONS).space
    assert sorted(space.order) == sorted(space.domains)
    positions = [space.order.index(n) for n in ("normalization", "num_iterations", "epsilon")]
    assert positions == sorted(positions)


def test_dimensions_are_what_is_searched(load):
    space = load("space.group_size=[8]").space
    assert set(space.dimensions) == {"normalization", "reward_weights.format", "learning_rate"}
    assert space.searched_domains == {name: space.domains[name] for name in space.dimensions}


def test_active_follows_a_chain_of_conditions(load):
    space = load(EPSILON, ITERATIONS).space

    def searched(**params):
        return {"num_iterations", "epsilon"} & space.select_active(params).keys()

    assert searched() == set()
    assert searched(normalization="grpo") == set()
    assert searched(normalization="gdpo") == {"num_iterations"}
    assert searched(normalization="gdpo", num_iterations=1) == {"num_iterations"}
    assert searched(normalization="gdpo", num_iterations=2) == {"num_iterations", "epsilon"}
    # An inactive parameter meets no condition, whatever value it is said to have.
    assert searched(normalization="grpo", num_iterations=2) == set()


def test_active_knows_what_is_fixed(load):
    assert "beta" in load("space.normalization=gdpo", BETA).space.select_active({})


def test_complete_fills_fixed_and_inactive(load):
    space = load(BETA).space
    given = {"normalization": "grpo", "group_size": 4, "reward_weights.format": 0.5}
    complete = space.complete({**given, "learning_rate": 1e-4, "beta": 0.5})
    assert complete == {
        **given,
        "learning_rate": 1e-4,
        "beta": 0.0,  # has no effect under grpo, hence its default
        "reward_weights.correctness": 1.0,
        "reward_weights.length": 1.0,
        "temperature": 1.0,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "loss_type": "dapo",
        "num_iterations": 1,
        **DEFAULTS,
    }
    assert complete.keys() == list_parameters(code.TASK).keys()


def test_complete_refuses_an_open_dimension(load):
    given = {"normalization": "gdpo", "group_size": 4, "reward_weights.format": 1}
    with pytest.raises(KeyError, match="no value for learning_rate"):
        load().space.complete(given)


def test_inactive_fixed_value_gives_way_to_the_default(load):
    space = load("space.temperature={value: 0.5, when: {normalization: gdpo}}").space
    rest = {"group_size": 4, "reward_weights.format": 1.0, "learning_rate": 1e-4}
    assert space.complete({"normalization": "gdpo", **rest})["temperature"] == 0.5
    assert space.complete({"normalization": "grpo", **rest})["temperature"] == 1.0


def test_baseline_takes_defaults_where_the_space_holds_them(load):
    space = load(BETA).space
    published = code.TASK.published
    baseline = space.complete_baseline(published)
    assert {name: baseline[name] for name in published} == dict(published)
    assert baseline["group_size"] == 8  # the default, which is among the choices
    assert baseline["learning_rate"] == pytest.approx(math.sqrt(3e-5 * 3e-4))  # which is not
    assert baseline["beta"] == pytest.approx(math.sqrt(1e-3))
    assert baseline.keys() == space.domains.keys()


def test_baseline_may_lie_outside(load):
    space = load("space.normalization=grpo").space
    assert space.complete_baseline({"normalization": "gdpo"})["normalization"] == "gdpo"


def test_reachable_includes_the_default_of_what_can_be_inactive(load):
    space = load("space.group_size={choices: [4, 16], when: {normalization: gdpo}}").space
    assert space.list_reachable("group_size") == (4, 16, 8)
    space = load("space.group_size={choices: [4, 16], when: {normalization: [gdpo, grpo]}}").space
    assert space.list_reachable("group_size") == (4, 16)
    space = load(EPSILON, ITERATIONS).space
    assert space.can_be_inactive("epsilon")
    assert space.list_reachable("learning_rate") is None


def test_what_a_mode_ignores_is_inactive_under_it(load, monkeypatch):
    ignoring = dataclasses.replace(registry.NORMALIZATIONS["grpo"], ignores=("beta", "epsilon"))
    monkeypatch.setitem(registry.NORMALIZATIONS, "grpo", ignoring)
    space = load("space.beta={log: [1e-3, 1]}").space
    assert "beta" in space.select_active({"normalization": "gdpo"})
    assert "beta" not in space.select_active({"normalization": "grpo"})
    assert space.domains["epsilon"] == Fixed(value=0.2)
    # Nothing hangs on the mode if no mode of this space ignores it.
    space = load("space.beta={log: [1e-3, 1]}", "space.normalization=[gdpo, grpo_batch]").space
    assert space.domains["beta"].when == {}


names = st.sampled_from(["normalization", "group_size", "beta", "temperature", "num_iterations"])


@settings(max_examples=50)
@given(
    choices=st.dictionaries(names, st.integers(0, 1)),
    parents=st.lists(st.integers(0, 4), min_size=5, max_size=5),
)
def test_active_is_closed_under_conditions(choices, parents):
    """A parameter is active exactly when all that it hangs on are, with the right values."""
    order = ["normalization", "group_size", "beta", "temperature", "num_iterations"]
    domains = {
        name: Choices(
            choices=(0, 1),
            when={order[parents[index]]: (1,)} if parents[index] < index else {},
        )
        for index, name in enumerate(order)
    }
    space = Space(domains=dict(reversed(domains.items())))
    active = space.select_active(choices)
    for name, domain in domains.items():
        expected = all(parent in active and choices.get(parent) == 1 for parent in domain.when)
        assert (name in active) == expected


# --- configurations that a person adds to a running sweep -----------------------------------------


@pytest.fixture
def spec(load):
    shape = "space.length_shape=[step, overlong]"
    return load(shape, "space.length_cache={range: [0.1, 0.5]}")


def test_a_value_without_effect_is_refused(spec):
    with pytest.raises(UsageError, match=r"length_cache has no effect here: it needs .*overlong"):
        read_point(spec, {"length_shape": "step", "length_cache": 0.3})
    partial = {"length_cache": 0.3}  # the shape may still become overlong
    assert read_point(spec, partial) == partial


def test_a_change_drops_values_that_lose_their_effect(spec):
    base = {"length_shape": "overlong", "length_cache": 0.3, "group_size": 8}
    changed = read_point(spec, {"length_shape": "step"}, base)
    assert changed == {"length_shape": "step", "group_size": 8}


def test_whole_numbers_become_floats_where_the_parameter_is_one(spec):
    point = read_point(spec, {"reward_weights.format": 1})
    assert isinstance(point["reward_weights.format"], float)


@pytest.mark.parametrize(
    ("text", "value"),
    [("2e-4", 2e-4), ("8", 8), ("gdpo", "gdpo"), ("true", True), ("[1", "[1"), ("[1]", "[1]")],
)
def test_a_word_of_the_command_line_is_yaml(text, value):
    assert read_scalar(text) == value
