import copy
import datetime
import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpo_tune.sandbox.guest.protocol import MAX_DEPTH, Opaque, decode, dump, encode, parse

SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.binary()),
    *(st.floats(allow_nan=False), st.complex_numbers(allow_nan=False), st.text(st.characters())),
    *(st.decimals(allow_nan=False), st.fractions(), st.dates(), st.datetimes(), st.timedeltas()),
)
HASHABLE = st.recursive(
    SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3)
    ),
    max_leaves=10,
)


def there_and_back(value):
    return decode(parse(dump(encode(value))))


def same_types(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_types, one, other))
    return True


@given(VALUES)
def test_a_value_comes_back_equal_and_of_its_own_type(value):
    back = there_and_back(value)
    assert back == value
    assert same_types(value, back)


def test_what_json_cannot_say_comes_back():
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back(-math.inf) == -math.inf
    assert math.copysign(1, there_and_back(-0.0)) == -1
    assert there_and_back("\ud800\x00") == "\ud800\x00"
    assert there_and_back({1: "a", "1": "b", (1,): "c"}) == {1: "a", "1": "b", (1,): "c"}
    assert there_and_back(10**5000) == 10**5000


class Colour(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, 1), (Pair(1, 2), (1, 2)), (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}), (defaultdict(int, a=1), {"a": 1}), (bytearray(b"x"), b"x"),
    ],
)  # fmt: skip
def test_subclasses_become_the_built_in_value(value, plain):
    back = there_and_back(value)
    assert back == plain
    assert type(back) is type(plain)


@pytest.mark.parametrize("value", [object(), deque([1]), range(3), iter([1]), int, print])
def test_anything_else_is_opaque_and_refused_when_strict(value):
    back = there_and_back(value)
    assert isinstance(back, Opaque)
    with pytest.raises(AttributeError, match=f"a {type(value).__name__}, which stays in the cand"):
        _ = back.size
    with pytest.raises(TypeError, match="cannot be sent"):
        encode([value], strict=True)


def test_an_opaque_value_equals_nothing_and_has_no_parts():
    one = there_and_back(object())
    assert one != there_and_back(object())
    assert one != "object"
    assert not one == one  # noqa: SIM201 (what `==` says is the matter)
    assert copy.deepcopy({one})
    for reach in (len, iter, lambda value: value[0]):
        with pytest.raises(TypeError, match="Opaque"):
            reach(one)


def test_circles_and_deep_nesting_are_refused():
    circle = []
    circle.append(circle)
    with pytest.raises(ValueError, match="nested"):
        encode(circle)
    deep = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert there_and_back(deep) == deep
    with pytest.raises(ValueError, match="nested"):
        encode([deep])


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"NaN", b"[Infinity]", b"{}", b'{"int":"1","float":"2"}', b"\xff", b"1" * 5000],
)
def test_other_json_is_refused(data):
    with pytest.raises(ValueError):  # noqa: PT011 (each kind has its own message)
        parse(data)


@pytest.mark.parametrize(
    "data",
    [b'{"nothing":1}', b'{"int":5}', b'{"int":"x"}', b'{"tuple":1}', b'{"dict":[1]}',
     b'{"bytes":"0"}', b'{"complex":[]}', b'{"set":[[1]]}'],
)  # fmt: skip
def test_a_forged_value_raises_what_readers_expect(data):
    with pytest.raises((ValueError, TypeError, LookupError)):
        decode(parse(data))


def test_a_set_is_sent_in_one_order_whatever_its_own():
    assert dump(encode({"b", "a", "c"})) == dump(encode({"c", "b", "a"}))


def test_times_keep_their_zone():
    moment = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
    assert there_and_back(moment) == moment
    assert there_and_back(moment).tzinfo is not None
