"""The panel and the cards of the report that lead to one policy."""

import json
import re
import shlex
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import pytest

from gdpo_tune import export, merge, report, train
from gdpo_tune.analysis.front import subtract_estimates
from gdpo_tune.core.text import format_interval
from gdpo_tune.core.trials import Estimate
from gdpo_tune.figures.report_page import (
    build_cards,
    build_choices,
    build_choose_panel,
    list_preferences,
    list_sliders,
)
from gdpo_tune.results.merge_request import parse_shares, parse_target
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.picks import parse_pick, pick_trial
from gdpo_tune.spec.model import Constraint
from tests.support.figures import add_candidates, make_records, make_spec

PARSERS = {module.__name__: module.build_parser for module in (export, merge, report, train)}


@pytest.fixture
def spec(tmp_path):
    constraints = {"mean_length": Constraint(op="<=", bound=60)}
    return make_spec(tmp_path / "a b").model_copy(update={"constraints": constraints})


@pytest.fixture
def records(spec):
    return add_candidates(make_records(spec, 12, replicates=2))


@pytest.fixture
def sweep(spec, records):
    return Sweep(spec, records)


@pytest.fixture
def front(sweep):
    return sweep.front


def test_every_member_fits_between_the_ends_of_every_slider(sweep, front):
    sliders = list_sliders(sweep)
    assert [s.name for s in sliders] == ["correctness", "format", "length", "mean_length"]
    assert [s.comparison for s in sliders] == [">=", ">=", ">=", "<="]
    for slider in sliders:
        values = [member.mean[slider.name].mean for member in front.members]
        assert slider.low <= min(values) <= max(values) <= slider.high
        assert slider.loosest == (slider.low if slider.comparison == ">=" else slider.high)
        assert (slider.high - slider.low) / slider.step >= 10


def test_a_metric_with_one_value_and_one_without_any_have_no_broken_slider(spec, front):
    means = {**front.members[0].mean, "format": Estimate(0.0, 0.0)}
    del means["mean_length"]
    lonely = replace(front, members=(replace(front.members[0], mean=means),))
    found = list_sliders(SimpleNamespace(spec=spec, front=lonely))
    sliders = {slider.name: slider for slider in found}
    assert "mean_length" not in sliders
    assert sliders["format"].step > 0


def test_preferences_are_picks_and_members_have_values_without_rounding(sweep, front):
    for rule in list_preferences(front):
        assert pick_trial(sweep, parse_pick(rule)).record in sweep.records
    data = json.loads(json.dumps(build_choices(sweep)))
    for member, entry in zip(front.members, data["members"], strict=True):
        assert entry["name"] == member.name
        assert entry["values"] == {name: e.mean for name, e in member.mean.items()}


def test_an_empty_front_has_no_panel(spec):
    assert build_choose_panel(Sweep(spec, ())) == ""
    assert build_cards(Sweep(spec, ())) == ""


def list_commands(html, pick, target):
    """Return the commands of a page as words."""
    templates = map(unescape, re.findall(r'data-template="([^"]*)"', html))
    return [shlex.split(t.replace("{pick}", pick).replace("{target}", target)) for t in templates]


def test_every_command_is_one_that_exists(spec, sweep):
    pick, target = "'knee where length >= 0.5'", "--toward 'length >= 0.5 and format >= 0.25'"
    html = build_choose_panel(sweep) + build_cards(sweep)
    commands = list_commands(html, pick, target)
    assert {command[2] for command in commands} == PARSERS.keys()
    for _, _, module, *arguments in commands:
        options = PARSERS[module]().parse_args(arguments)
        assert str(spec.directory) in arguments
        if getattr(options, "pick", None):
            parse_pick(options.pick)
        if getattr(options, "toward", None):
            assert len(parse_target(options.toward, "").conditions) == 2
        if getattr(options, "weights", None):
            shares = parse_shares(options.weights, "--weights", "")
            assert sum(shares.values()) == 1


def test_a_card_has_intervals_and_searched_parameters(sweep, records, front):
    html = build_cards(sweep)
    assert html.count("<article") == len({*map(id, front.members), *map(id, front.baselines)})
    member = next(m for m in front.members if m.role == "search")
    card = html.partition(f'data-candidate="{member.name}"')[2].partition("</article>")[0]
    own, untrained = member.mean["correctness"], front.baselines[0].mean["correctness"]
    assert format_interval(max(0, own.low), min(1, own.high)) in card
    gain = subtract_estimates(own, untrained, front.comparisons)
    assert format_interval(gain.low, gain.high) in card
    assert "learning rate" in card
    assert "reward_weights.correctness" not in card
    assert str(records[member.first].checkpoint) in card
    hidden = re.findall("<article[^>]* hidden>", html)
    assert html.count("<article") - len(hidden) == 1
