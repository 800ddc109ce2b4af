r"""Answers of mathematics: where a completion states one, and whether two of them are equal.

Equality has three steps, from cheap to dear. Numbers are equal by value. Texts are equal if MATH's
judge would call them so, after its rewriting of LaTeX. What remains is a matter for Math-Verify,
which parses both as expressions, intervals, sets or matrices.

An expression can take a computer algebra system for ever. So what is parsed is bounded in size and
in the numbers that it raises to powers, which depends on no clock. Math-Verify runs in a process of
its own under limits of memory and CPU time; if one of its answers reaches them, that answer is
unequal and the process starts again.

Sources: arXiv 2103.03874 and `math_equivalence.py` of github.com/hendrycks/math (MATH); Math-Verify
0.9; `judge.py` of github.com/OpenBMB/OlympiadBench (tolerance); arXiv 2110.14168 (GSM8K).
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import re
import reprlib
import signal
import subprocess
import sys
import threading
from fractions import Fraction

from gdpo_tune.core.errors import GdpoTuneError

# Where a completion states its answer -------------------------------------------------------------

_TAGS = re.compile(r"<(/?)(think|thinking|thought|reasoning|answer)>")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_SAID = re.compile(
    r"\banswers?\b(?:[^\n.:=]{0,60}?\b(?:is|are)\b|\W{0,4}[:=])(?:[\s:*]|\\[\[(]|\$\$)*"
    r"(?:the\b[^\n.:=]{1,80}?\b(?:is|are) )?(?P<answer>\S[^\n]*)",
    flags=re.IGNORECASE,
)
"""`The final answer is 5`, `**Answer:** 5`: how the harnesses of MATH, GSM8K and MMLU ask."""


def find_answer(completion: str, *, reads_open_thoughts: bool = False) -> tuple[str, bool]:
    """Return the answer in a completion, and whether tags mark it; empty if there is none.

    It is the last answer block outside of the thoughts, or else all that follows them. Thoughts
    that never end have no answer, unless they end in an answer block, or `reads_open_thoughts`.

    Source: TRL 1.16, `reasoning_accuracy_reward`, which gives thoughts without an end nothing.
    """
    start, state = 0, ""
    block: slice | None = None
    for tag in _TAGS.finditer(completion):
        closes, name = bool(tag[1]), tag[2]
        if state not in ("", "answer"):
            if closes and name == state:
                start, state = tag.end(), ""
        elif name == "answer":
            if not closes:
                block, state = slice(tag.end(), None), name
            elif block and state:
                block, state = slice(block.start, tag.start()), ""
        elif not state:
            # A chat template may have begun the thoughts, which the completion only ends.
            start, state = tag.end(), "" if closes else name
    if state in ("", "answer"):
        return (completion[block], True) if block else (completion[start:], False)
    _, marked, rest = completion.rpartition("<answer>")
    if marked and (reads_open_thoughts or completion.rstrip().endswith("</answer>")):
        return rest.partition("</answer>")[0], True
    return completion.rpartition("</think>")[2] if reads_open_thoughts else "", False


def extract_answer(completion: str, *, reads_open_thoughts: bool = False) -> str:
    r"""Return the answer of mathematics in a completion; empty if there is none.

    In what `find_answer` returns, the last `\boxed{...}` counts, then what follows the last "answer
    is", then the last `####`; else the whole answer block, or the last line that is not blank.
    Boxes that a comma, "and" or "or" joins are one list, as in Math-Verify.
    """
    text, marked = find_answer(completion, reads_open_thoughts=reads_open_thoughts)
    text = text.strip()
    if box := extract_box(_join_boxes(text)):
        return box
    if said := list(_SAID.finditer(text)):
        answer = said[-1]["answer"]
        while again := _SAID.search(answer):
            answer = again["answer"]
        # A sentence ends at a full stop that a blank follows: `3.5` goes on.
        answer = re.split(r"\.(?:\s|\*|$)|,? (?:because|since|which) ", answer, maxsplit=1)[0]
        return answer.strip()
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return text if marked or not text else text.splitlines()[-1].strip()


_MOST_BOXES = 32
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;]|\\[\])(\[]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)+"
)


def _join_boxes(text: str) -> str:
    """Return the text up to its last box, with that box as a list of all those it is joined to."""
    parts: list[str] = []
    end = len(text)
    for box in reversed([*_BOX.finditer(text)][-_MOST_BOXES:]):
        group = _read_group(text[box.end() : end])
        between = text[box.end() + len(group) : end]
        is_joined = _BETWEEN_BOXES.fullmatch(between) and re.search("[,;]|and|or", between)
        if not group.startswith("{") or (parts and not is_joined):
            break
        parts.insert(0, group[1:-1])
        end = box.start()
    return f"\\boxed{{{', '.join(dict.fromkeys(parts))}}}" if len(parts) > 1 else text


def extract_box(text: str) -> str:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`; empty if there is no end."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return ""
    group = _read_group(text[boxes[-1].end() :])
    return group[1:-1].strip() if group.startswith("{") else group[:1]


def _read_group(text: str) -> str:
    """Return the braces with which a text begins, or a number or character; empty if none close."""
    if not text.startswith("{"):
        found = re.match(r"[-+]?\d+|\\[A-Za-z]+|.", text)
        return found[0] if found else ""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, flags=re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[: match.end()]
    return ""


# Whether two answers are equal --------------------------------------------------------------------

_LONGEST_ANSWER = 300
"""Characters of an answer that is more than text; the longest of MATH's 12,500 has 159."""
_MOST_TIMES_LONGER = 10
"""Length of an answer that is read at all, in multiples of that of the right one, or of the longest
expression: patterns for blanks take quadratic time."""
_MOST_IN_EXPONENT = 2
"""Powers within an exponent: of e, a fourth has more digits than there is memory."""
_DEEPEST = 12
"""Brackets inside each other."""


