"""`gdpo-tune publish` against a Hub on this machine."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from huggingface_hub import ModelCard

from gdpo_tune import publish
from gdpo_tune.core.addresses import MANIFEST
from gdpo_tune.core.errors import DiskFullError, HubError, PolicyError, UsageError
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.trials import Part, check_part_weights
from gdpo_tune.ledger import Ledger
from gdpo_tune.policies.adapters import hash_policy, save_initial_policy
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.publishing.card import describe_training
from gdpo_tune.results.open_sweep import fetch_policy, find_sweep
from gdpo_tune.results.wording import list_result_warnings
from tests.support.hub_server import TOKEN
from tests.support.paths import ROOT
from tests.support.published_sweeps import (
    MACHINE,
    PRIVATE,
    copy_stored_sweep,
    make_policy,
    make_sweep,
)

CARD = "README.md"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
"""The Hub's client sends files by an older argument of httpx."""


def get_files(hub, name="model:me/knee"):
    return hub.repositories[name].files


def test_a_policy_is_published_with_the_numbers_and_the_facts_of_the_ledger(
    publish_to, hub, capsys
):
    assert publish_to("knee", "me/knee") == 0
    files = get_files(hub)
    assert {"model.safetensors", "tokenizer.json", "config.json", "front.png", CARD} <= files.keys()
    assert {"sweep.json", "gdpo_tune.json"} <= files.keys()
    assert not {"trainer_state.json", "rng_state.pth", "complete.json"} & files.keys()
    assert f"published: {hub.url}/me/knee" in capsys.readouterr().out
    assert json.loads(files["sweep.json"])["knee"] == "1"
    assert len(hub.repositories["model:me/knee"].commits) == 1
    card = ModelCard(files[CARD].decode())
    data, text = card.data.to_dict(), card.text
    assert data["license"] == "apache-2.0"
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert {"gdpo_tune", "gdpo"} <= set(data["tags"])
    values = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert values == {"correctness": 0.7, "format": 0.7, "length": 0.5}
    first = text.index("Read this first")
    assert first < text.index("## Task") < text.index("## Values on test prompts")
    assert "This policy has one seed" in text[first : text.index("## Task")]
    for fact in (
        "| correctness | 0.700 (0.680 to 0.720) |",
        "| reward_weights.format | 0.2 |",
        "gdpo-tune train FILE.yaml --seed 71",
        "The numbers of each are in `sweep.json`.",
        "torch 2.13.0",
    ):
        assert fact in text


def read_snippet(card, after):
    """Return the first Python of a card below a heading."""
    return card.partition(f"## {after}\n")[2].partition("```python\n")[2].partition("```")[0]


def test_the_published_policy_can_be_loaded_by_the_example_of_its_card(
    publish_to, tmp_path, capsys, real_example
):
    place = tmp_path / "out" / "one"
    publish_to("1", "me/one", "--dry-run", "--out", str(tmp_path / "out"))
    model, tokenizer = load_policy(str(place))
    assert model.config.vocab_size >= len(tokenizer)
    snippet = read_snippet((place / CARD).read_text(), "Use it")
    assert "max_new_tokens=64" in snippet
    capsys.readouterr()
    exec(snippet.replace("me/one", str(place)), {})
    assert "Write f(x)" in capsys.readouterr().out


def test_the_card_names_base_and_data_on_the_hub_and_a_chat_policy_has_its_turns(
    tmp_path, hub, real_example
):
    hub.add("model:org/base", {CARD: b"---\nlicense: llama3\n---\n"})
    keys = {"policy": "org/base", "data.source": "org/problems", "data.layout": "mbpp"}
    spec = make_sweep(tmp_path, **keys)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (spec.directory / "trials" / "1" / "checkpoint-60" / "chat_template.jinja").write_text(template)
    publish.main([f"{spec.directory}:1", "--to", "me/knee"])
    card = get_files(hub)[CARD].decode()
    data = ModelCard(card).data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == ("org/base", "finetune")
    assert (data["license"], data["datasets"]) == ("llama3", ["org/problems"])
    assert data["model-index"][0]["results"][0]["dataset"]["type"] == "org/problems"
    snippet = read_snippet(card, "Use it")
    assert "'role': 'system'" in snippet
    assert "'content': 'YOUR PROMPT'" in snippet
    assert "tokenizer.apply_chat_template(\n    messages," in snippet
    assert "A prompt of the data stands for `YOUR PROMPT`." in card
    publish.main([f"{spec.directory}:0", "--to", "me/other", "--license", "mit"])
    assert ModelCard(get_files(hub, "model:me/other")[CARD].decode()).data.license == "mit"


