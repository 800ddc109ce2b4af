"""Programs that read standard input: right ones pass and wrong ones fail, however they read."""

import pytest

from gdpo_tune.sandbox import CodeSandbox, Job, Limits, Stream

pytestmark = pytest.mark.integration

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=60, output_bytes=1 << 16)


@pytest.fixture(scope="module")
def sandbox():
    with CodeSandbox() as sandbox:
        yield sandbox


def programs(text):
    """Programs by name; a section starts with `## name`."""
    parts = [part.partition("\n") for part in text.split("## ")[1:]]
    return {name: code for name, _, code in parts}


# Each prints the sum and the largest of n numbers, and has `sum(` once.
SUMS = (
    Stream("3\n1 2 3\n", "6\n3\n"),
    Stream("1\n-5\n", "-5\n-5\n"),
    Stream("4\r\n10 20  30 40", "100\n40"),
    Stream(f"1000\n{' '.join(map(str, range(1000)))}\n", "499500\n999\n"),
)
RIGHT = programs(r"""
## input
n = int(input())
a = list(map(int, input().split()))
print(sum(a))
print(max(a))
## main_guard
def main():
    input()
    a = [int(x) for x in input().split()]
    print(sum(a), max(a), sep="\n")
if __name__ == "__main__":
    main()
## readline
import sys
input = sys.stdin.readline
n = int(input())
a = list(map(int, input().split()))
print(sum(a)); print(max(a))
## star_readline
import sys
n, *a = map(int, sys.stdin.read().split())
sys.stdout.write(f"{sum(a)}\n{max(a)}")
## iterate_over_stdin
import sys
lines = [line.rstrip() for line in sys.stdin]
a = list(map(int, lines[1].split()))
print(sum(a), max(a), sep="\n", end="")
## readlines
from sys import stdin, stdout
n, a = [list(map(int, line.split())) for line in stdin.readlines()]
stdout.write(str(sum(a)) + "\n" + str(max(a)) + "\n")
stdout.flush()
## buffer_read
import sys
data = sys.stdin.buffer.read().split()
a = list(map(int, data[1:]))
sys.stdout.buffer.write(b"%d\n%d\n" % (sum(a), max(a)))
## buffer_readline
import sys
readline = sys.stdin.buffer.readline
n = int(readline())
a = list(map(int, readline().split()))
print("\n".join(map(str, (sum(a), max(a)))), flush=True)
## open_zero
n, *a = map(int, open(0).read().split())
print(sum(a)); print(max(a))
## open_zero_kept_in_a_circle
source = open(0)
def rest(): return source.read()
n, *a = map(int, rest().split())
print(sum(a)); print(max(a))
## open_zero_in_binary
with open(0, "rb") as source:
    a = [int(x) for x in source.read().split()][1:]
with open(1, "w") as sink:
    print(sum(a), file=sink)
    print(max(a), file=sink)
## open_one_without_closing
a = [int(x) for x in open(0)][1:] if False else [int(x) for x in open(0).read().split()[1:]]
sink = open(1, "w")
def keep(): return sink
sink.write(f"{sum(a)}\n{max(a)}\n")
## os_read_by_size
import os
from io import BytesIO
input = BytesIO(os.read(0, os.fstat(0).st_size)).readline
input()
a = list(map(int, input().split()))
os.write(1, f"{sum(a)}\n{max(a)}\n".encode())
## os_read_in_pieces
import os
data = b""
while piece := os.read(0, 100):
    data += piece
n, *a = map(int, data.split())
os.write(1, b"%d\n" % sum(a))
os.write(1, b"%d\n" % max(a))
## replaced_output_flushed_at_exit
import atexit, io, sys
buffer = io.BytesIO()
sys.stdout = io.TextIOWrapper(buffer)
@atexit.register
def write():
    sys.stdout.flush()
    sys.__stdout__.write(buffer.getvalue().decode())
input()
a = list(map(int, input().split()))
print(sum(a)); print(max(a))
## fast_output_of_old
import os, sys
from io import BytesIO, IOBase
BUFSIZE = 8192
class FastIO(IOBase):
    newlines = 0
    def __init__(self, file):
        self._fd = file.fileno()
        self.buffer = BytesIO()
        self.writable = "x" in file.mode or "r" not in file.mode
        self.write = self.buffer.write if self.writable else None
    def read(self):
        while True:
            b = os.read(self._fd, max(os.fstat(self._fd).st_size, BUFSIZE))
            if not b:
                break
            ptr = self.buffer.tell()
            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)
        self.newlines = 0
        return self.buffer.read()
    def readline(self):
        while self.newlines == 0:
            b = os.read(self._fd, max(os.fstat(self._fd).st_size, BUFSIZE))
            self.newlines = b.count(b"\n") + (not b)
            ptr = self.buffer.tell()
            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)
        self.newlines -= 1
        return self.buffer.readline()
    def flush(self):
        if self.writable:
            os.write(self._fd, self.buffer.getvalue())
            self.buffer.truncate(0), self.buffer.seek(0)
class IOWrapper(IOBase):
    def __init__(self, file):
        self.buffer = FastIO(file)
        self.flush = self.buffer.flush
        self.writable = self.buffer.writable
        self.write = lambda s: self.buffer.write(s.encode("ascii"))
        self.read = lambda: self.buffer.read().decode("ascii")
        self.readline = lambda: self.buffer.readline().decode("ascii")
sys.stdin, sys.stdout = IOWrapper(sys.stdin), IOWrapper(sys.stdout)
input = lambda: sys.stdin.readline().rstrip("\r\n")
input()
a = list(map(int, input().split()))
print(sum(a)); print(max(a))
## thread_for_a_deep_stack
import sys, threading
sys.setrecursionlimit(1 << 25)
threading.stack_size(1 << 27)
def main():
    def total(i): return a[i] + total(i + 1) if i < n else 0
    n = int(input())
    a = list(map(int, input().split()))
    assert total(0) == sum(a)
    print(total(0) + sum(a) - total(0))
    print(max(a))
thread = threading.Thread(target=main)
thread.start()
thread.join()
## thread_that_exits
import sys
from threading import Thread
def main():
    input()
    a = list(map(int, input().split()))
    print(sum(a)); print(max(a))
    sys.exit()
main_thread = Thread(target=main, daemon=True)
main_thread.start()
while main_thread.is_alive():
    main_thread.join(0.1)
## exits
import sys
input()
a = list(map(int, input().split()))
print(sum(a)); print(max(a))
sys.exit(0)
## exit_of_site
input()
a = list(map(int, input().split()))
print(sum(a)); print(max(a))
exit()
## quit_in_a_function
def main():
    input()
    a = list(map(int, input().split()))
    print(sum(a)); print(max(a))
    quit(0)
main()
## imported_exit
from sys import exit, stdin
a = list(map(int, stdin.read().split()))[1:]
print(sum(a)); print(max(a))
raise SystemExit
## end_of_input
a = []
try:
    while True:
        a += map(int, input().split())
except EOFError:
    a = a[1:]
print(sum(a)); print(max(a))
## dataclass_and_typing
from __future__ import annotations
from dataclasses import dataclass, field
@dataclass
class Numbers:
    values: list[int] = field(default_factory=list)
    other: Numbers | None = None
input()
a = Numbers(list(map(int, input().split()))).values
print(sum(a)); print(max(a))
## pickled_class
import pickle
class P:
    def __init__(self, values): self.values = values
input()
a = pickle.loads(pickle.dumps(P(list(map(int, input().split()))))).values
print(sum(a)); print(max(a))
## debug_output
import sys
print("n =", n := int(input()), file=sys.stderr)
a = list(map(int, input().split()))
sys.stderr.write("x" * 100_000)
print(sum(a)); print(max(a))
## prompts_nothing
input("")
a = list(map(int, input("").split()))
print(sum(a)); print(max(a))
## changes_what_others_use
import builtins, random, sys
assert sys.argv == ["solution"] and sys.getrecursionlimit() == 1000
assert not hasattr(builtins, "mine") and random.random() == 0.8444218515250481
assert random.random() != 0.8444218515250481
builtins.mine = True
sys.argv.append("x")
sys.setrecursionlimit(5000)
input()
a = list(map(int, input().split()))
random.seed(1)
print(sum(a)); print(max(a))
builtins.print = builtins.input = sys.stdin = None
del builtins.max, builtins.sum
## closes_its_streams
import sys
input()
a = list(map(int, input().split()))
print(sum(a)); print(max(a))
sys.stdin.close(); sys.stdout.close(); sys.stderr.close()
## detaches_its_output
import io, sys
sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="ascii", write_through=True)
input()
a = list(map(int, input().split()))
print(sum(a)); print(max(a))
## input_file_if_there_is_one
import os, sys
if os.path.exists("input.txt"):
    sys.stdin = open("input.txt")
try:
    sys.stdout = open("output.txt", "w")
except OSError:
    pass
input()
a = list(map(int, input().split()))
print(sum(a)); print(max(a))
## printed_by_a_destructor
class Last:
    def __init__(self, a): self.a = a
    def __del__(self): print(sum(self.a), max(self.a), sep="\n")
last = Last(list(map(int, open(0).read().split()[1:])))
last.circle = last
""")


