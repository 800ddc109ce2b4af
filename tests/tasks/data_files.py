"""Data files of tests: rows, how they are written, and what a sweep collects from them."""

import gzip
import json

from gdpo_tune.core.settings import DataSettings
from gdpo_tune.tasks.dataset import collect_data


def questions(count, first=0):
    return [{"question": f"No. {i}?", "answer": f"x\n#### {i}"} for i in range(first, count)]


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def write_parquet(file, rows):
    import pyarrow
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def settings_of(source, layout="gsm8k", **others):
    return DataSettings(source=str(source), layout=layout, **others)


def collect(source, layout="gsm8k", **others):
    return collect_data(settings_of(source, layout, **others))


def list_problems(collected):
    return [problem for problems in collected.splits.values() for problem in problems]