def test_a_file_of_the_authors_own_is_no_data_set(tmp_path, hub):
    (tmp_path / "anna.b").mkdir()
    source = shutil.copy(ROOT / "tests" / "data" / "mbpp.jsonl", tmp_path / "anna.b" / "rows.jsonl")
    spec = make_sweep(tmp_path, **{"data.source": str(source), "data.layout": "mbpp"})
    publish.main([f"{spec.directory}:1", "--to", "me/knee"])
    card = ModelCard(get_files(hub)[CARD].decode())
    data = card.data.to_dict()
    assert "datasets" not in data
    assert data["model-index"][0]["results"][0]["dataset"]["type"] == "code"
    assert str(tmp_path) not in card.content


def test_the_card_of_a_sweep_that_goes_on_says_so(publish_to, swept, tmp_path):
    warning, texts = "The sweep had not finished, so its front may change.", []
    for name in ("ended", "going-on"):
        publish_to("knee", f"me/{name}", "--dry-run", "--out", str(tmp_path))
        texts.append((tmp_path / name / CARD).read_text())
        with Ledger.open(swept) as ledger:
            ledger.begin_session(3.0, 2, {})
    assert [warning in text for text in texts] == [False, True]


def make_adapter(spec, base, revision=None):
    """Let the adapter of a rank of 4 stay of trial 1, and return its directory."""
    peft = pytest.importorskip("peft")
    checkpoint = spec.directory / "trials" / "1" / "checkpoint-60"
    for name in ("model.safetensors", "config.json"):
        (checkpoint / name).unlink()
    torch.manual_seed(0)
    model, _ = load_policy("embedded")
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "revision": revision}
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **options)
    adapted = peft.get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(checkpoint, save_embedding_layers=False)
    return checkpoint


@pytest.fixture
def adapted(tmp_path, hub):
    """Return a sweep whose trial 1 has kept the adapter of an embedded policy."""
    spec = make_sweep(tmp_path, **{"model.lora_rank": "4"})
    make_adapter(spec, str(POLICIES["embedded"]))
    return spec


