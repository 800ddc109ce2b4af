import json
import os
import shutil
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.policies import load_policy as loading
from gdpo_tune.policies.load_policy import (
    check_policy,
    check_policy_available,
    describe_policy,
    find_required_version,
    load_policy,
    read_position_limit,
    resolve_policy,
    restore_base_files,
)
from tests.support.tables import cases


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded policy that a test may damage."""
    return shutil.copytree(resolve_policy("embedded"), tmp_path / "policy")


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_names():
    assert resolve_policy("embedded").endswith("policies/embedded")
    assert resolve_policy("Qwen/Qwen2.5-1.5B-Instruct") == "Qwen/Qwen2.5-1.5B-Instruct"
    assert resolve_policy("runs/code/checkpoint") == "runs/code/checkpoint"


def test_good_names_pass(folder, monkeypatch):
    def download(*_):
        raise AssertionError("the network is not needed")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for name in ("embedded", "Qwen/Qwen2.5-1.5B-Instruct", str(folder)):
        check_policy(name)
    for name in ("embedded", str(folder)):
        check_policy_available(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("embeded", "Did you mean 'embedded'"),
        *((name, r"config\.json") for name in ("/no/such/folder", "./nothing", "a/b/c", "")),
    ],
)
def test_what_is_neither_folder_nor_hub_id_is_refused(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError, match=message):
        check_policy(name)


@pytest.mark.parametrize("reason", ["Permission denied", "File name too long"])
def test_a_folder_that_cannot_be_reached_is_refused(folder, monkeypatch, reason):
    # Root may search every folder, hence no `chmod`.
    def exists(path):
        raise OSError(13, reason, str(path))

    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(PolicyError, match=f"cannot be reached: {reason}"):
        check_policy(str(folder))


def edit_config(folder, **changes):
    edit(folder / "config.json", lambda content: content.update(changes))


def forget(folder, token):
    edit(folder / "tokenizer_config.json", lambda content: content.pop(token))


def cut_weights(folder, kept):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept] or b"version https://git-lfs.github.com/spec/v1")


TORN = "is torn, or it is a pointer of git-lfs"  # which is a text in the file's place


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda f: (f / "tokenizer_config.json").unlink(), r"no tokenizer_config\.json"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json"),
        (lambda folder: forget(folder, "eos_token"), r"no end token: set tokenizer\.eos_token"),
        *((lambda folder, n=n: cut_weights(folder, n), TORN) for n in (0, 7, 400, -1)),
    ],
)
def test_a_damaged_folder_is_refused_before_it_is_loaded(folder, damage, message):
    damage(folder)
    with pytest.raises(PolicyError, match=message):
        check_policy(str(folder))


def test_a_file_and_a_misspelt_directory_are_refused(folder):
    with pytest.raises(PolicyError, match="is a file"):
        check_policy(str(folder / "config.json"))
    (folder.parent / "plan").mkdir()
    with pytest.raises(PolicyError, match=f"Did you mean '{folder}'"):
        check_policy(str(folder.with_name("polcy")))


def rename_weights(folder):
    weights = load_file(folder / "model.safetensors")
    renamed = {f"base_model.model.{key}": value for key, value in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def add_token(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<one_more>"])
    tokenizer.save_pretrained(folder)


def change_tokenizer(folder):
    # A folder of type qwen2 gets a tokenizer class that brings its own pre-tokenizer.
    edit(folder / "tokenizer_config.json", lambda c: c.update(tokenizer_class="Qwen2Tokenizer"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        # Transformers raises errors of many kinds, of which Ray cannot send some.
        (lambda f: edit_config(f, hidden_size="128"), r"cannot be loaded: .+Check the name"),
        (lambda f: edit_config(f, num_attention_heads=0), r"cannot be loaded: .+Check the name"),
        (lambda f: edit_config(f, hidden_act="sile"), r"cannot be loaded: .+Check the name"),
        (lambda f: edit_config(f, hidden_size=64), "cannot be loaded"),
        (rename_weights, r"lack \d+ weights"),
        (add_token, "resize_token_embeddings"),
        (change_tokenizer, "splits text differently"),
    ],
)
def test_a_policy_that_would_load_as_another_one_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(PolicyError, match=message):
        load_policy(str(folder))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_quantized_weights_are_refused(folder, monkeypatch, method):
    """Source: peft#476; `quantization_config` of transformers names the method."""
    edit_config(folder, quantization_config={"quant_method": method})
    with pytest.raises(PolicyError, match=rf"weights are quantized \({method}\)"):
        check_policy(str(folder))
    found = str(folder / "config.json")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: found)
    with pytest.raises(PolicyError, match=rf"weights are quantized \({method}\)"):
        check_policy_available("org/quantized")


