"""Reader and writer of the table of real learning curves.

A row is one measurement of one configuration after a number of completions, on validation prompts
or, at the end, on test prompts. `<metric>` is a mean, `<metric>.se` its standard error.
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
    """Measurements of C configurations, at L levels and on test prompts."""

    params: tuple[Params, ...]
    """Searched parameters of each of C configurations."""
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
    """`[C, L]`, since the start of the training, including evaluations."""


def write_table(
    jobs: Sequence[Mapping[str, Any]], trainings: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Write trainings as Parquet, configuration by configuration, atomically."""
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
    """Read a table.

    Raises:
        SystemExit: the file does not exist.
        ValueError: a configuration was not measured at every level.
    """
    if not path.exists():
        raise SystemExit(f"{path} does not exist; python {SHIPPED.parent / 'curves.py'} makes it")
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

    def read_curves(name: str) -> Floats:
        values = np.array([row[name] for row in validation], dtype=np.float64)
        return values.reshape(len(test), len(levels))

    def read_ends(name: str) -> Floats:
        return np.array([row[name] for row in test], dtype=np.float64)

    return Curves(
        params=tuple({name: row[name] for name in names} for row in test),
        levels=levels,
        means={name: read_curves(name) for name in metrics},
        errors={name: read_curves(name + ERROR) for name in metrics},
        test_means={name: read_ends(name) for name in metrics},
        test_errors={name: read_ends(name + ERROR) for name in metrics},
        cpu_seconds=read_curves("cpu_seconds"),
    )