def is_same_answer(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    """Return whether an answer is `gold`, within the absolute `tolerance` of a number.

    Raises:
        MathVerifyError: Math-Verify is needed, and it is not installed or does not start.
    """
    if len(answer) > _MOST_TIMES_LONGER * max(_LONGEST_ANSWER, len(gold)):
        return False
    if tolerance:
        one, other = (_read_number(clean_answer(text)) for text in (answer, gold))
        if one and other:
            return abs(one[0] - other[0]) <= Fraction(str(tolerance))
    return _is_same(answer, gold)


_OPTION = re.compile(
    r"(?:(?i:option|choice)\s+|\\text(?:bf|rm)?\s*\{)?"
    r"(?:\(?(?P<letter>[A-J])\)[\s}]*|(?P<bare>[A-J])(?:[.:](?=\s)|$))"
    r"(?:\\[ ,;]|:)*\s*(?P<rest>[^\s(}].*)?"
)
"""`(B) 17`, `\\textbf{(B)}\\ 17`, `B. 17`, `option B`: how contests and chat models name an option.

Letters go as far as in MMLU-Pro, whose own extraction reads A to J.
"""


@functools.lru_cache(maxsize=1 << 14)
def _is_same(answer: str, gold: str) -> bool:
    is_letter = re.fullmatch(r"(?:\\text(?:bf|rm)?)?\W*[A-J]\W*", gold)
    option = _OPTION.fullmatch(answer.strip(" $*"))
    if option and (is_letter or not _OPTION.fullmatch(gold)):
        letter = option["letter"] or option["bare"]
        answer = letter if is_letter else option["rest"] or answer
    cleaned = clean_answer(answer), clean_answer(gold)
    if len([text for text in cleaned if "=" in text]) == 1:
        # A formula is compared with a formula, an equation with an equation.
        cleaned = clean_answer(answer, keeps_name=True), clean_answer(gold, keeps_name=True)
    texts = [rewrite_latex(text) for text in cleaned]
    if not texts[0] or texts[0] == texts[1]:
        return bool(texts[0])
    texts = [text[1:-1] if re.fullmatch(r"\([\w.-]+\)", text) else text for text in texts]
    one, other = map(_read_number, cleaned)
    if one and other:
        return _is_same_number(*one, *other)
    bare = [text.replace("%", "").casefold() for text in texts]
    if any(map(has_words, cleaned)):
        return bare[0].strip("().,!") == bare[1].strip("().,!")
    if bare[0] == bare[1] and texts[0].casefold() == texts[0]:
        return True
    # Math-Verify reads no bases, and takes the set {1, 2} for the point (1, 2).
    bases = [re.findall(r"_\{?(\d+)\}?$", text) for text in texts]
    is_set = [bool(re.fullmatch(r"\\\{[^(){}]*\\\}", text)) for text in texts]
    is_point = [bool(re.fullmatch(r"\([^(){}]*\)", text)) for text in texts]
    if (all(bases) and bases[0] != bases[1]) or (any(is_set) and any(is_point)):
        return False
    if not all(map(is_small, cleaned)):
        return False
    return _VERIFIER.is_equal(cleaned[1], cleaned[0])


def find_answer_problem(gold: str) -> str:
    """Return why no answer could be compared with `gold`; empty if one can."""
    cleaned = clean_answer(gold)
    if not rewrite_latex(cleaned):
        return "nothing is left of it without marks"
    if _read_number(cleaned) or has_words(cleaned) or is_small(cleaned):
        return ""
    return (
        f"{reprlib.repr(gold)} is no number and no words, and as an expression it is too large: "
        f"at most {_LONGEST_ANSWER} characters, {_DEEPEST} brackets deep, no sums and integrals"
    )


def _is_same_number(one: Fraction, is_percent: bool, other: Fraction, is_other: bool) -> bool:
    """Return whether numbers agree; a percentage may stand without its sign, or as a share."""
    pairs = [(one, other)]
    if is_percent != is_other:
        pairs.append((one / 100, other) if is_percent else (one, other / 100))
    return any(a == b or _is_rounded(a, b) or _is_rounded(b, a) for a, b in pairs)


def _is_rounded(decimal: Fraction, fraction: Fraction) -> bool:
    """Return whether one is the other to six decimals; source: Math-Verify, `float_rounding`."""
    ends = (10**30 * fraction).denominator == 1
    return not ends and (10**30 * decimal).denominator == 1 and round(decimal - fraction, 6) == 0


WHOLE_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
"""Digits of a number before its point: a comma separates thousands, so `1,2` is a list."""
_CURRENCY = r"[€£¥₹₩]?"  # dollars are gone: they also stand around LaTeX
_EXACT_NUMBER = re.compile(
    rf"(?P<sign>[-+]?){_CURRENCY}(?P<whole>{WHOLE_NUMBER})?(?P<part>\.\d*)?"
    rf"(?:(?:[eE]|\\times10\^)\{{?(?P<power>[-+]?\d{{1,3}})\}}?)?(?P<percent>%?){_CURRENCY}",
    flags=re.ASCII,
)
_EXACT_FRACTION = re.compile(
    r"(?P<sign>[-+]?)\\frac\{(?P<upper>[-+]?\d+)\}\{(?P<lower>[-+]?\d+)\}(?P<percent>%?)",
    flags=re.ASCII,
)


def _read_number(cleaned: str) -> tuple[Fraction, bool] | None:
    """Return `parse_number` of a cleaned answer; a blank behind a comma makes it a list."""
    text = re.sub(r"^\(([\w.-]+)\)$", r"\1", rewrite_latex(cleaned))
    return None if re.search(r"\d,\s+\d", cleaned) else parse_number(text)


def parse_number(text: str) -> tuple[Fraction, bool] | None:
    """Return the exact value of a number, and whether it is a percentage; None for other texts.

    Commas separate thousands only where three digits follow each.
    """
    if len(text) > _LONGEST_ANSWER:
        return None
    if match := _EXACT_FRACTION.fullmatch(text):
        if int(match["lower"]) == 0:
            return None
        value = Fraction(int(match["upper"]), int(match["lower"]))
    else:
        match = _EXACT_NUMBER.fullmatch(text)
        if match is None or not (match["whole"] or (match["part"] or ".") != "."):
            return None
        digits = f"{(match['whole'] or '0').replace(',', '')}{match['part'] or ''}"
        value = Fraction(digits.rstrip(".")) * Fraction(10) ** int(match["power"] or 0)
    return -value if match["sign"] == "-" else value, bool(match["percent"])


_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2012\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u202f\u2009\u3000\n\r\t~$", " "),
        "\u00d7": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "\u222a": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "\u211d": r"\mathbb{R}",
        "≠": r"\ne ",
        "±": r"\pm ",
        "θ": r"\theta ",
        **{sign: f"^{digit}" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
        "½": r"\frac{1}{2}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "°": r"^\circ ",
        "\uff05": "%",
        "\uff0c": ",",
    }
)
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
)
_NOT_UNITS = re.compile(
    r"\b(?:and|or|to|plus|minus|times|over|less|more|than|hundred|thousand|million|billion|trillion"
    r"|dozen|squared|cubed|factorial|half|third|quarter|halves|thirds|quarters|mod|sin|cos|tan|cot"
    r"|sec|csc|log|ln|exp|sqrt|pi|if|when|for|in|base)\b"
)
"""Words behind a number that change it."""
_TRAILING_UNIT = re.compile(
    r"(?<=[\d})%.])(?:\s*\\(?:text|textbf|textit|textrm|textnormal|mathrm|mbox)\s*\{(?P<wrapped>[^{}]*)\}"
    r"|\s+(?P<plain>[A-Za-z]{2,}\.?(?:(?: [A-Za-z]|/)[A-Za-z]+\.?){0,3}))(?:\^\{?\d\}?)?$"
)
_REPLACEMENTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:!\s*|[,;:])|\{,\}(?=\d{3})", ""),
        (r"(?<!\\)\\\s", " "),
        (r"\\[dt]frac", r"\\frac"),
        (r"\\(?:left|right|displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"^\\text\s*\{(\d[^{}]*)\}$", r"\1"),
        (r"\^\s*\{?\s*\\circ\s*\}?\s*[CF]?$|\^\s*\{?\s*\\circ\s*\}?|\s*\\degree|\s+degrees?$", ""),
        (r"\\%|\s*percent$", "%"),
        (r"(?<=\d)\s*(?:\\text\s*\{\s*)?million(?: dollars)?\s*\}?$", r"\\times10^6"),
        (r"(?<=\d)\s*(?:\\text\s*\{\s*)?billion(?: dollars)?\s*\}?$", r"\\times10^9"),
        (r"(?<=\d)\s+(\d+)/(\d+)$", r"\\frac{\1}{\2}"),
    )
)
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:\s\d{3})+(?!\s*[\d/])")
_ASSIGNMENT = re.compile(r"^\s*\\?[A-Za-z](?:_\{?\w\}?)?\s*=(?!=)(?P<value>[^=<>]+)$")