def test_a_tokenizer_of_the_hub_that_splits_otherwise_is_found(folder, monkeypatch):
    """Source: transformers#45488: `AutoTokenizer` takes a class by the model's type."""
    other = shutil.copytree(folder, folder.parent / "other")
    edit(other / "tokenizer.json", lambda content: content.update(normalizer={"type": "Lowercase"}))
    monkeypatch.setattr(loading, "resolve_policy", lambda name: str(folder))
    monkeypatch.setattr(loading, "find_local_directory", lambda *_: other)
    with pytest.raises(
        PolicyError, match=r"splits text differently from the saved tokenizer\.json"
    ):
        load_policy("embedded")


def test_a_policy_without_a_pad_token_pads_with_its_end_token(folder):
    """Source: trl#3287; TRL's GRPOTrainer sets pad_token = eos_token where there is none."""
    forget(folder, "pad_token")
    check_policy(str(folder))
    tokenizer = load_policy(str(folder))[1]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id is not None


def test_tokens_of_an_older_folder_are_found(folder):
    forget(folder, "eos_token")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    check_policy(str(folder))


def test_a_tokenizer_class_may_have_an_end_token_of_its_own(folder):
    """Source: the published files of gpt2, whose tokenizer_config.json names no token."""
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    edit_config(folder, eos_token_id=1)
    check_policy(str(folder))


@cases("policies", "positions")
def test_positions_are_found_under_every_name(folder, limit):
    """Source: ms-swift#6211; GPT2Config.n_positions, MptConfig.max_seq_len, LlavaConfig.

    For the switch: llama.cpp#24823, and `_longrope_frequency_update` of transformers.
    """
    edit(folder / "config.json", lambda content: content.pop("max_position_embeddings"))
    edit_config(folder, **limit)
    assert read_position_limit(str(folder)) == 32


