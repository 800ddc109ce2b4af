"""Honest programs: right ones pass, wrong ones fail, and neither meets the lock."""

import pytest

from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits
from gdpo_tune.sandbox.asserts import read_assert

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def sandbox():
    with CodeSandbox() as sandbox:
        yield sandbox


def programs(text):
    """Sections `## name`: a program, then its tests, one a line or each after `# test`."""
    sections = {}
    for section in text.split("## ")[1:]:
        name, _, body = section.partition("\n")
        code, *tests = body.split("# test\n")
        lines = code.splitlines()
        tests += [line for line in lines if line.startswith("assert ")]
        code = "\n".join(line for line in lines if not line.startswith("assert "))
        sections[name] = (code, tuple(tests))
    return sections


RIGHT = programs(r"""
## plain
def f(x): return x + 1
assert f(1) == 2
assert f(-1) == 0
## recursion
def f(n): return n * f(n - 1) if n else 1
assert f(30) == 265252859812191058636308480000000
## deep_recursion
import sys
sys.setrecursionlimit(100_000)
def f(n): return f(n - 1) + 1 if n else 0
assert f(20000) == 20000
## future_annotations
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class P:
    x: int
    y: list[P] | None = None
def f(x): return P(x).x
assert f(3) == 3
## strptime
from datetime import datetime
def f(s): return datetime.strptime(s, '%Y-%m-%d').weekday()
assert f('2024-02-29') == 3
## strftime
import datetime
def f(): return datetime.date(2024, 2, 29).strftime('%A %d %b')
assert f() == 'Thursday 29 Feb'
## frozenset
def f(x): return frozenset(x)
assert f([1, 2, 1]) == {1, 2}
## float
def f(x): return sum([0.1] * x)
assert f(3) == 0.3
## huge
def f(x): return 10 ** x
assert f(40) == 10000000000000000000000000000000000000000
## math
import math
def f(x): return math.isqrt(x), math.gcd(x, 6)
assert f(9) == (3, 3)
## itertools
from itertools import permutations
def f(x): return list(permutations(x))
assert f([1, 2]) == [(1, 2), (2, 1)]
## functools
from functools import lru_cache, reduce
@lru_cache(None)
def f(n): return n if n < 2 else f(n - 1) + f(n - 2)
assert f(50) == 12586269025
## collections
from collections import Counter, deque, defaultdict
def f(s): return Counter(s)
assert f('aab') == {'a': 2, 'b': 1}
## heapq
import heapq
def f(x): return heapq.nsmallest(2, x)
assert f([3, 1, 2]) == [1, 2]
## bisect
import bisect
def f(x, y): return bisect.bisect(x, y)
assert f([1, 2, 3], 2) == 2
## regex
import re
def f(s): return re.findall(r'(?i)[a-z]+', s)
assert f('A1b') == ['A', 'b']
## json
import json
def f(s): return json.loads(s)
assert f('{"a": [1, null]}') == {'a': [1, None]}
## string
import string
def f(): return string.ascii_lowercase[:3]
assert f() == 'abc'
## decimal
from decimal import Decimal, getcontext
getcontext().prec = 5
def f(): return str(Decimal(1) / 3)
assert f() == '0.33333'
## fractions
from fractions import Fraction
def f(): return Fraction(1, 3) + Fraction(1, 6)
assert f() == 0.5
## random
import random
def f(): return random.Random(1).randint(1, 10**9)
assert f() == 144272510
## statistics
import statistics
def f(x): return statistics.median(x)
assert f([1, 9, 2]) == 2
## typing
from typing import List, Optional
def f(x: List[int]) -> Optional[int]: return max(x, default=None)
assert f([]) == None
## enum
import enum
class C(enum.IntEnum):
    A = 2
def f(): return C.A
assert f() == 2
## copy
import copy
def f(x): return copy.deepcopy(x) == x
assert f([[1]]) == True
## operator
import operator
def f(x): return sorted(x, key=operator.itemgetter(1))
assert f([(1, 2), (2, 1)]) == [(2, 1), (1, 2)]
## hashlib
import hashlib
def f(s): return hashlib.md5(s.encode()).hexdigest()
assert f('Hello world') == '3e25960a79dbc69b674cd4ec67a72c62'
## unicode
import unicodedata
def f(s): return unicodedata.normalize('NFD', s).encode('ascii', 'ignore').decode()
assert f('café') == 'cafe'
## encodings
def f(s): return s.encode('utf-16-le').hex() + s.encode('rot13' if 0 else 'latin-1').hex()
assert f('é') == 'e900e9'
## generator
def g(n):
    yield from range(n)
def f(n): return list(g(n))
assert f(3) == [0, 1, 2]
## class
class A:
    def __init__(self, x): self.x = x
    def __add__(self, o): return A(self.x + o.x)
def f(a, b): return (A(a) + A(b)).x
assert f(1, 2) == 3
## async
import contextlib
async def g(): return 5
def f():
    c = g()
    try: c.send(None)
    except StopIteration as e: return e.value
assert f() == 5
## printing
def f(x):
    for i in range(1000): print('debug', i, x)
    return x
assert f(1) == 1
## standard_error
import sys
def f(x):
    print(x, file=sys.stderr)
    sys.stdout.buffer.write(b'x')
    return x
assert f(1) == 1
## big_list
def f(n): return sum(list(range(n)))
assert f(1000000) == 499999500000
## exceptions
def f(x):
    try: return 1 / x
    except ZeroDivisionError: return None
assert f(0) == None
## own_argument
def f(x):
    x.append(1)
    return x
assert f([]) == [1]
assert f([]) == [1]
## builtin_name
def max(x): return sorted(x)[-1]
def f(x): return max(x)
assert f([1, 3, 2]) == 3
## main_guard
def f(x): return x
if __name__ == '__main__':
    print(f(input()))
assert f(1) == 1
## namedtuple
from collections import namedtuple
P = namedtuple('P', 'x y')
def f(): return P(1, 2)
assert f() == (1, 2)
## sleep
import time
def f(x):
    time.sleep(0.01)
    return x
assert f(1) == 1
## environment
import os
def f(): return os.environ.get('HOME', 'none'), os.path.join('a', 'b')
assert f() == ('none', 'a/b')
""")


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes(sandbox, name):
    code, asserts = RIGHT[name]
    assert all(read_assert(test) for test in asserts)
    [result] = sandbox.run_batch([Job(code, asserts=asserts)])
    assert (result.status, result.untrusted_detail) == ("passed", "")
    assert result.verdicts == ("passed",) * len(asserts)