def test_there_are_enough_honest_programs():
    assert len(RIGHT) >= 25
    assert all(code.count("sum(") >= 1 for code in RIGHT.values())


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes_and_a_wrong_one_fails(sandbox, name):
    code = RIGHT[name]
    # The complement of the negative is one more than the number.
    wrong = code.replace("sum(", "-~sum(")
    right, other = sandbox.run_batch([Job(c, streams=SUMS, limits=LIMITS) for c in (code, wrong)])
    assert right.passed, right
    assert other.status in ("failed", "error"), other
    assert set(other.verdicts) <= {"failed", "error"}


BROKEN = {
    "SyntaxError": "print(int(input()) ** 2",
    "ZeroDivisionError": "print(int(input()) ** 2)\n1 / 0",
    "SystemExit: no": "import sys\nprint(int(input()) ** 2)\nsys.exit('no')",
    "SystemExit: 3": "print(int(input()) ** 2)\nexit(3)",
    "EOFError": "n = input()\nprint(int(n) ** 2)\ninput()",
    "ValueError": "import threading\ndef f(): int('x')\nthreading.Thread(target=f).start()",
    "RecursionError": "def f(): f()\nf()",
    "UnicodeEncodeError": "print('\\ud800')",
    "ModuleNotFoundError": "import torch",
    "PermissionError": "print(open('input.txt').read())",
}