def clean_answer(text: str, *, keeps_name: bool = False) -> str:
    r"""Return an answer without the marks around it and without its unit.

    Marks are those of mathematics and Markdown, a final full stop, and a name with `=` in front,
    unless it `keeps_name`. Unicode becomes LaTeX. As for MATH's judge, units do not count.
    """
    text = re.sub(r"\\\$|(?<!\\)\\(?:[()](?![A-Za-z])|[\[\]])", " ", text)
    text = text.translate(_SYMBOLS).replace("**", " ").strip(" `*")
    while text.endswith((".", ",", ";")) and not text.endswith("\\,"):
        text = text[:-1].rstrip(" `*")
    if box := extract_box(text):
        text = box
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = _SPACED_THOUSANDS.sub(lambda match: re.sub(r"\s", "", match[0]), text.strip())
    unit = _TRAILING_UNIT.search(text)
    if unit and not _NOT_UNITS.search(unit[0].lower()):
        text = text[: unit.start()].rstrip()
    assigned = None if keeps_name else _ASSIGNMENT.match(text)
    return assigned["value"].strip() if assigned else text


def rewrite_latex(text: str) -> str:
    r"""Return a cleaned answer in the one form in which MATH's judge compares texts.

    Source: `_strip_string` of `math_equivalence.py`: `\frac12`, `1/2` and `0.5` become
    `\frac{1}{2}`, and blanks go, but for one between two numbers.
    """
    text = _WRAPPED.sub(r"\1", text).replace("\\\\", "\\")
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    text = re.sub(r"\\sqrt(?=[^\[{])(\\?[A-Za-z]+|.)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac(?=[^{])(.)(?:\{([^{}]*)\}|(.))", r"\\frac{\1}{\2\3}", text)
    text = re.sub(r"\\frac\{([^{}]*)\}(?=[^{])(.)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)
    text = re.sub(r"^([-+]?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    return r"\frac{1}{2}" if text == "0.5" else text


_FUNCTIONS = re.compile(r"arc|sin|cos|tan|cot|sec|csc|log|exp|sqrt|max|min|gcd|lcm|mod|det")


def has_words(text: str) -> bool:
    """Return whether a cleaned answer holds words, which an algebra system takes for products."""
    text = re.sub(r"\\(?:begin|end)\{\w+\*?\}", " ", _WRAPPED.sub(r" \1 ", text))
    text, commands = re.subn(r"\\[A-Za-z]+", " ", text)
    if not commands and re.fullmatch(r"[A-Za-z' .-]{3,}", text.strip()):
        return True
    return re.search("[A-Za-z]{4}", _FUNCTIONS.sub(" ", text)) is not None


def is_small(text: str) -> bool:
    """Return whether an algebra system surely finishes with a cleaned answer.

    Towers of powers, factorials, sums and integrals of a few characters can take it for ever.
    """
    depth = deepest = 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        deepest = max(deepest, depth)
    numbers = max(map(len, re.findall(r"\d+", text)), default=0)
    is_bounded = len(text) <= _LONGEST_ANSWER and deepest <= _DEEPEST and numbers < 60
    if not is_bounded or text.count("^") > 20:
        return False
    if re.search(r"\\(?:sum|prod|int|iint|oint|lim)(?![A-Za-z])", text):
        return False
    if "!" in text or "binom" in text:
        is_nested = re.search(r"[)}]\s*!", text) and ("^" in text or text.count("!") > 1)
        if numbers > 3 or is_nested or re.search(r"!\s*!", text):
            return False
    names = set(re.sub(r"\\[A-Za-z]+|[^A-Za-z]", "", text))
    for power in re.finditer(r"([^\s^])\s*\^\s*", text):
        base, rest = power[1], text[power.end() :]
        exponent = rest if rest.startswith("(") else _read_group(rest) or rest
        # A name stays symbolic whatever its power is. Numbers are computed, brackets expanded.
        expanded = 30 if len(names) < 3 else 8 if len(names) < 5 else 4
        most = 1000 if base.isalpha() else 2000 if base.isdigit() else expanded
        if any(int(number) > most for number in re.findall(r"\d+", exponent)):
            return False
        if not base.isalpha() and re.search(r"[\d)}\]]\s*[\^!]", exponent):
            return False
        if re.match(r"\s*\^", rest[len(exponent) :]) or exponent.count("^") > _MOST_IN_EXPONENT:
            return False
    return True


class MathVerifyError(GdpoTuneError):
    """Math-Verify is not installed here, or does not start."""


class _Verifier:
    """Math-Verify in a process of its own, started when it is first needed; threads share it."""

    _MEMORY = 2 << 30
    _CPU_SECONDS = 20
    """Of one pair of answers: only what `is_small` does not foresee takes a second."""
    _MOST_STARTS = 5

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._lock = threading.Lock()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._reset)

    def is_equal(self, gold: str, answer: str) -> bool:
        """Return whether Math-Verify calls two answers equal; False if one overtaxes it."""
        with self._lock:
            answered, exit_code = "", -signal.SIGKILL
            # Others may kill it, or the machine for its memory; limits end it in another way.
            for _ in range(self._MOST_STARTS):
                if answered or exit_code != -signal.SIGKILL:
                    break
                # A fork must not write into the pipes of its parent.
                if self._process is None or self._owner != os.getpid():
                    self._process, self._owner = self._start(), os.getpid()
                answered = self._exchange(self._process, json.dumps([gold, answer]))
                if not answered:
                    exit_code = self._process.wait()
                    self.close()
            return answered == "true"

    def _reset(self) -> None:
        # A fork has the lock as it was, and not the thread that would release it.
        self._lock, self._process = threading.Lock(), None

    def close(self) -> None:
        """End the process; the next pair starts a new one."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        source = f"{_SERVE}\n_serve({self._MEMORY}, {self._CPU_SECONDS})"
        process = subprocess.Popen(
            [sys.executable, "-c", source, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        if self._exchange(process, "") != "ready":
            reason = process.communicate()[1].strip().rpartition("\n")[2]
            raise MathVerifyError(
                f"answers cannot be compared: {reason or 'the process of Math-Verify ended'}\n"
                "    fix: pip install 'math-verify[antlr4_13_2]'"
            )
        return process

    @staticmethod
    def _exchange(process: subprocess.Popen[str], line: str) -> str:
        assert process.stdin
        assert process.stdout
        try:
            print(line, file=process.stdin, flush=True)
        except BrokenPipeError:
            return ""
        return process.stdout.readline().strip()


def _serve(memory: int, cpu_seconds: int) -> None:
    """Answer pairs of answers until the input ends. The process has this source and no other."""
    import functools
    import json
    import logging
    import os
    import resource
    import sys
    import time
    from typing import Any

    sys.path[:] = json.loads(sys.argv[1])
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    form = [LatexExtractionConfig(boxed_match_priority=-1)]
    # What a parser prints must not be read as an answer, nor fill a pipe that nobody reads.
    answers, nowhere = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    @functools.lru_cache(maxsize=4096)
    def read(text: str) -> list[Any]:
        return parse(f"${text}$", form, parsing_timeout=0)

    for line in sys.stdin:
        if not line.strip():
            print("ready", file=answers, flush=True)
            continue
        until = int(time.process_time()) + 1 + cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        gold, answer = map(read, json.loads(line))
        is_equal = bool(verify(gold, answer, timeout_seconds=0))
        print(json.dumps(is_equal), file=answers, flush=True)


# NOTE: read now, as the file may have been replaced when the process starts again.
_SERVE = inspect.getsource(_serve)
_VERIFIER = _Verifier()
