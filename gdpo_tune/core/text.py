"""Words, numbers, values and colours, as messages, the console, figures and MLflow show them."""

from __future__ import annotations

import difflib
import json
import math
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from gdpo_tune.core.trials import Estimate, Params, ParamValue

NO_VALUE = "\N{EM DASH}"
"""Stands where there is no value."""
NOISE = 1e-12
"""Share of a value that rounding leaves of a difference that is 0, at most."""
# The colours stay apart under the common colour-vision deficiencies.
# Source: Okabe and Ito 2008, Color Universal Design; Tol 2021, Colour Schemes (muted); Brewer
# 2003, ColorBrewer (BrBG).
INK = "#1c2430"
MODE_COLORS = {
    "gdpo": "#0072b2",
    "grpo": "#d55e00",
    "grpo_no_std": "#009e73",
    "grpo_batch": "#cc79a7",
    "gdpo_no_batch_norm": "#56b4e9",
    "gdpo_no_std": "#e69f00",
    "dvao": "#882255",
    "saw": "#999933",
    "gd2po": "#332288",
}
"""Normalization mode -> colour."""
CANDIDATE_COLORS = {"checkpoint": "#8c510a", "merge": "#8a00e6"}
"""Role of a candidate that nobody trained -> its colour."""
OTHER_COLOR = "#7f7f7f"
"""Colour of a mode that is not in `MODE_COLORS`."""


