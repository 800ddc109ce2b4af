"""Files of a trained policy in the form in which its base was written."""

from __future__ import annotations

import json
import os

import pytest

from gdpo_tune.policies.load_policy import find_required_version, restore_base_files

OLDER = {
    "config.json": {"model_type": "llama", "rope_theta": 1000.0, "torch_dtype": "bfloat16"},
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"},
    "special_tokens_map.json": {"eos_token": "<eos>"},
    "tokenizer.json": {"model": {"merges": ["a b"]}},
}
"""As version 4 of Transformers writes them."""
NEWER = {
    "config.json": {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
        "dtype": "float32",
    },
    "tokenizer_config.json": {"tokenizer_class": "TokenizersBackend", "eos_token": "<eos>"},
    "tokenizer.json": {"model": {"merges": [["a", "b"]]}},
}
"""As version 5 writes them: MIGRATION_GUIDE_V5.md of Transformers; vllm#42624."""


def write(directory, files, **changes):
    directory.mkdir()
    for name, content in {**files, **changes}.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def read(directory):
    return {file.name: json.loads(file.read_text()) for file in directory.glob("*.json")}


@pytest.mark.parametrize("base", [OLDER, NEWER], ids=["older", "newer"])
def test_a_policy_has_the_files_of_its_base_and_the_type_of_its_weights(tmp_path, base):
    directory = write(tmp_path / "trained", NEWER)
    os.link(directory / "tokenizer.json", tmp_path / "checkpoint")
    restore_base_files(directory, str(write(tmp_path / "base", base)))
    key = "torch_dtype" if base is OLDER else "dtype"
    changed = {"config.json": {**base["config.json"], key: "float32"}}
    assert read(directory) == {**base, **changed}
    assert json.loads((tmp_path / "checkpoint").read_text()) == NEWER["tokenizer.json"]
    assert find_required_version(directory) == (None if base is OLDER else 5)


def test_an_adapter_gets_the_tokenizer_alone(tmp_path):
    directory = write(tmp_path / "trained", {"adapter_config.json": {"r": 4}})
    restore_base_files(directory, str(write(tmp_path / "base", OLDER)))
    assert read(directory).keys() == {*OLDER, "adapter_config.json"} - {"config.json"}


def test_the_chat_template_is_that_of_the_training(tmp_path):
    """Versions read `chat_template.jinja` or the key, so both have to say the same."""
    directory = write(tmp_path / "trained", NEWER)
    (directory / "chat_template.jinja").write_text("new")
    settings = {**OLDER["tokenizer_config.json"], "chat_template": "old"}
    restore_base_files(
        directory, str(write(tmp_path / "base", {**OLDER, "tokenizer_config.json": settings}))
    )
    assert read(directory)["tokenizer_config.json"]["chat_template"] == "new"


def test_a_base_that_is_not_at_hand_changes_nothing(tmp_path):
    directory = write(tmp_path / "trained", NEWER)
    restore_base_files(directory, "nobody/nothing")
    assert read(directory) == NEWER


@pytest.mark.parametrize(
    "other", [{"model_type": "vision"}, {"quantization_config": {"bits": 4}}], ids=str
)
def test_settings_of_other_weights_are_not_taken(tmp_path, other):
    """Loading takes the text model out of one that sees, and dequantizes."""
    directory = write(tmp_path / "trained", NEWER)
    settings = {**OLDER["config.json"], **other}
    restore_base_files(directory, str(write(tmp_path / "base", {**OLDER, "config.json": settings})))
    assert read(directory) == {**OLDER, "config.json": NEWER["config.json"]}
