"""Digests of files and versions that decide results.

Sources: open-r1#450, cookbook#172, wandb#544 and datasets#3297: a reward function, a policy or rows
that change between two starts of one run. Equal content is no change, whatever a file's times say.
"""

import os
import shutil
import time
from pathlib import Path

import pytest

from gdpo_tune.core import content
from gdpo_tune.core.content import hash_files, list_changes, measure_content
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.settings import DataSettings, RolloutSettings, TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig

TASK = """
import json
from pathlib import Path
from scoring import judge

def right(completions, **_):
    from lazily.loaded import bonus
    return [judge(text) + bonus() for text in completions]

def log(text):
    with open("log.jsonl", "a") as file:
        file.write(text)

def rows():
    return map(json.loads, (Path(__file__).parent / "data" / "rows.jsonl").open())
"""
FILES = {
    "mine.py": TASK,
    "scoring.py": "import common.numbers\ndef judge(text): return common.numbers.ONE\n",
    "common/__init__.py": "",
    "common/numbers.py": "from .more import TWO\nONE = 1\n",
    "common/more.py": "TWO = 2\n",
    "lazily/loaded.py": "def bonus(): return 0\n",
    "data/rows.jsonl": '{"prompt": "a"}\n',
    "data/unused.jsonl": "{}\n",
    "unused.py": "",
    "log.jsonl": "",
    "train.jsonl": '{"question": "a", "answer": "1"}\n',
}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    shutil.copytree(POLICIES["embedded"], "policy")
    return tmp_path


def measure(task: str = "mine.py:Mine", policy: str = "./policy", **rollout: str):
    data = DataSettings(source="" if ".py" in task else "train.jsonl", layout="openai_gsm8k")
    others = {"data": data, "rollout": RolloutSettings(**rollout)}
    return measure_content(TrialConfig(task, policy, 0, {}, TrainingSettings(), Path(), **others))


def list_changed(before, **arguments: str) -> list[str]:
    recorded = {name: fact.digest for name, fact in before.items()}
    return list(list_changes(recorded, measure(**arguments)))


@pytest.mark.parametrize(
    "name", [name for name in FILES if name.endswith(".py") and name != "unused.py"]
)
def test_the_tasks_file_and_all_that_it_imports_count(name):
    before = measure()
    with Path(name).open("a") as file:
        file.write("# edited\n")
    assert list_changed(before) == [f"task {name}"]


def test_a_file_that_the_task_reads_counts_and_one_that_it_writes_does_not():
    before = measure()
    for name in ("log.jsonl", "unused.py", "data/unused.jsonl"):
        Path(name).write_text("{}")
    assert list_changed(before) == []
    Path("data/rows.jsonl").write_text('{"prompt": "b"}\n')
    assert list_changed(before) == ["file data/rows.jsonl"]
    Path("data/rows.jsonl").unlink()
    assert list_changed(before) == ["file data/rows.jsonl"]


def test_a_local_reward_model_that_the_task_names_counts():
    Path("mine.py").write_text('from x import RewardModel\nrewards = [RewardModel("policy")]\n')
    before = measure(policy="embedded")
    with Path("policy/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert list_changed(before, policy="embedded") == ["file policy/model.safetensors"]


def test_the_answers_in_local_data_count():
    before = measure("gsm8k")
    Path("train.jsonl").write_text('{"question": "a", "answer": "2"}\n')
    assert list_changed(before, task="gsm8k") == ["data train.jsonl"]
    del before["data train.jsonl"]  # a start of an earlier version has recorded nothing of data
    assert list_changed(before, task="gsm8k") == []


def test_each_file_of_a_policy_counts_and_files_of_a_training_do_not():
    before = measure()
    for name in ("trainer_state.json", "optimizer.bin", "README.md"):
        Path("policy", name).write_text("{}")
    assert list_changed(before) == []
    changed = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    for name in changed:
        file = Path("policy") / name
        file.write_bytes(file.read_bytes() + b" ")
    Path("policy/chat_template.jinja").write_text("{{ messages }}")
    assert sorted(list_changed(before)) == sorted(
        f"policy {name}" for name in (*changed, "chat_template.jinja")
    )


def test_a_file_that_is_written_again_with_equal_content_is_no_change():
    before = measure()
    for file in [*map(Path, FILES), *Path("policy").iterdir()]:
        content_before = file.read_bytes()
        file.unlink()
        file.write_bytes(content_before)
        os.utime(file, (1, 1))
    assert list_changed(before) == []


def test_the_digest_of_a_large_file_is_computed_once_and_again_after_any_change(monkeypatch):
    monkeypatch.setattr(content, "CACHED_FROM", 4)
    monkeypatch.setattr(content, "_RACY_SECONDS", -1.0)
    file = Path("large.bin")
    file.write_bytes(b"12345")
    first = hash_files([file])[file]
    with monkeypatch.context() as unreadable:
        unreadable.setattr(content.hashlib, "file_digest", None)
        assert hash_files([file])[file] == first
    stat = file.stat()
    time.sleep(0.02)  # a tick of the file system's clock
    file.write_bytes(b"54321")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as `cp -p` and `rsync -t` do
    assert hash_files([file])[file] != first


def test_versions_count_by_feature_release_and_only_where_both_are_known(monkeypatch):
    versions = {"torch": "2.9.0+cpu", "trl": "1.0.1"}
    monkeypatch.setattr(content, "version", lambda name: versions.get(name, "1.0"))
    before = measure()
    versions["torch"] = "2.9.1+cu128"
    assert list_changed(before) == []
    versions["trl"] = "1.1.0"
    assert list_changed(before, engine="vllm") == ["version trl"]


def test_what_compares_answers_counts_for_the_task_that_it_judges():
    """Source: Math-Verify's releases, of which each takes other answers for equal."""
    assert measure(task="math")["version math-verify"].digest == "0.9"
    assert "version math-verify" not in measure(task="code")


def test_an_installed_package_that_the_task_imports_counts_by_its_version(monkeypatch):
    Path("mine.py").write_text("from numpy import mean\nimport torch\n")
    before = measure()
    assert before["version torch"].digest.count(".") == 1  # a patch release changes no number
    monkeypatch.setattr(content, "version", lambda name: "0.0.1" if name == "numpy" else "1.0")
    assert "version numpy" in list_changed(before)


def test_a_policy_on_the_hub_counts_by_its_commit_in_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    before = measure("gsm8k", "org/name")
    assert not [name for name in before if name.startswith("hub")]
    reference = tmp_path / "models--org--name" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("a" * 40)
    known = measure("gsm8k", "org/name")
    assert list_changed(before, task="gsm8k", policy="org/name") == []  # it was downloaded since
    reference.write_text("b" * 40)
    assert list_changed(known, task="gsm8k", policy="org/name") == ["hub org/name"]