@pytest.mark.parametrize("error", BROKEN)
def test_a_program_that_raises_is_an_error_whatever_it_has_printed(sandbox, error):
    code = BROKEN[error]
    [result] = sandbox.run_batch([Job(code, streams=(Stream("3", "9"), Stream("4", "16")))])
    assert result.status == "error"
    assert error in result.untrusted_detail


def test_each_test_has_its_own_verdict(sandbox):
    code = "n = int(input())\nif n == 2: raise ValueError\nprint(n if n < 4 else -n)"
    streams = tuple(Stream(str(n), str(n)) for n in range(1, 6))
    [result] = sandbox.run_batch([Job(code, streams=streams)])
    assert result.verdicts == ("passed", "error", "passed", "failed", "failed")
    assert result.status == "error"


def test_nothing_runs_after_a_test_without_an_answer(sandbox):
    code = "n = int(input())\nprint(n)\nwhile n == 2: pass"
    streams = tuple(Stream(str(n), str(n)) for n in range(1, 5))
    [result] = sandbox.run_batch([Job(code, streams=streams, limits=LIMITS)])
    assert result.verdicts == ("passed", "error", "not_run", "not_run")
    assert result.status == "timeout"


def test_numbers_are_compared_with_the_tolerance_of_their_test(sandbox):
    code = "print(f'Case 1: {float(input()) / 3:.4f}')"
    streams = (Stream("1", "Case 1: 0.33333333", 1e-3), Stream("1", "Case 1: 0.33333333"))
    [result] = sandbox.run_batch([Job(code, streams=streams)])
    assert result.verdicts == ("passed", "failed")


def test_text_is_text_and_bytes_are_bytes(sandbox):
    text = "héllo ✓ \U0001d4b3\n"
    codes = ["print(input())", "import sys\nsys.stdout.buffer.write(b'\\xff' + input().encode())"]
    jobs = [Job(code, streams=(Stream(text, text),)) for code in codes]
    assert [result.status for result in sandbox.run_batch(jobs)] == ["passed", "failed"]


def test_a_million_numbers_come_and_go(sandbox):
    text = " ".join(map(str, range(1_000_000)))
    limits = Limits(cpu_seconds=30, wall_seconds=200, output_bytes=8 << 20)
    program = "import sys\nprint(*map(int, sys.stdin.read().split()))"
    function = "def f(n): return list(range(n))"
    jobs = [
        Job(program, streams=(Stream(text, text),), limits=limits),
        Job(function, asserts=("assert f(10**6) == list(range(10**6))",), limits=limits),
    ]
    assert [result.status for result in sandbox.run_batch(jobs)] == ["passed"] * 2


def test_as_much_as_is_allowed_may_be_printed_by_all_tests_together(sandbox):
    limits = Limits(output_bytes=1000)
    long = Stream("", "x" * 499)
    code = "print('x' * 499)"
    jobs = [Job(code, streams=(long,) * count, limits=limits) for count in (2, 3)]
    within, beyond = sandbox.run_batch(jobs)
    assert within.passed
    assert beyond.status == "output"
    assert beyond.verdicts == ("passed", "passed", "error")


def test_a_long_input_does_not_raise_the_limit_of_the_output(sandbox):
    limits = Limits(output_bytes=1000)
    job = Job("print('x' * 2000)", streams=(Stream("y" * 10_000, "x" * 2000),), limits=limits)
    assert sandbox.run_batch([job])[0].status == "output"


@pytest.mark.parametrize("depth", [1_000, 50_000, 100_000])
def test_recursion_through_c_is_as_deep_as_contests_need(sandbox, depth):
    code = """
import sys
from functools import cache
sys.setrecursionlimit(10**6)
@cache
def f(n): return f(n - 1) + 1 if n else 0
print(f(int(input())))
"""
    limits = Limits(cpu_seconds=10, wall_seconds=60)
    streams = (Stream(str(depth), str(depth)),)
    [result] = sandbox.run_batch([Job(code, streams=streams, limits=limits)])
    assert result.passed, result