def test_the_policy_of_an_adapter_is_published_whole(adapted, tmp_path, hub):
    checkpoint = adapted.directory / "trials" / "1" / "checkpoint-60"
    save_initial_policy(checkpoint, hash_policy(load_policy("embedded")[0]), "float32")
    publish.main([f"{adapted.directory}:1", "--to", "me/knee"])
    files = get_files(hub)
    published = json.loads(files["adapter/adapter_config.json"])
    assert (published["base_model_name_or_path"], published["r"]) == ("embedded", 4)
    assert "adapter_config.json" not in files
    assert files.keys() == {*json.loads(files[MANIFEST])["files"], MANIFEST, ".gitattributes"}
    card = ModelCard(files[CARD].decode())
    assert card.data.library_name == "transformers"
    assert "The LoRA adapter alone is in the directory `adapter`." in card.text
    assert "| LoRA rank | 4 |" in card.text
    own = load_policy(str(checkpoint))[0].state_dict()
    weights = safetensors.torch.load(files["model.safetensors"])
    assert all(torch.equal(weights[name], own[name]) for name in weights)
    assert not list(adapted.output_directory.glob(".whole-*")), "it is deleted once it is there"
    out = tmp_path / "out"
    publish.main([f"{adapted.directory}:1", "--to", "me/knee", "--dry-run", "--out", str(out)])
    assert (out / "knee" / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert [path.name for path in out.iterdir()] == ["knee"]


def test_an_adapter_without_its_base_or_room_is_not_published(adapted, hub, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", fail)
        with pytest.raises(DiskFullError, match="no space left for a merged policy in "):
            publish.main([f"{adapted.directory}:1", "--to", "me/knee"])
    assert not list(adapted.output_directory.glob(".whole-*"))
    save_initial_policy(adapted.directory / "trials" / "1" / "checkpoint-60", "f00", "float32")
    with pytest.raises(PolicyError, match=r"is another policy than \S+: give the one") as caught:
        publish.main([f"{adapted.directory}:1", "--to", "me/knee"])
    assert "\n" not in str(caught.value)
    assert "model:me/knee" not in hub.repositories


@pytest.mark.parametrize(("stored", "expected"), [(None, "v1.0"), ("c" * 40, "c" * 40)])
def test_an_adapter_names_the_revision_of_its_base(tmp_path, hub, monkeypatch, stored, expected):
    """Source: `revision` of `PeftConfig`, "the specific base model version to use"; peft#1567.

    Adapters of before do not say it: it is that of the sweep.
    """
    hub.add("model:org/base", {CARD: b"---\nlicense: mit\n---\n"})
    keys = {"policy": "org/base", "model.lora_rank": "4", "model.revision": "v1.0"}
    spec = make_sweep(tmp_path, **keys)
    make_adapter(spec, "org/base", stored)
    asked = []

    def load(name, dtype, revision, **_):  # the Hub of the tests has no weights
        asked.append((name, dtype, revision))
        return load_policy("embedded")

    monkeypatch.setattr("gdpo_tune.training.merging.load_policy", load)
    publish.main([f"{spec.directory}:1", "--to", "me/knee"])
    assert asked == [("org/base", "auto", "v1.0")], "in the type of its files, if none is recorded"
    files = get_files(hub)
    assert json.loads(files["adapter/adapter_config.json"])["revision"] == expected
    card = files[CARD].decode()
    assert "from `org/base` at revision `v1.0`" in card
    assert 'tokenizer = AutoTokenizer.from_pretrained("me/knee")' in card


@pytest.mark.parametrize("temperature", ["0.6", "0"])
def test_the_code_of_a_card_decodes_as_the_values_were_measured(
    tmp_path, hub, real_example, temperature
):
    """Source: `generate` of Transformers, whose arguments come before the model's own config."""
    spec = make_sweep(tmp_path, **{"training.evaluation_temperature": temperature})
    publish.main([f"{spec.directory}:1", "--to", "me/knee", "--dry-run", "--out", str(tmp_path)])
    place = tmp_path / "knee"
    config = json.loads((place / "generation_config.json").read_text())
    own = {"do_sample": True, "temperature": 0.1, "top_k": 2, "top_p": 0.1}  # of before
    (place / "generation_config.json").write_text(json.dumps(config | own))
    card = (place / CARD).read_text()
    told = "sampled at temperature 0.6 from all tokens" if temperature != "0" else "most likely"
    assert told in card.partition("## How it was trained")[0]
    seen, scope = [], {}
    snippet = read_snippet(card, "Use it").replace("me/knee", str(place))
    load, call, use = snippet.partition("completion = ")
    exec(load, scope)
    network = type(scope["model"])
    own_processors = network._get_logits_processor

    def spy(self, generation_config, *arguments, **keywords):
        seen.append(generation_config)
        return own_processors(self, generation_config, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "_get_logits_processor", spy)
        exec(call + use, scope)
    (used,) = seen
    assert used.do_sample == (temperature != "0")
    if used.do_sample:
        assert (used.temperature, used.top_k, used.top_p) == (0.6, 0, 1.0)


def test_weights_of_a_merge_sum_to_one():
    """Rounded to three digits, thirds sum to .999, and `merge --weights` refuses them."""
    parts = [Part(trial, 60, 1 / 3) for trial in range(3)]
    space = SimpleNamespace(select_active=lambda params: ())
    publication: Any = SimpleNamespace(
        sweep=SimpleNamespace(records=[SimpleNamespace(params={})] * 3),
        spec=SimpleNamespace(training=SimpleNamespace(steps=60), space=space),
    )
    candidate: Any = SimpleNamespace(record=SimpleNamespace(parts=parts))
    shown = describe_training(publication, candidate)["parts"]
    check_part_weights([float(part["weight"]) for part in shown])


def test_the_card_of_a_merge_shows_its_parts_and_speaks_to_its_reader(tmp_path, hub):
    directory = copy_stored_sweep(tmp_path)
    make_policy(directory / "trials" / "13" / "checkpoint-0")
    assert publish.main([f"{directory}:knee", "--to", "me/merge"]) == 0
    text = get_files(hub, "model:me/merge")[CARD].decode()
    for fact in (
        "A merge of 3 policies",
        "| weight in the merge | 0.25 | 0.25 | 0.5 |",
        "| | 1@60 | 2@60 | 3@60 |",
        "- merge\n",
        "It needs Transformers 5 or newer",
    ):
        assert fact in text
    assert re.search(r"\ngdpo-tune merge \S+ --weights 1@60=0\.25,2@60=0\.25,3@60=0\.5\n", text)
    assert "pip install gdpo-tune" not in text, "no such package is published"
    assert text.count("*published weights*: the baseline that was trained with") == 1
    own = find_sweep(str(directory))
    warnings = list_result_warnings(own.spec, own.front)
    assert warnings
    for warning in warnings:
        assert warning.finding[1:] in text
        assert warning.remedy not in text
    with pytest.raises(UsageError, match="merge-20: its policy was not kept"):
        publish.main([f"{directory}:merge-20", "--to", "me/other"])


@pytest.mark.integration
@pytest.mark.system
@pytest.mark.slow
def test_the_command_finds_the_hub_by_its_variables(swept, hub):
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    script = "from gdpo_tune.cli import main; main()"
    words = ["-c", script, "publish", f"{swept.directory}:knee", "--to", "me/knee"]
    done = subprocess.run(
        [sys.executable, *words], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"published: {hub.url}/me/knee" in done.stdout


def test_a_dry_run_writes_the_directory_and_sends_nothing(publish_to, hub, tmp_path, capsys):
    out = tmp_path / "out"
    hub.user = None
    assert publish_to("knee", "me/knee", "--dry-run", "--out", str(out), "--private") == 0
    assert hub.requests == []
    printed = capsys.readouterr().out
    assert f"me/knee (model, private): {sum(p.is_file() for p in out.rglob('*'))} files" in printed
    assert f"hf upload me/knee {out}/knee . --repo-type model --private" in printed
    for name in ("notes.md", "model-2.safetensors"):
        (out / "knee" / name).touch()
    manifest = out / "knee" / "gdpo_tune.json"
    earlier = json.loads(manifest.read_text())
    earlier["files"].append("model-2.safetensors")
    manifest.write_text(json.dumps(earlier))
    assert publish_to("knee", "me/knee", "--dry-run", "--out", str(out)) == 0  # the same again
    assert (out / "knee" / "notes.md").exists()
    assert not (out / "knee" / "model-2.safetensors").exists()


def test_a_dry_run_is_what_is_uploaded(publish_to, hub, tmp_path, real_picture):
    publish_to("knee", "me/knee", "--dry-run", "--out", str(tmp_path))
    publish_to("knee", "me/knee")
    directory, files = tmp_path / "knee", get_files(hub)
    paths = [path for path in directory.rglob("*") if path.is_file()]
    written = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    assert written["front.png"].startswith(b"\x89PNG\r\n")
    assert written == {name: data for name, data in files.items() if name != ".gitattributes"}


def test_nothing_about_the_authors_machine_is_published(publish_to, hub, swept, real_example):
    journal = (swept.directory / "ledger.journal").read_text()
    assert all(word in journal for word in ("gpu-box-17", MACHINE, "anna.b", "10.1.2.3"))
    publish_to("knee", "me/knee")
    publish_to("", "me/front")
    own = [*PRIVATE, str(swept.directory), str(swept.storage), "private prompt"]
    for key, repository in hub.repositories.items():
        for name, content in repository.files.items():
            assert not [word for word in own if word.encode() in content], f"{key}/{name}"


def test_a_front_gets_a_repository_a_member_a_record_and_a_collection(publish_to, hub, capsys):
    """The same again changes nothing, but that the collection loses former members."""
    assert publish_to("", "me/front", "--private") == 0
    assert set(hub.repositories) == {"dataset:me/front", "model:me/front-0", "model:me/front-1"}
    assert all(repository.private for repository in hub.repositories.values())
    (collection,) = hub.collections.values()
    listed = [(item["type"], item["id"]) for item in collection["items"]]
    assert listed == [("dataset", "me/front"), ("model", "me/front-0"), ("model", "me/front-1")]
    assert collection["private"]
    printed = capsys.readouterr().out
    assert "trial 2: its policy was not kept" in printed
    assert re.search(r"python -m gdpo_tune.train --from \S+:2", printed)
    member = get_files(hub, "model:me/front-1")
    assert "sweep.json" not in member
    assert b"`sweep.json` of [datasets/me/front]" in member[CARD]
    record = get_files(hub, "dataset:me/front")
    assert b"[trial 1](https://huggingface.co/me/front-1)" in record[CARD]
    assert b"[trial 2](" not in record[CARD]
    assert len(json.loads(record["sweep.json"])["front"]) == 3

    uploads = list(hub.uploads)
    former = ("me/front-9", "me/front-merge-8", "me/front-7-step-40")
    for name in (*former, "me/front-gguf", "me/frontier-1"):
        item = {"id": name, "type": "model", "_id": name.translate({45: 95, 47: 95})}
        collection["items"].append({**collection["items"][0], **item})
    assert publish_to("", "me/front", "--private") == 0  # the same again
    assert capsys.readouterr().out.count("unchanged: ") == 3
    assert hub.uploads == uploads
    assert [len(repository.commits) for repository in hub.repositories.values()] == [1, 1, 1]
    kept = ["me/front", "me/front-0", "me/front-1", "me/front-gguf", "me/frontier-1"]
    assert [item["id"] for item in collection["items"]] == kept


def test_an_update_sends_only_what_changed(publish_to, hub, swept, capsys):
    """The candidate of a choice may change too."""
    publish_to("knee", "me/knee")
    uploads, stored = len(hub.uploads), hub.repositories["model:me/knee"]
    manifest = json.loads(stored.files[MANIFEST])
    assert (manifest["candidate"], manifest["pick"]) == ("1", "knee")
    manifest |= {"candidate": "0", "files": [*manifest["files"], "sweep/spec.yaml"]}
    stored.files[MANIFEST] = json.dumps(manifest).encode()
    stored.files |= {"notes.md": b"written by hand", "sweep/spec.yaml": b"of an earlier version"}
    config = swept.directory / "trials" / "1" / "checkpoint-60" / "generation_config.json"
    config.write_text('{"eos_token_id": 1}')
    assert publish_to("knee", "me/knee") == 0
    assert set(stored.commits[1]) == {MANIFEST, "generation_config.json", "sweep/spec.yaml"}
    assert "sweep/spec.yaml" not in stored.files
    assert stored.files["notes.md"] == b"written by hand"
    assert len(hub.uploads) == uploads
    assert f"updated: {hub.url}/me/knee" in capsys.readouterr().out


@pytest.mark.parametrize("place", [r"PUT /objects", r"POST .*/commit/", r"POST .*/items"])
def test_an_interrupted_publication_continues(publish_to, hub, place):
    hub.fail_at, hub.fail_after = place, 1
    with pytest.raises(HubError, match=r"stopped: .*\n    fix: run the same command again"):
        publish_to("", "me/front")
    before = list(hub.uploads)
    hub.fail_at = ""
    assert publish_to("", "me/front") == 0
    assert len(hub.uploads) == len(set(hub.uploads))  # nothing twice
    assert hub.uploads[: len(before)] == before
    assert set(hub.repositories) == {"dataset:me/front", "model:me/front-0", "model:me/front-1"}
    assert len(next(iter(hub.collections.values()))["items"]) == 3


def test_a_server_that_dies_is_an_error_that_says_how_to_continue(publish_to, hub, monkeypatch):
    from huggingface_hub import HfApi

    def die(*_: object, **__: object) -> None:
        hub.shutdown()
        hub.server_close()
        raise ConnectionError("connection refused")

    monkeypatch.setattr(HfApi, "create_commit", die)
    with pytest.raises(HubError, match="connection refused"):
        publish_to("knee", "me/knee")


def test_a_repository_of_something_else_is_never_touched(publish_to, hub):
    hub.add("model:me/knee", {"config.json": b"{}", "model.safetensors": b"x"})
    message = r"me/knee is taken: it holds 2 files \(config.json, model.safetensors\)"
    with pytest.raises(UsageError, match=message):
        publish_to("knee", "me/knee")
    assert hub.repositories["model:me/knee"].commits == []


def test_a_repository_stays_that_of_its_candidate_and_public(publish_to, hub, tmp_path):
    publish_to("0", "me/knee")
    other = make_sweep(tmp_path / "other", **{"training.length_limit": "20"})
    with pytest.raises(UsageError, match="holds candidate 0 of this sweep"):
        publish_to("1", "me/knee")
    with pytest.raises(UsageError, match="holds candidate 0 of another sweep"):
        publish.main([f"{other.directory}:0", "--to", "me/knee"])
    with pytest.raises(UsageError, match="is public, so --private has no effect"):
        publish_to("0", "me/knee", "--private")
    assert len(hub.repositories["model:me/knee"].commits) == 1


def test_one_taken_name_of_a_front_stops_all_of_it(publish_to, hub):
    hub.add("model:me/front-1", {"a.txt": b""})
    with pytest.raises(UsageError, match="me/front-1 is taken"):
        publish_to("", "me/front")
    assert set(hub.repositories) == {"model:me/front-1"}


REFUSED = [
    ("knee", "knee", (), "not of the form USER/NAME"),
    ("knee", "me/a/b", (), "not of the form USER/NAME"),
    ("knee", "me/a--b", (), "not of the form USER/NAME"),
    ("", f"me/{'a' * 90}", (), "not of the form USER/NAME"),  # too long with `-merge-4`
    ("2", "me/knee", (), r"trial 2: its policy was not kept \(keep: front\)[\s\S]*--from \S+:2"),
    ("knee", "me/knee", ("--front",), "--front publishes the whole front"),
    ("knee", "me/knee", ("--out", "x"), "--out has an effect only with --dry-run"),
    ("3", "me/knee", (), "trial 3 was not evaluated on test prompts"),
]


def test_what_is_refused_before_the_hub_is_asked(publish_to, hub, swept):
    for pick, name, options, message in REFUSED:
        with pytest.raises(UsageError, match=message):
            publish_to(pick, name, *options)
    with pytest.raises(UsageError, match=r"which candidate\?\n    fix: write \S+:knee"):
        publish.main([str(swept.directory), "--to", "me/knee"])
    assert hub.requests == []


def test_an_organization_is_no_stranger(publish_to, hub):
    with pytest.raises(UsageError, match="logged in as me, who may not write to you"):
        publish_to("knee", "you/knee")
    assert hub.repositories == {}
    assert publish_to("knee", "lab/knee") == 0
    assert set(hub.repositories) == {"model:lab/knee"}


def test_a_user_who_may_not_write_and_a_hub_out_of_reach(publish_to, hub, monkeypatch):
    hub.user = {**hub.user, "auth": {"accessToken": {"role": "read"}}}
    with pytest.raises(UsageError, match="may only read"):
        publish_to("knee", "me/knee")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UsageError, match=r"refuses: .*nothing was uploaded\n    fix: log in with"):
        publish_to("knee", "me/knee")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="no token for the Hub\n    fix: log in with `hf auth"):
        publish_to("knee", "me/knee")
    assert hub.repositories == {}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.shutdown()
    hub.server_close()
    message = r"cannot be reached: .*nothing was uploaded\n    fix: .*--dry-run"
    with pytest.raises(UsageError, match=message):
        publish_to("knee", "me/knee")


def test_a_sweep_without_a_front(tmp_path, hub):
    spec = make_sweep(tmp_path, **{"constraints.correctness": '">= 0.99"'})
    with pytest.raises(UsageError, match="nothing is on the front"):
        publish.main([f"{spec.directory}:0", "--to", "me/knee"])


def test_a_policy_on_an_object_store_is_downloaded(swept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = find_sweep(str(swept.directory))
    (tmp_path / "store").mkdir()
    swept.directory.rename(tmp_path / "store" / "sweep")
    spec = own.spec.model_copy(update={"storage": f"file://{tmp_path}/store"})
    path = fetch_policy(spec, own.records[1].checkpoint)
    assert path == Path("runs") / "sweep-policies" / "1" / "checkpoint-60"
    assert (path / "model.safetensors").stat().st_size > 0


def test_a_directory_with_other_files_is_not_overwritten(publish_to, tmp_path):
    (tmp_path / "out" / "knee").mkdir(parents=True)
    (tmp_path / "out" / "knee" / "a.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and holds other files"):
        publish_to("knee", "me/knee", "--dry-run", "--out", str(tmp_path / "out"))
    assert [p.name for p in (tmp_path / "out" / "knee").iterdir()] == ["a.txt"]
