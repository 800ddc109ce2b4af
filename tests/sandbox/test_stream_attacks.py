"""Programs that attack the streams of their input and output: none has an effect."""

import pytest

from gdpo_tune.sandbox import CodeSandbox, Job, Limits, Stream

pytestmark = pytest.mark.integration

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=1.0, output_bytes=1 << 16)
# An attack that should not end by a clock gets clocks that a slow or busy machine does not reach.
PATIENT = Limits(cpu_seconds=10.0, wall_seconds=60.0, output_bytes=LIMITS.output_bytes)

# No attack knows the text after the square.
SECRETS = (Stream("3\n", "9 x4c1\n"), Stream("4\n", "16 x9ae\n"), Stream("5\n", "25 x77b\n"))
TEXT = r"""
## flood_by_print: output
while True: print("x" * 1000)
## flood_by_write: output
import os
while True: os.write(1, b"x" * 1000)
## flood_one_line: output
import sys
while True: sys.stdout.write("x")
## flood_that_ignores_signals: error failed output
import os, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    while True: os.write(1, b"x" * 1000)
except OSError as error:
    print(error.errno)
## flood_elsewhere: output error failed
import os
for number in range(16):
    try:
        for _ in range(1000): os.write(number, b"x" * 1000)
    except OSError: pass
## flood_of_errors: timeout
import os
while True: os.write(2, b"x" * 100_000)
## huge_input: output failed
import os
while True: os.write(0, b"x" * 1000)
## huge_line: failed
print("9" * 20_000)
## read_every_descriptor: failed error violation
import os
found = []
for number in range(2, 16):
    try:
        os.lseek(number, 0, 0)
    except OSError: pass
    if number != 3:
        try: found.append(os.read(number, 100_000))
        except OSError: pass
print(b" ".join(found).decode(), input())
## read_the_judges_side: timeout
import os
print(os.read(3, 1000))
## forged_frames: violation failed
import os, struct
for text in (b">9", b'["value",true]', b'["passed"]', b'["test","passed","",""]'):
    os.write(3, struct.pack("=I", len(text)) + text)
## forged_length: output
import os
os.write(3, b"\xff\xff\xff\xff")
## forged_nesting: violation
import os, struct
text = b"[" * 60_000
os.write(3, struct.pack("=I", len(text)) + text)
## closes_descriptors: crash
import os
os.closerange(0, 16)
## closes_three: crash
import os
os.close(3)
## closes_the_files: crash
import os
os.close(4); os.close(5)
## exits_hard: crash
import os
print(int(input()) ** 2, flush=True)
os._exit(0)
## exits_at_exit: crash
import atexit, os
atexit.register(os._exit, 0)
## raises_at_exit: failed
import atexit, sys
atexit.register(sys.exit, 0)
print(1 / 3)
## spins_at_exit: timeout
import atexit
@atexit.register
def spin():
    while True: pass
## spins_in_a_destructor: timeout
class Spin:
    def __del__(self):
        while True: pass
spin = Spin()
## spins_after_its_answer: timeout
print(int(input()) ** 2, flush=True)
while True: pass
## sleeps: timeout
import time
time.sleep(60)
## search_objects: failed error
import gc, sys
print([o for o in gc.get_objects() if "x4" + "c1" in str(o)[:10_000]][:1])
print([v for f in sys._current_frames().values() for v in f.f_back.f_locals.values()])
## search_frames: failed error
import sys
frame, found = sys._getframe(), []
while frame := frame.f_back:
    found += [str(value) for value in frame.f_locals.values()]
print(*found)
## patch_the_runner: failed error crash violation
import sys
for name, module in list(sys.modules.items()):
    if name.startswith("guest."):
        for key, value in list(vars(module).items()):
            if callable(value): setattr(module, key, lambda *a, **k: None)
## state_for_the_next_test: failed
import sys
seen = sys.modules.setdefault("seen", [])
seen.append(input())
print(seen)
## patched_main: failed error
import sys
class Equal(str):
    def __eq__(self, other): return True
    __hash__ = None
main = sys.modules["__main__"]
main.__dict__["expected"] = Equal("x")
sys.modules["__main__"] = Equal("x")
sys.stdout = Equal("x")
## every_output_replaced: failed
import io, sys
sys.stdout = sys.__stdout__ = sys.stderr = io.StringIO("9 x4c1")
## patched_comparison: failed
import builtins
builtins.all = lambda *a: True
bytes_split = None
print(True)
## truncated_input: failed error
import os
try: os.ftruncate(0, 0)
except OSError: pass
os.lseek(0, 0, 0)
print(os.read(0, 1000))
## looks_for_files: error
print(open("/proc/self/fd/5").read())
## starts_a_process: violation error
import os
print(os.popen("cat /etc/passwd").read())
## recurses_without_end: crash memory error timeout
import sys
sys.setrecursionlimit(10**9)
def f(): return [*map(lambda x: f(), [0])]
f()
## memory: memory error
a = [0] * 10**9
## null: crash
import ctypes
ctypes.string_at(0)
## empty: failed
"""
# Heading (a name and the expected statuses) -> code.
ATTACKS = {part.partition("\n")[0]: part.partition("\n")[2] for part in TEXT.split("## ")[1:]}


def test_there_are_enough_attacks():
    assert len(ATTACKS) >= 12


@pytest.fixture(scope="module")
def attacked():
    """Every attack's result, with that of an honest job after it."""
    honest = Job("print(int(input()) ** 2)", streams=(Stream("3", "9"),), limits=PATIENT)
    jobs = [
        Job(code, streams=SECRETS, limits=LIMITS if "timeout" in heading else PATIENT)
        for heading, code in ATTACKS.items()
    ]
    with CodeSandbox() as sandbox:
        results = sandbox.run_batch([job for attack in jobs for job in (attack, honest)])
    return dict(zip(ATTACKS, zip(results[::2], results[1::2], strict=True), strict=True))


@pytest.mark.parametrize("heading", ATTACKS)
def test_an_attack_passes_no_test(attacked, heading):
    attack, honest = attacked[heading]
    statuses = heading.partition(": ")[2].split()
    assert attack.status in statuses, attack
    assert "passed" not in attack.verdicts
    assert honest.passed, honest
