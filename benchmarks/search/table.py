"""The table of real learning curves: how it is written and read.

A row is one measurement: of one configuration, after so many completions, on validation prompts or,
at the end, on test prompts. `<metric>` is a mean, `<metric>.se` its standard error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.trials import Params

Floats = NDArray[np.float64]
SHIPPED = Path(__file__).with_name("curves_math.parquet")
ERROR = ".se"
MEASURED = ("split", "step", "completions", "seconds", "cpu_seconds")
"""Columns between the parameters and the metrics."""


@dataclass(frozen=True)
class Curves:
    """C configurations, each measured at L levels and on test prompts."""

    params: tuple[Params, ...]
    """C of them; the searched parameters alone."""
    levels: tuple[int, ...]
    """Completions, ascending; the last is the full budget."""
    means: Mapping[str, Floats]
    """Metric -> `[C, L]`, on validation prompts."""
    errors: Mapping[str, Floats]
    """Standard errors of `means`."""
    test_means: Mapping[str, Floats]
    """Metric -> `[C]`, at full budget."""
    test_errors: Mapping[str, Floats]
    cpu_seconds: Floats
    """`[C, L]`, since the start of the training, evaluations included."""


def write_table(
    jobs: Sequence[Mapping[str, Any]], trainings: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Write trainings as Parquet, configuration by configuration; whole or not at all."""
    rows = [
        _build_row(job["configuration"], training["params"], measured)
        for job, training in zip(jobs, trainings, strict=True)
        for measured in (*training["rungs"], training["test"])
    ]
    file = BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, compression="zstd")
    write_atomically(path, file.getvalue())


def _build_row(configuration: int, params: Params, measured: Mapping[str, Any]) -> dict[str, Any]:
    means = {name: mean for name, (mean, _) in measured["values"].items()}
    errors = {f"{name}{ERROR}": error for name, (_, error) in measured["values"].items()}
    about = {name: measured[name] for name in MEASURED}
    return {"configuration": configuration, **params, **about, **means, **errors}


def read_table(path: Path = SHIPPED) -> Curves:
    """What a table holds.

    Raises:
        SystemExit: there is no table.
        ValueError: some configuration was not measured at every level.
    """
    if not path.exists():
        raise SystemExit(f"{path} is not there: python {SHIPPED.parent / 'curves.py'} makes it")
    table = pq.read_table(path)
    columns = table.column_names
    first = columns.index(MEASURED[0])
    names, metrics = columns[1:first], columns[first + len(MEASURED) :]
    metrics = [name for name in metrics if not name.endswith(ERROR)]
    validation = [row for row in table.to_pylist() if row["split"] == "validation"]
    test = [row for row in table.to_pylist() if row["split"] == "test"]
    levels = tuple(sorted({row["completions"] for row in validation}))
    if len(validation) != len(levels) * len(test):
        raise ValueError(f"{path}: {len(validation)} rungs of {len(test)} x {len(levels)}")
    validation.sort(key=lambda row: (row["configuration"], row["completions"]))
    test.sort(key=lambda row: row["configuration"])

    def curves(name: str) -> Floats:
        values = np.array([row[name] for row in validation], dtype=np.float64)
        return values.reshape(len(test), len(levels))

    def ends(name: str) -> Floats:
        return np.array([row[name] for row in test], dtype=np.float64)

    return Curves(
        params=tuple({name: row[name] for name in names} for row in test),
        levels=levels,
        means={name: curves(name) for name in metrics},
        errors={name: curves(name + ERROR) for name in metrics},
        test_means={name: ends(name) for name in metrics},
        test_errors={name: ends(name + ERROR) for name in metrics},
        cpu_seconds=curves("cpu_seconds"),
    )
