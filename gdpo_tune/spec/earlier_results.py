"""Results of trainings that were no sweep here: a table, from which a sampler learns."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.trials import Params, ParamValue
from gdpo_tune.core.trl_fields import TRL_FIELDS
from gdpo_tune.spec.space import get_parameter_info

if TYPE_CHECKING:
    from gdpo_tune.spec.model import SweepSpec

TABLE = ".csv"
"""End of the name of a table among the directories of `search.warm_start`."""
_PREFIX = "params_"  # of Optuna's `study.trials_dataframe()`


def read_results(file: Path, spec: SweepSpec) -> list[tuple[Params, dict[str, float]]]:
    """Return the parameters and the metrics of each row; a row that lacks a metric is left out.

    Columns have the names of the sweep file, such as `reward_weights.format` and `correctness`.

    Raises:
        UsageError: the table cannot be read, or lacks a value; the message names the line.
    """
    fix = "\n    fix: a CSV file with a column for each searched parameter and each objective"
    found: list[tuple[Params, dict[str, float]]] = []
    line, metrics = 1, spec.required_metrics
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            for row in (reader := csv.DictReader(stream, strict=True)):
                line = reader.line_num
                cells = {str(n).removeprefix(_PREFIX): str(cell or "") for n, cell in row.items()}
                for name in (*spec.space.searched_domains, *metrics):
                    if name not in cells:
                        raise ValueError(f"no column {name}; there are {', '.join(cells)}")
                if all(cells[name] for name in metrics):
                    named = [n for n in spec.space.domains | TRL_FIELDS if cells.get(n)]
                    params = {name: _read_value(name, cells[name]) for name in named}
                    of_trl = {name: params[name] for name in named if name in TRL_FIELDS}
                    values = {name: _read_number(name, cells[name]) for name in metrics}
                    found.append(({**of_trl, **spec.space.complete(params)}, values))
    except KeyError as error:
        raise UsageError(f"{file}:{line}: no value of {error.args[0]}{fix}") from error
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{file}:{line}: {error}{fix}") from error
    if not found:
        raise UsageError(f"{file}: no row with every metric{fix}")
    return found


def _read_number(name: str, cell: str) -> float:
    if not math.isfinite(value := float(cell)):
        raise ValueError(f"{name} = {cell} is no finite number")
    return value


def _read_value(name: str, cell: str) -> ParamValue:
    info = get_parameter_info(name)
    if info.kind != "choice":
        number = _read_number(name, cell)
        return int(number) if info.kind == "int" and number == int(number) else number
    for choice in info.choices:
        if str(choice).lower() == cell.lower():
            return choice
    raise ValueError(f"{name} = {cell}: must be one of {', '.join(map(str, info.choices))}")
