"""Programs that attack the sandbox. None knows what `f(1)` should return; none may pass.

Each section is `## name: statuses that may come of it`. Some try in the call, some at import,
most return a wrong value afterwards, as a policy under optimisation would, so that "failed"
and "error" also mean: the attempt had no effect.
"""

TEXT = r"""
## file_read: error
def f(x): return open("/etc/passwd").read()
## file_write: error
def f(x): open("/tmp/sandbox-was-here", "w").write("x")
## file_list: error
import os
def f(x): return os.listdir("/")
## file_unlink: error
import os
def f(x): os.unlink("/tmp/sandbox-victim")
## file_stat: error
import os
def f(x): return os.stat("/etc/passwd").st_size
## proc_self: error
def f(x): return open("/proc/self/environ").read()
## proc_parent_memory: error
import os
def f(x): return open(f"/proc/{os.getppid()}/mem", "rb").read(1)
## cwd: error
import os
def f(x): return os.getcwd()
## environment: failed
import os
def f(x): return "".join(os.environ.values())
## environment_in_c: failed
import ctypes
def f(x):
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return getenv(b"SANDBOX_TEST_SECRET") == b"hunter2" or getenv(b"PATH") is not None
## network_metadata: violation error
import socket
def f(x): socket.create_connection(("169.254.169.254", 80), 1)
## network_loopback: violation
import socket
def f(x): socket.socket().connect(("127.0.0.1", 22))
## network_datagram: violation
import socket
def f(x): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53))
## abstract_socket: violation
import socket
def f(x): socket.socket(socket.AF_UNIX).bind("\0name")
## system: error violation failed
import os
def f(x): return os.system("id")
## exec: error violation
import os
def f(x): os.execv("/bin/sh", ["sh"])
## posix_spawn: error violation
import os
def f(x): os.posix_spawn("/bin/sh", ["sh"], {})
## subprocess: error violation
import subprocess
def f(x): return subprocess.check_output("id")
## fork_bomb: violation
import os
while True: os.fork()
## threads: error
import threading
def f(x):
    for _ in range(100): threading.Thread(target=lambda: None).start()
## kill_parent: violation
import os
def f(x): os.kill(os.getppid(), 9)
## kill_everything: violation
import os
os.kill(-1, 9)
## ptrace: violation
import ctypes, os
def f(x): return ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)
## process_vm_readv: violation
import ctypes, os
def f(x): return ctypes.CDLL(None).process_vm_readv(os.getppid(), 0, 0, 0, 0, 0)
## pidfd_getfd: violation
import ctypes
def f(x): return ctypes.CDLL(None).syscall(438, 3, 3, 0)
## x32: violation
import ctypes
def f(x): return ctypes.CDLL(None).syscall(0x40000000 | 39)
## io_uring: violation
import ctypes
def f(x): return ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(200))
## unshare: violation
import ctypes
def f(x): return ctypes.CDLL(None).unshare(0x10000000)
## mount: violation
import ctypes
def f(x): return ctypes.CDLL(None).mount(b"none", b"/", b"tmpfs", 0, None)
## bpf: violation
import ctypes
import os
number = 321 if os.uname().machine == "x86_64" else 280
def f(x): return ctypes.CDLL(None).syscall(number, 0, 0, 0)
## keyctl: violation
import ctypes
import os
number = 250 if os.uname().machine == "x86_64" else 219
def f(x): return ctypes.CDLL(None).syscall(number, 0, 0)
## another_filter: error violation failed
import ctypes
def f(x): return ctypes.CDLL(None).prctl(22, 1, 0, 0, 0)
## outlive_the_parent: failed
import ctypes
def f(x): return 0 if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0 else None
## executable_memory: error crash
import mmap
def f(x):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xc3")
## make_memory_executable: failed
import ctypes
def f(x):
    libc = ctypes.CDLL(None, use_errno=True)
    return "done" if libc.mprotect(ctypes.c_void_p(id(f) & ~4095), 4096, 7) == 0 else "refused"
## inherited_descriptors: failed
import os
def f(x):
    found = []
    for number in range(3, 64):
        try:
            os.dup(number)
            found.append(number)
        except OSError: pass
    return found if len(found) > 1 else None
## memory_bomb: memory
def f(x):
    held = []
    while True: held.append(bytearray(1 << 24))
## memory_at_once: memory
def f(x): return "x" * (1 << 40)
## raise_the_limits: error failed
import resource
def f(x): resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
## spin: timeout
while True: pass
## sleep: timeout
import time
time.sleep(1000)
## ignored_signals: timeout
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
## bignum: timeout
def f(x): return 7 ** (7 ** 20)
## regex_backtracking: timeout
import re
def f(x): return re.match(r"(a+)+$", "a" * 60 + "b")
## swallowed_exceptions: timeout
def f(x):
    while True:
        try:
            while True: pass
        except BaseException: pass
## output_flood: output
def f(x):
    while True: print("x" * 10000)
## output_flood_at_import: output
import sys
while True: sys.stderr.write("y" * 5000)
## output_of_descriptor: timeout failed output
import os
def f(x):
    for _ in range(1000): os.write(1, b"z" * 10000)
    return 0
## large_answer: output
def f(x): return "x" * (1 << 22)
## large_bignum_answer: output
def f(x): return 1 << (1 << 26)
## deep_answer: error
def f(x):
    nested = []
    for _ in range(100_000): nested = [nested]
    return nested
## deep_source: error memory crash
exec("(" * 100_000)
## circular_answer: error
def f(x):
    circle = {}
    circle[1] = circle
    return circle
## null_dereference: crash
import ctypes
def f(x): ctypes.string_at(0)
## stack_overflow: crash error
import sys
sys.setrecursionlimit(10**9)
class A:
    def __repr__(self): return repr([self])
def f(x): return repr(A())
## abort: crash error
import os
def f(x): os.abort()
## exit_at_import: error
import sys
sys.exit(0)
## hard_exit_at_import: crash
import os
os._exit(0)
## exit_in_call: error
def f(x): raise SystemExit(0)
## hard_exit_in_call: crash
import os
def f(x): os._exit(0)
## equal_to_everything: failed
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def f(x): return Equal()
## int_subclass: failed
class Sly(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Sly(3)
## str_subclass: failed
class Sly(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def f(x): return Sly("a")
## list_subclass: failed
class Sly(list):
    def __eq__(self, other): return True
def f(x): return Sly()
## lying_class: failed error
class Sly:
    __class__ = int
    def __int__(self): return 5
    __index__ = __int__
def f(x): return Sly()
## nan: failed
def f(x): return float("nan")
## patched_builtins: failed error crash
import builtins
builtins.isinstance = lambda *a: True
builtins.type = lambda *a: int
builtins.len = lambda a: 1
def f(x): return 0
## patched_encoder: failed error violation
import json, sys
for module in list(sys.modules.values()):
    for name in ("encode", "dump", "dumps"):
        if hasattr(module, name): setattr(module, name, lambda *a, **k: b'["value", true]')
def f(x): return 0
## patched_comparison: failed
import sys
for module in list(sys.modules.values()):
    if hasattr(module, "matches"): module.matches = lambda *a: True
def f(x): return 0
## forged_frames: failed violation crash
import os, struct
def frame(text): return struct.pack("=I", len(text)) + text
os.write(3, frame(b'["value",true]') * 5)
os._exit(0)
## forged_verdict: violation failed
import os, struct
text = b'{"started": true, "stop": null, "verdicts": ["passed", "passed"]}'
os.write(3, struct.pack("=I", len(text)) + text)
## forged_test_frame: violation failed
import os, struct
text = b'["test", "passed", "", ""]'
os.write(3, struct.pack("=I", len(text)) + text)
## forged_length: output violation crash
import os
os.write(3, b"\xff\xff\xff\xff")
os._exit(0)
## forged_deep_json: violation failed crash
import os, struct
text = b"[" * 500_000
os.write(3, struct.pack("=I", len(text)) + text)
os._exit(0)
## forged_collisions: violation failed crash error
import os, struct
colliding = [b'{"int":"%x"}' % (i * (2**61 - 1)) for i in range(20000)]
text = b'["value",{"set":[' + b",".join(colliding) + b"]}]"
os.write(3, struct.pack("=I", len(text)) + text)
os._exit(0)
## fake_passed: failed
def f(x):
    print("PASSED")
    print("1 passed in 0.01s")
    return "PASSED"
## at_exit: failed
import atexit, os
atexit.register(lambda: os._exit(0))
def f(x): return 0
## frame_walk: failed error
import sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [str(v) for v in frame.f_locals.values()] + [str(k) for k in frame.f_globals]
        frame = frame.f_back
    return next((s for s in seen if "17.25" in s), None)
## collector_scan: failed error
import gc
def f(x):
    for found in gc.get_objects():
        if isinstance(found, (list, tuple)) and 17.25 in [i for i in found if type(i) is float]:
            return 17.25
## memory_scan: failed error timeout
import ctypes, struct
def f(x):
    secret = struct.pack("d", 34.5 / 2)
    here = ctypes.string_at(id(f) & ~0xFFFFF, 1 << 19)
    return 0 if secret in here else None
## peek_at_the_socket: violation error
import socket
def f(x): return socket.socket(fileno=3).recv(100, socket.MSG_PEEK)
## read_the_socket: timeout crash error violation failed
import os
def f(x): return os.read(3, 100)
## fake_clock: timeout
import time
time.time = time.monotonic = time.perf_counter = lambda: 0.0
time.sleep = lambda s: None
while True: pass
## pickle_gadget: error failed
class Gadget:
    def __reduce__(self): return (eval, ("17.25",))
def f(x): return Gadget()
## raise_forever: error
def f(x):
    class E(Exception):
        def __str__(self): raise self
    raise E
## raise_assertion: failed error
def f(x): raise AssertionError
## huge_message: error
def f(x): raise ValueError("m" * 10_000_000)
## replace_exit: timeout failed
import os, time
os._exit = lambda code: time.sleep(1000)
def f(x): return 0
## alarm: crash failed
import signal
signal.setitimer(signal.ITIMER_REAL, 0.001)
def f(x):
    while True: pass
## persist_state: failed
import builtins, math, sys
builtins.planted = math.planted = True
sys.modules["planted"] = math
def f(x): return 0
## find_state: failed
import builtins, math, sys
def f(x):
    return any(hasattr(m, "planted") for m in (builtins, math)) or "planted" in sys.modules
## mutate_arguments: failed
def f(x):
    import sys
    caller = sys._getframe(1).f_locals
    caller["copies"] = [17.25]
    return None
"""


def attacks() -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> (code, statuses that are as expected)."""
    found = {}
    for section in TEXT.split("\n## ")[1:]:
        head, _, code = section.partition("\n")
        name, _, statuses = head.partition(": ")
        found[name] = (code, frozenset(statuses.split()))
    return found
