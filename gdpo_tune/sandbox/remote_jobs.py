"""Jobs for a service: the programs that it runs, and the verdicts that follow from its answers.

Code and inputs go out. Expected values and expected output stay here, and only a value can come
back: it is compared as the local sandbox's judge compares.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from .asserts import encode_tests
from .inside.candidate_report import CandidateReport, grade_frames, grade_output, grade_value
from .inside.encoding import decode, dump, parse
from .inside.frames import PRINTED, Ending, pack
from .jobs import Job, Result, Stream
from .service import Execution, ServiceFault, quote
from .verdicts import conclude

STALL_BYTES = 128 << 10
"""Output that SandboxFusion reads while a program runs. One that prints more waits for a reader
until its time is up, or ends without the rest."""
SENT_MODULES = ("encoding", "untrusted", "remote")
"""Modules of `inside/` that a program brings along, in the order of imports; the last one runs."""
_UNDECODABLE = "[DecodeError]"
"""SandboxFusion's answer instead of standard output that is not UTF-8."""
_SIGNALS = 64

_BOOT = """import sys
import types

package = types.ModuleType("sandbox_inside")
package.__path__ = []
sys.modules["sandbox_inside"] = package
for name, source in {sources!a}.items():
    module = types.ModuleType("sandbox_inside." + name)
    module.__package__ = "sandbox_inside"
    sys.modules[module.__name__] = module
    exec(compile(source, name, "exec"), module.__dict__)
module.main(
"""


@cache
def _load_boot_code() -> str:
    directory = Path(__file__).parent / "inside"
    sources = {name: (directory / f"{name}.py").read_text("utf-8") for name in SENT_MODULES}
    return _BOOT.format(sources=sources)


class RemoteJob:
    """A job for a service: its program, and the verdicts as they come back.

    The program runs once for all calls and asserts together, or once per stream.

    Raises:
        ValueError: a test is not Python, has neither `assert` nor `raise`, is not a plain call, or
            holds a value nested too deeply.
        TypeError: a call holds a value that cannot be sent.
    """

    def __init__(self, job: Job) -> None:
        self.limits = job.limits
        share = job.limits.test_cpu_seconds / job.limits.cpu_seconds
        if job.streams and share < 1:
            self.limits = replace(job.limits, wall_seconds=job.limits.wall_seconds * share)
        self.comparison = job.comparison
        self.streams = job.streams or (None,)
        """One per run of the program; None for the run that makes the calls."""
        self.nonce = secrets.token_hex(16)
        self.report = CandidateReport(started=True)
        tests = encode_tests((*job.calls, *job.asserts))
        for number, (kind, source, *_) in enumerate(tests):
            if kind == "assert":
                raise ValueError(
                    f"test {number}: a service cannot run this test, because such tests run "
                    f"beside the judge: {source!r}; write a Call or "
                    "`assert f(literals) == literal`, or use the local sandbox"
                )
        calls = [[function, arguments] for _, function, arguments, _ in tests]
        self._expected: list[Any] = decode(parse(dump([expected for *_, expected in tests])))
        self._tests = len(tests) + len(job.streams)
        request = dump([self.nonce, job.code, job.seed, job.limits.output_bytes, calls or None])
        self.program = f"{_load_boot_code()}{request.decode()!a})\n"
        # NOTE: a frame of printed bytes has one byte more.
        self._output_left = job.limits.output_bytes + len(job.streams)
        self._ending = Ending(0, False, 0.0, job.limits.memory_bytes)

    @property
    def is_decided(self) -> bool:
        """True if no other run can add a verdict."""
        return bool(self.report.stop or self._ending.signal or self._ending.timed_out)

    def conclude(self) -> Result:
        """Return the result."""
        return conclude(self.report, self._ending, self._tests, self.limits)

    def add(self, stream: Stream | None, execution: Execution | None) -> None:
        """Record the verdicts of one run; None is a run that printed far more than allowed.

        Raises:
            ServiceFault: nothing shows that the program started, so nothing is known.
        """
        report = self.report
        if execution is None:
            report.stop = "output"
            return
        answer = self._extract_answer(execution)
        is_stalled = len(execution.stdout) >= STALL_BYTES
        self._ending = Ending(
            _read_signal(execution),
            execution.timed_out and not is_stalled,
            self._ending.cpu_seconds + execution.seconds,
            self._ending.peak_bytes,
        )
        if stream is None:
            prefix = f"{self.nonce} ".encode()
            # NOTE: not the text after the last line's end, which is a frame that was cut off.
            lines = answer.split(b"\n")[:-1]
            frames = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
            self._grade(frames, self._expected, partial(grade_value, rule=self.comparison))
            if execution.return_code and report.stop is None:
                report.stop = "ended"
        elif execution.timed_out or self._ending.signal:
            report.stop = "ended"
        elif execution.return_code:
            error, _, text = _get_last_line(execution.stderr).partition(": ")
            report.add("error", error, text)
        else:
            grade = partial(grade_output, rule=self.comparison)
            self._grade([PRINTED + answer], [(stream.expected, stream.tolerance)], grade)
        if is_stalled and report.stop == "ended":
            report.stop = "output"

    def _grade(
        self,
        frames: list[bytes],
        expected: list[Any],
        grade: Callable[[Any, bytes, CandidateReport], None],
    ) -> None:
        answer = io.BytesIO(b"".join(map(pack, frames)))
        grade_frames(answer.read, expected, self._output_left, self.report, grade)
        self._output_left -= sum(map(len, frames))

    def _extract_answer(self, execution: Execution) -> bytes:
        """Return the output after the sign that the program started."""
        _, sign, answer = execution.stdout.partition(f'{self.nonce} ["begin"]\n')
        if sign:
            return answer.encode("utf-8", "surrogatepass")
        if execution.stdout.startswith(_UNDECODABLE):
            # NOTE: output that is not text: no honest frame, and nothing that a test expects.
            return self.nonce.encode() + b" \xff\n"
        # NOTE: the sign comes before any code of the candidate, which cannot withhold it.
        how = "timed out" if execution.timed_out else f"return code {execution.return_code}"
        text = _get_last_line(execution.stderr) or execution.stdout
        raise ServiceFault(f"the program was not started: {how}: {quote(text)}")


def _read_signal(execution: Execution) -> int:
    """Return the signal that ended the program, as Python or a shell reports it; 0 for none."""
    code = execution.return_code
    number = -code if code < 0 else code - 128
    return number if 0 < number <= _SIGNALS and not execution.timed_out else 0


def _get_last_line(text: str) -> str:
    return (text.rstrip().splitlines() or [""])[-1]