WRONG = {
    "value": ("def f(x): return x", "failed", ("failed", "passed")),
    "type": ("def f(x): return str(x + 1)", "failed", ("failed", "failed")),
    "raises": ("def f(x): return 1 / (x - 1)", "error", ("error", "failed")),
    "missing": ("def g(x): return x", "error", ("error", "error")),
    "syntax": ("def f(x) return x", "error", ("error", "not_run")),
    "name": ("def f(x): return y", "error", ("error", "error")),
    "arity": ("def f(): return 2", "error", ("error", "error")),
    "import": ("import torch\ndef f(x): return 2", "error", ("error", "not_run")),
    "forever": ("def f(x):\n    while True: pass", "timeout", ("error", "not_run")),
    "second_call_forever": (
        "def f(x):\n    while x == 2: pass\n    return x + 1", "timeout", ("passed", "error"),
    ),
    "load_forever": ("while True: pass", "timeout", ("error", "not_run")),
    "sleeps": ("import time\ndef f(x): time.sleep(60)", "timeout", ("error", "not_run")),
    "memory": ("def f(x): return len(bytearray(1 << 40))", "memory", ("error", "error")),
    "recursion": ("def f(x): return f(x)", "error", ("error", "error")),
    "input": ("def f(x): return int(input())", "error", ("error", "error")),
    "empty": ("", "error", ("error", "error")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_gets_its_reason(sandbox, name):
    code, status, verdicts = WRONG[name]
    calls = (Call("f", (1,), 2), Call("f", (2,), 2 if name == "value" else 3))
    limits = Limits(cpu_seconds=0.4, wall_seconds=0.8)
    [result] = sandbox.run_batch([Job(code, calls, limits=limits)])
    assert (result.status, result.verdicts) == (status, verdicts)


CHECKED = programs("""
## in_place
def f(x): x.sort()
# test
a = [2, 1]
f(a)
assert a == [1, 2]
# test
assert a == [1, 2]
## in_place_dict
def f(x): x.pop('a')
# test
d = {'a': 1, 'b': 2}
f(d)
assert d == {'b': 2}
## tolerance
def f(x): return x / 3
# test
assert abs(f(1) - 0.333) < 1e-3
## raises
def f(x):
    if x < 0: raise ValueError('negative')
    return x
# test
try:
    f(-1)
except ValueError as e:
    assert 'negative' in str(e)
else:
    assert False
## loop
def f(x): return x * x
# test
for i in range(20):
    assert f(i) == i ** 2
## two_functions
def g(x): return -x
def f(x): return g(x)
# test
assert f(1) == g(1)
## property
def f(x): return sorted(x)
# test
import random
x = random.sample(range(99), 20)
assert f(x) == sorted(x) and f(f(x)) == f(x)
## keywords
def f(a, b=2): return a - b
# test
assert f(b=1, a=5) == 4
# test
assert f(3) == 1
## identity
def f(x): return x > 0
# test
assert f(1) is True
# test
assert not f(-1)
""")


@pytest.mark.parametrize("name", CHECKED)
def test_a_right_program_passes_free_form_tests(sandbox, name):
    code, asserts = CHECKED[name]
    [result] = sandbox.run_batch([Job(code, asserts=asserts)])
    assert (result.status, result.untrusted_detail) == ("passed", "")
    assert result.verdicts == ("passed",) * len(asserts)


@pytest.mark.parametrize("name", CHECKED)
def test_a_program_that_does_nothing_fails_free_form_tests(sandbox, name):
    [result] = sandbox.run_batch([Job("def f(*a, **k): return 7", asserts=CHECKED[name][1])])
    assert result.status in ("failed", "error")


def test_calls_and_free_form_tests_share_a_job(sandbox):
    job = Job(
        "def f(x): return x + 1",
        calls=(Call("f", (1,), 2), Call("f", (1.5,), 2.5), Call("f", (2,), 99)),
        asserts=("assert f(1) == 2", "assert f(1) > f(0)", "assert f(1) > 2"),
    )
    [result] = sandbox.run_batch([job])
    assert result.verdicts == ("passed", "passed", "failed", "passed", "passed", "failed")
    assert result.status == "failed"


def test_results_come_in_the_order_of_the_jobs_from_several_workers():
    jobs = [
        Job(f"def f(x):\n    for _ in range({(37 * n) % 20000}): pass\n    return x + {n % 3}",
            (Call("f", (1,), 1),))
        for n in range(60)
    ]  # fmt: skip
    with CodeSandbox(workers=2) as sandbox:
        statuses = [result.status for result in sandbox.run_batch(jobs)]
        assert sandbox.run_batch([]) == []
    assert statuses == ["passed" if n % 3 == 0 else "failed" for n in range(60)]


def test_a_seed_and_the_order_of_sets_are_the_same_in_every_sandbox():
    code = (
        "import random\n"
        "def f(): return [random.random(), random.getrandbits(64), str({'a', 'b', 'c', 'd'})]"
    )
    with CodeSandbox() as first:
        # The values are whatever they are; `error` text carries them out for the comparison.
        probe = Job(code + "\ndef g(): raise ValueError(repr(f()))", (Call("g", (), 0),), seed=7)
        [one] = first.run_batch([probe])
        [again] = first.run_batch([probe])
    with CodeSandbox() as second:
        [other] = second.run_batch([probe])
    assert one.untrusted_detail.startswith("ValueError: [0.")
    assert one.untrusted_detail == again.untrusted_detail == other.untrusted_detail


def test_large_jobs_and_answers_fit(sandbox):
    numbers = list(range(100_000))
    code = "# " + "x" * 3_000_000 + "\ndef f(x): return x[::-1]"
    [result] = sandbox.run_batch([Job(code, (Call("f", (numbers,), numbers[::-1]),))])
    assert result.status == "passed"


def test_the_tier_is_told(sandbox):
    assert "seccomp" in sandbox.info.layers
    assert sandbox.info.tier.startswith(("full", "seccomp"))
