"""Small files in the schema of each layout, and the score of one text."""

import json
from pathlib import Path

from gdpo_tune.core.settings import DataSettings
from gdpo_tune.tasks.text_rewards import RangedReward, build_columns
from tests.support.paths import ROOT

DIRECTORY = ROOT / "tests" / "data"


def score_one(reward: RangedReward, completion: str, tokens: int = 1, limit: int = 1, **data):
    """Return the reward of one completion; `data` are the facts of its problem."""
    (value,) = reward([completion], **build_columns([data], [tokens], limit))
    return value


def read_rows(layout: str) -> list[dict]:
    return [json.loads(line) for line in (DIRECTORY / f"{layout}.jsonl").read_text().splitlines()]


def build_data_settings(layout: str) -> DataSettings:
    return DataSettings(source=str(DIRECTORY / f"{layout}.jsonl"), layout=layout)


def write_enlarged(layout: str, column: str, directory: Path, times: int = 5) -> DataSettings:
    """Write a layout's rows several times, each with its own prompt, so that no split is empty."""
    lines = [
        json.dumps({**row, column: f"({time}) {row[column]}"})
        for time in range(times)
        for row in read_rows(layout)
    ]
    file = directory / f"{layout}.jsonl"
    file.write_text("\n".join(lines))
    return DataSettings(source=str(file), layout=layout)


def read_solutions(layout: str) -> list[str]:
    """Read the correct program of each row of a code layout."""
    take = {
        "mbpp": lambda row: row["code"],
        "mbpp_sanitized": lambda row: row["code"],
        "humaneval": lambda row: row["prompt"] + row["canonical_solution"],
        "apps": lambda row: json.loads(row["solutions"])[0],
        "code_contests": lambda row: row["solutions"]["solution"][0],
    }[layout]
    return [take(row) for row in read_rows(layout)]
