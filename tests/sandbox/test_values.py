"""Whatever a candidate returns reaches the trainer as it is, and nothing else passes for it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_tune.sandbox import Call, Job

pytestmark = pytest.mark.integration

SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.fractions(), st.dates()),
    *(st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5), st.binary(max_size=5)),
)
KEYS = st.integers() | st.text(max_size=3) | st.tuples(st.integers(), st.text(max_size=2))
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.sets(KEYS, max_size=3)
        | st.frozensets(KEYS, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def changed(value, data):
    """The value with one difference, anywhere in it."""
    if isinstance(value, (list, tuple)) and value and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(value) - 1))
        items = list(value)
        items[place] = changed(items[place], data)
        return type(value)(items)
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(list(value)))
        return {**value, key: changed(value[key], data)}
    changes = {
        list: lambda: [*value, 0],
        tuple: lambda: (*value, 0),
        type(None): lambda: "None",
        **dict.fromkeys((set, frozenset), lambda: value | {"an element that was not there"}),
        dict: lambda: {**value, "a key that was not there": 0},
        bool: lambda: not value,
        float: lambda: value + 1 if abs(value) < 1e6 else value / 2,
        str: lambda: value + "x",
        bytes: lambda: value + b"x",
    }
    return changes.get(type(value), lambda: [value])()


@settings(max_examples=100)
@given(value=VALUES, data=st.data())
def test_a_value_passes_for_itself_and_for_nothing_else(sandbox, value, data):
    other = changed(value, data)
    calls = (Call("f", (value,), value), Call("f", (value,), other), Call("f", (other,), value))
    names = "from datetime import date\nimport datetime\nfrom fractions import Fraction\n"
    tests = (f"{names}assert f({value!r}) == {value!r}", f"{names}assert f({value!r}) == {other!r}")
    jobs = [Job("def f(x): return x", calls), Job("def f(x): return x", asserts=tests)]
    by_calls, by_tests = sandbox.run_batch(jobs)
    assert by_calls.verdicts == ("passed", "failed", "failed")
    assert by_tests.verdicts == ("passed", "failed")
