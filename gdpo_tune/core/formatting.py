"""Text forms of measured values, parameters and durations: the same in every room."""

from __future__ import annotations

import math

from gdpo_tune.core.trials import Estimate, Params, ParamValue

NO_VALUE = "\N{EM DASH}"
"""Stands where there is no value."""
SHORT_FORMS = {
    "reward_weights": "w {}",
    "conditioning": "{} if",
    "conditioning_threshold": "{} if at least",
}
"""Short forms of the parameters that exist once per reward."""


def mode_of(params: Params) -> str:
    """Return the normalization mode of a configuration."""
    return str(params.get("normalization", "gdpo"))


def format_number(value: float) -> str:
    """Return a value with three decimals below 10 and fewer above; a dash if it is not finite."""
    return f"{value:,.{_count_decimals(value)}f}" if math.isfinite(value) else NO_VALUE


def format_estimate(value: Estimate | None) -> str:
    """Return `mean ± standard error` with as many decimals in both; a dash for None."""
    if value is None:
        return NO_VALUE
    return f"{format_number(value.mean)} ± {value.se:,.{_count_decimals(value.mean)}f}"


def format_interval(low: float, high: float) -> str:
    """Return `low to high`."""
    return f"{format_number(low)} to {format_number(high)}"


def _count_decimals(value: float) -> int:
    magnitude = abs(value)
    return 3 if magnitude < 10 else 1 if magnitude < 1000 else 0


def format_count(count: int, noun: str) -> str:
    """Return `1 trial`, `2 trials`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_percent(share: float) -> str:
    """Return a share (0 to 1) as `92 %`."""
    return f"{100 * share:.0f} %"


def format_parameter(value: ParamValue | None) -> str:
    """Return a parameter's value in three significant digits; a dash for None."""
    if value is None:
        return NO_VALUE
    if isinstance(value, bool):
        return str(value).lower()  # as it is written in the file
    if not isinstance(value, float):
        return str(value)
    if 0 < abs(value) < 1e-3:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:.3g}"


def abbreviate(name: str) -> str:
    """Return a name for a narrow column: `reward_weights.format` becomes `w format`."""
    family, _, reward = name.partition(".")
    return SHORT_FORMS.get(family, "{}").format(reward) if reward else name.replace("_", " ")


def format_duration(seconds: float) -> str:
    """Return a duration as `45 s`, `7 min 05 s`, `3 h 20 min` or `2 d 4 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
