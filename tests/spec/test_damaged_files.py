"""1,210 shipped files with random damage: each is read, or refused by its name with a reason."""

import random
import re
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from gdpo_tune import schedule, sweep
from gdpo_tune.core.errors import GdpoTuneError
from tests.support.paths import ROOT

VALUES = (
    *("", "null", "true", "-1", "0", "1", "2", "7.5", "1e400", ".nan", ".inf", "-0.0", "1_0"),
    *("0x1f", "1e-320", "1000000000", "99999999999999999999", "2024-01-01", "2024-13-41", "1:2:3"),
    *("x", "embeded", "gdpo", "''", "' '", "a/b", "a/b--c", "../..", "/", "~", "~nouser/x", "./x"),
    *("/proc/1/mem", "/dev/null", "x.py:A", "s3://bucket/x", "http://[::1", "sqlite:///", "file:x"),
    *('"\\0"', '"\\ud800"', '"\\a"', "é" * 200, "a" * 5000, "a/" * 3000, "9" * 5000, "*a", "&a"),
    *("[]", "{}", "[[]]", "[null]", "{a: 1}", "{a: {b: {c: 1}}}", "[1, x, true]", "[4, 4]"),
    *("{log: [0, 1]}", "{range: [1, 0]}", "{range: [0, 1], step: 0}", "{choices: []}"),
    *("{when: {}}", "{value: 1, when: {beta: 0}}", "{type: halving}", "{type: x}", "{kind: x}"),
    *("!t x", "!!int x"),
    *("{? [a] : 2}", "{<<: 1}", "|", ">", "@", "%", "]", "}", "'", '"', "- a", ": b", "[" * 300),
)
"""Texts that take the place of a value."""
VALUE = re.compile(r"(?<=: )[^#\n{\[]+?(?=\s*(?:#|\n))|(?<=[\[ ])[\w./+-]+(?=[,\]}])", re.MULTILINE)
"""A scalar after its key, or within brackets."""
COLLECTION = re.compile(r"\{[^{}\n]*\}|\[[^\[\]\n]*\]")
NAME = re.compile(
    r"(?<=policy: )(?!\{).*|(?<=extends: ).*|(?<=task: ).*|(?<=storage: ).*|(?<=space: ).*"
    r"|(?<=source: )[^,\n]*|(?<=uri: )[^,\n]*"
)
"""A scalar that may be the path of a file or directory."""
NAMES = (
    *("a" * 5000, "a/" * 3000, "é" * 200, "~nouser/x", "~", "/", ".", "..", "./x", "/dev/null"),
    *("/proc/1/mem", '"\0"', "x.py:A", f"{'a' * 5000}.py:A", "~nouser/x.py:A", "a/b--c", "a/b"),
    *("embeded", "../embedded", f"sqlite:///{'a' * 5000}", f"s3://{'a' * 5000}/x", "' '", "x\ty"),
)
KEY = re.compile(r"[A-Za-z_]\w*(?=:(?: |\n))")
SECTION = re.compile(r"(?<=:)(?: *#[^\n]*)?\n(?:(?P<indent>[ ]+)[^\n]*\n)+")
"""Everything below a key."""


def damage(text, rng):
    """Return a file with one to three random faults."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        text = rng.choice(OPERATIONS)(text, rng)
    data = bytearray(text, "utf-8", "surrogatepass")
    for _ in range(rng.randint(1, 4) if data and not rng.randrange(5) else 0):
        position = rng.randrange(len(data))
        data[position : position + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    return bytes(data[: rng.randrange(len(data))] if data and not rng.randrange(25) else data)


def _replace(text, pattern, rng, new):
    found = list(pattern.finditer(text))
    if not found:
        return text
    match = rng.choice(found)
    return text[: match.start()] + new + text[match.end() :]


def _change(pattern, values):
    """Return an operation that puts one of the values in the place of what the pattern finds."""
    return lambda text, rng: _replace(text, pattern, rng, rng.choice(values))


def _change_key(text, rng):
    names = [match[0] for match in KEY.finditer(text)]
    name = rng.choice(names)
    position = rng.randrange(len(name))
    misspelt = name[:position] + rng.choice("aeiou_.0- ") + name[position + rng.randint(0, 1) :]
    new = rng.choice([misspelt, rng.choice(names), rng.choice(VALUES)])
    return _replace(text, re.compile(rf"\b{name}(?=:)"), rng, new)


def _change_lines(text, rng):
    """Remove, repeat, move or indent a line."""
    lines = text.splitlines(keepends=True)
    line = lines.pop(rng.randrange(len(lines))) if lines else ""
    kept = rng.choice([[], [line, line], [line], [" " * rng.randint(1, 5) + line], ["\t" + line]])
    position = rng.randrange(len(lines) + 1)
    return "".join([*lines[:position], *kept, *lines[position:]])


OPERATIONS = (
    *(_change(VALUE, VALUES), _change(VALUE, VALUES), _change(NAME, NAMES)),
    *(_change(COLLECTION, VALUES), _change_key),
    *(_change(SECTION, [f" {value}\n" for value in VALUES]), _change_lines),
)
FILES = [*(ROOT / "search_spaces").glob("*.yaml"), *(ROOT / "sweeps").glob("*.yaml")]
SEEDS = 110
"""Damaged copies of each file."""

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the shipped files in the current directory, without a network."""

    refusal = MagicMock(side_effect=OfflineModeIsEnabled("no network in tests"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refusal)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("search_spaces", "sweeps"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("original", sorted(FILES), ids=lambda path: path.stem)
def test_a_damaged_file_is_read_or_refused_with_its_name_and_a_reason(original, project, capsys):
    text, file = original.read_text(encoding="utf-8"), Path(original.parent.name, original.name)
    check = check_space if file.parts[0] == "search_spaces" else check_schedule
    for seed in range(SEEDS):
        file.write_bytes(damage(text, random.Random(f"{file}/{seed}")))
        try:
            status, message = check(file), ""
        except GdpoTuneError as error:
            status, message = error.exit_status, str(error)
        except Exception as error:
            raise AssertionError(f"damage {seed} of {file}: {error!r}") from error
        printed = message + capsys.readouterr().err
        assert status in (0, 2), f"damage {seed}"
        if status:
            assert re.search(rf"{file.parent}/\w+\.yaml", printed), f"damage {seed}"
            assert "fix: " in printed or f"{file}: policy " in printed, f"damage {seed}"


def check_space(file):
    return sweep.main([str(file), "--dry-run"])


def check_schedule(file):
    status = schedule.main([str(file), "validate", "--files-only"])
    return status or schedule.main([str(file), "render", "--to", "systemd"])