def join_turns(turns: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a text of the turns of a chat, distinct from those of other ones; a text as it is."""
    if isinstance(turns, str):
        return turns
    return "\n\n".join(f"{one['role']}: {_describe_turn(one)}" for one in turns)


def _describe_turn(turn: Mapping[str, Any]) -> str:
    calls = [call.get("function", call) for call in turn.get("tool_calls") or ()]
    # A name may have half a character, which no file takes; JSON writes those of arguments.
    named = ((one["name"].encode(errors="replace").decode(), one["arguments"]) for one in calls)
    written = (f"{name}({json.dumps(arguments)})" for name, arguments in named)
    return " ".join([turn["content"], *written]).strip() if calls else turn["content"]


def get_mode(params: Params) -> str:
    """Return the normalization mode that a configuration was trained with."""
    return str(params.get("normalization", "gdpo"))


def format_number(value: float, apart: float = math.inf) -> str:
    """Format a measured value: three decimals below 10, fewer above; a dash if not finite.

    It has more decimals where these hide that it is not 0, or a difference of `apart`.
    """
    return _format_decimals(value, _choose_decimals(value, apart))


def format_estimate(value: Estimate | None) -> str:
    """Format `mean ± standard error`, both to the first digit of the error; a dash for None."""
    if value is None:
        return NO_VALUE
    decimals = _choose_decimals(value.mean, value.se)
    error = _format_decimals(value.se, min(decimals, _choose_decimals(value.se, math.inf)))
    return f"{_format_decimals(value.mean, decimals)} ± {error}"


def format_interval(low: float, high: float) -> str:
    """Return `low to high`."""
    return f"{format_number(low, high - low)} to {format_number(high, high - low)}"


def format_hypervolume(volume: float, interval: Sequence[float], reference: str = "") -> str:
    """Return `0.512 (95 %: 0.431 to 0.540)`, with a word why if the interval ends at the volume."""
    low, high = interval
    span = f"95 %: {format_interval(low, high)}"
    if low < high <= volume:
        span += ", not above it: noise makes a front look better"
    span += reference and f"; reference: {reference}"
    return f"{format_number(volume, high - low)} ({span})"


def _choose_decimals(value: float, apart: float) -> int:
    magnitude = abs(value)
    usual = 3 if magnitude < 10 else 1 if magnitude < 1000 else 0
    if NOISE < magnitude < math.inf and apart <= NOISE * magnitude:  # exact: up to six digits
        digits, _, exponent = f"{magnitude:.5e}".partition("e")
        return max(usual, len(digits.rstrip("0")) - 2 - int(exponent))
    finest = min((x for x in (magnitude / 10, apart) if NOISE < x < 1), default=1)
    return max(usual, math.ceil(-math.log10(finest)))


def _format_decimals(value: float, decimals: int) -> str:
    if not math.isfinite(value):
        return NO_VALUE
    if abs(value) <= NOISE:
        return f"{0:.{min(decimals, 3)}f}"
    if decimals > 5 and abs(value) < 1e-3:
        return _format_exponent(value, max(0, decimals + math.floor(math.log10(abs(value)))))
    return f"{value:,.{decimals}f}"


def _format_exponent(value: float, decimals: int) -> str:
    digits, _, exponent = f"{value:.{decimals}e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"


def format_parameter(value: ParamValue | None) -> str:
    """Format a parameter's value in three significant digits; a dash for None."""
    if value is None:
        return NO_VALUE
    if isinstance(value, bool):
        return str(value).lower()  # as it is written in the file
    if not isinstance(value, float):
        return str(value)
    if 0 < abs(value) < 1e-3:
        return _format_exponent(value, 2)
    return f"{value:.3g}"


def make_printable(text: str) -> str:
    """Replace what no terminal, file or database should get, such as half of a character."""
    return "".join(c if c.isprintable() or c.isspace() else "?" for c in text)


def abbreviate_parameter(name: str) -> str:
    """Shorten a parameter's name for a narrow column: `reward_weights.format` -> `w format`."""
    family, _, reward = name.partition(".")
    if not reward:
        return name.replace("_", " ")
    short = {"reward_weights": "w {}", "conditioning": "{} if"}
    short["conditioning_threshold"] = "{} if at least"
    return short.get(family, "{}").format(reward)


def format_duration(seconds: float) -> str:
    """Format seconds: `45 s`, `7 min 05 s`, `3 h 20 min`, `2 d 4 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_count(count: float, noun: str) -> str:
    """Format a count with its noun: `1 trial`, `2 trials`, `0.5 GPUs`."""
    return f"{count:,.15g} {noun}{'' if count == 1 else 's'}"


def format_percent(share: float) -> str:
    """Format a share (0 to 1): `92 %`."""
    return f"{100 * share:.0f} %"


def format_first(names: Sequence[str], most: int) -> str:
    """Return the first names and how many more there are: `1, 2, 3 and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def join_first(phrases: Sequence[str], most: int = 4) -> str:
    """Return the first phrases and how many more there are: `a; b; c; d; 3 more`."""
    more = [f"{len(phrases) - most} more"] if len(phrases) > most else []
    return "; ".join([*phrases[:most], *more])


def format_list(names: Sequence[str], last: str = "and") -> str:
    """Format names as a list: `a`, `a and b`, `a, b and c`; `last` is the word before the last."""
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with equally wide columns, two blanks apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; a `|` in a cell is escaped."""
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *escaped))


def list_template_columns(template: str) -> list[str]:
    """Return the columns that a prompt template names; `ValueError`: a brace stands alone."""
    parts = list(string.Formatter().parse(template))
    if any(name == "" or form or conversion for _, name, form, conversion in parts):
        raise ValueError("write the name of a column in braces, or {{ for a brace")
    return list(dict.fromkeys(name for _, name, _, _ in parts if name is not None))


def show(value: object) -> str:
    """Return a value as one line of YAML, for a message."""
    return format_flow(value, _show_scalar)


def _show_scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, str):
        return value if value else '""'
    return "null" if value is None else str(value)


def format_flow(value: object, format_scalar: Callable[[object], str]) -> str:
    """Return a value in flow style, on one line."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, object]", value).items()
        inner = (f"{key}: {format_flow(child, format_scalar)}" for key, child in entries)
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, list | tuple):
        elements = cast("Sequence[object]", value)
        return "[" + ", ".join(format_flow(child, format_scalar) for child in elements) + "]"
    return format_scalar(value)


def join_names(names: Iterable[object]) -> str:
    """Return names for the end of a sentence."""
    return ", ".join(show(name) for name in names)


def suggest(word: object, names: Iterable[str]) -> str:
    """Return `did you mean 'steps'? ` where a name is close, else an empty text."""
    close = difflib.get_close_matches(str(word).lower(), list(names), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(repr(name) for name in close)}? " if close else ""


def explain_unknown_name(kind: str, name: object, names: Collection[str]) -> tuple[str, str]:
    """Return reason and fix of a name that is not one of `names`."""
    return f"unknown {kind}", f"{suggest(name, names)}those that exist: {join_names(names)}"


def format_bytes(count: float) -> str:
    """Return a number of bytes with two or three digits, in decimal units."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if count >= 10**power:
            amount = count / 10**power
            return f"{amount:.1f} {unit}" if amount < 100 else f"{amount:,.0f} {unit}"
    return f"{count / 1000:.1f} kB"