def test_the_embedded_policy_loads_from_any_directory_and_in_any_type(folder):
    import torch

    model, tokenizer = load_policy("embedded")
    copy, _ = load_policy(str(folder))
    pairs = zip(model.parameters(), copy.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    coarse, _ = load_policy("embedded", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in coarse.parameters()} == {torch.bfloat16}
    assert 400_000 < model.num_parameters() < 600_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize("change", ["torn", "fewer modules", "another kind of rank"])
def test_damaged_files_of_an_adapter_are_a_policy_error(tmp_path, change):
    """PEFT only warns of weights that have no place, and trains nothing of them."""
    peft = pytest.importorskip("peft")
    model, tokenizer = load_policy("embedded")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(tmp_path, save_embedding_layers=False)
    tokenizer.save_pretrained(tmp_path)
    edit(
        tmp_path / "adapter_config.json",
        lambda stored: stored.update(
            {"base_model_name_or_path": "embedded"}
            | ({"target_modules": ["q_proj"]} if change == "fewer modules" else {})
            | ({"r": "4"} if change == "another kind of rank" else {})
        ),
    )
    if change == "torn":
        file = tmp_path / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(PolicyError, match="or its files are damaged: "):
        load_policy(str(tmp_path))


def test_an_adapter_with_rows_of_the_embedding_has_them(tmp_path):
    """As for tokens that a training adds: they are no factors, and PEFT loads them by itself."""
    peft = pytest.importorskip("peft")
    model, tokenizer = load_policy("embedded")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model.get_input_embeddings().weight.data[5] = 7.0
    peft.get_peft_model(model, config).save_pretrained(tmp_path, save_embedding_layers=True)
    tokenizer.save_pretrained(tmp_path)
    base = {"base_model_name_or_path": "embedded"}
    edit(tmp_path / "adapter_config.json", lambda stored: stored.update(base))
    assert load_policy(str(tmp_path))[0].get_input_embeddings().weight[5, 0] == 7


def test_a_hub_id_that_cannot_be_had_is_refused(monkeypatch):
    def download(repo, file, revision):
        assert (repo, file, revision) == ("org/absent", "config.json", "v2")
        raise OSError("no such repository.\nmore lines")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(PolicyError, match=r"from the Hub: no such repository\. Check"):
        check_policy_available("org/absent", "v2")


def answer_for_hub(monkeypatch, error=None):
    """Let the Hub answer with an error, or that there is such a policy."""

    def model_info(self, name, **_):
        if error is not None:
            raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def build_missing_error():
    request = httpx.Request("GET", "https://huggingface.co/api/models/x/y")
    response = httpx.Response(404, request=request)
    return RepositoryNotFoundError("404: not found", response=response)


def test_a_dry_run_tells_where_a_policy_is(folder, monkeypatch):
    assert describe_policy("embedded") == "embedded ships with the package"
    assert describe_policy(str(folder)).startswith(f"{folder} is a directory")
    answer_for_hub(monkeypatch)
    assert "is on the Hub" in describe_policy("org/some-policy")


@pytest.mark.parametrize(
    "error",
    [OfflineModeIsEnabled("offline"), httpx.ConnectError("no route")],
    ids=["offline mode", "no network"],
)
def test_a_dry_run_without_the_hub_says_so(monkeypatch, error):
    answer_for_hub(monkeypatch, error)
    known = describe_policy("Qwen/Qwen2.5-3B-Instruct")
    assert known.endswith("the Hub does not answer, so it was not checked.")
    misspelt = describe_policy("Qwen/Qwen2.5-3B-Instrct")
    assert misspelt.endswith("Did you mean 'Qwen/Qwen2.5-3B-Instruct'?")


def test_a_policy_that_the_hub_does_not_have_is_refused(monkeypatch):
    answer_for_hub(monkeypatch, build_missing_error())
    with pytest.raises(PolicyError, match=r"404: not found. Did you mean 'Qwen/Qwen2.5-3B'"):
        describe_policy("Qwen/Qwen2.5-3b")


@pytest.mark.parametrize("check", [describe_policy, check_policy_available])
def test_a_hub_id_that_the_hub_cannot_have_is_refused(check):
    with pytest.raises(PolicyError, match="Cannot have -- or"):
        check("org/a--b")


# Files of a trained policy in the form in which its base was written

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


def write_files(directory, files, **changes):
    directory.mkdir()
    for name, content in {**files, **changes}.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def read_files(directory):
    return {file.name: json.loads(file.read_text()) for file in directory.glob("*.json")}


@pytest.mark.parametrize("base", [OLDER, NEWER], ids=["older", "newer"])
def test_a_policy_has_the_files_of_its_base_and_the_type_of_its_weights(tmp_path, base):
    directory = write_files(tmp_path / "trained", NEWER)
    os.link(directory / "tokenizer.json", tmp_path / "checkpoint")
    restore_base_files(directory, str(write_files(tmp_path / "base", base)))
    key = "torch_dtype" if base is OLDER else "dtype"
    changed = {"config.json": {**base["config.json"], key: "float32"}}
    assert read_files(directory) == {**base, **changed}
    assert json.loads((tmp_path / "checkpoint").read_text()) == NEWER["tokenizer.json"]
    assert find_required_version(directory) == (None if base is OLDER else 5)


def test_an_adapter_gets_the_tokenizer_alone(tmp_path):
    directory = write_files(tmp_path / "trained", {"adapter_config.json": {"r": 4}})
    restore_base_files(directory, str(write_files(tmp_path / "base", OLDER)))
    assert read_files(directory).keys() == {*OLDER, "adapter_config.json"} - {"config.json"}


def test_the_chat_template_is_that_of_the_training(tmp_path):
    """Versions read `chat_template.jinja` or the key, so both have to say the same."""
    directory = write_files(tmp_path / "trained", NEWER)
    (directory / "chat_template.jinja").write_text("new")
    settings = {**OLDER["tokenizer_config.json"], "chat_template": "old"}
    base = write_files(tmp_path / "base", {**OLDER, "tokenizer_config.json": settings})
    restore_base_files(directory, str(base))
    assert read_files(directory)["tokenizer_config.json"]["chat_template"] == "new"


def test_a_base_that_is_not_at_hand_changes_nothing(tmp_path):
    directory = write_files(tmp_path / "trained", NEWER)
    restore_base_files(directory, "nobody/nothing")
    assert read_files(directory) == NEWER


@pytest.mark.parametrize(
    "other", [{"model_type": "vision"}, {"quantization_config": {"bits": 4}}], ids=str
)
def test_settings_of_other_weights_are_not_taken(tmp_path, other):
    """Loading takes the text model out of one that sees, and dequantizes."""
    directory = write_files(tmp_path / "trained", NEWER)
    settings = {**OLDER["config.json"], **other}
    restore_base_files(
        directory, str(write_files(tmp_path / "base", {**OLDER, "config.json": settings}))
    )
    assert read_files(directory) == {**OLDER, "config.json": NEWER["config.json"]}
