"""Exports of checkpoints and merges; the file for mergekit repeats a merge."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from gdpo_tune import export
from gdpo_tune.core import registry
from gdpo_tune.core.errors import ExportError, UsageError
from gdpo_tune.core.trials import Part
from gdpo_tune.exporters.page import PAGE
from gdpo_tune.exporters.write_export import MERGERS
from gdpo_tune.ledger import Ledger
from gdpo_tune.policies.adapters import save_initial_policy
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.retrain import Parent, list_parents
from tests.support.export import export_to, make_recipe, parse_settings
from tests.support.tuning import build_outcome, load_code_spec

TRAINERS = sorted(set(registry.EXPORTERS) - set(MERGERS))
PARTS = (Part(0, 30, 0.25), Part(1, 60, 0.75))


@pytest.fixture
def sweep(tmp_path):
    """Two trainings of 60 steps with kept policies, a checkpoint of the first, and a merge."""
    spec = load_code_spec(tmp_path, ["training.train_prompts=16"])
    with Ledger.open(spec) as ledger:
        params = spec.space.complete_baseline({"normalization": "gdpo"})
        for number in range(2):
            ledger.start(params, "search", "model", seed=70 + number)
        ledger.start(params, "checkpoint", "candidate", 72, parts=[Part(0, 30, 1.0)])
        ledger.start({}, "merge", "candidate", 73, parts=PARTS)
        for number, value in enumerate((0.2, 0.9, 0.5, 0.7)):
            ledger.complete(number, build_outcome(value, 1.0 - value, 0.5))
    for part in PARTS:
        save_policy(find_directory(spec, part), part.trial)
    return spec


def find_directory(spec, part: Part) -> Path:
    return spec.directory.absolute() / "trials" / str(part.trial) / f"checkpoint-{part.step}"


def save_policy(directory: Path, seed: int, dtype: str = "float32") -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"dtype": dtype}))
    weights = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    save_file({"w": weights.to(getattr(torch, dtype))}, directory / "model.safetensors")


def merge_linearly(settings):
    """Merge the policies of a file by the documented formula of mergekit's method `linear`."""
    dtype = getattr(torch, settings["dtype"])
    weights = [entry["parameters"]["weight"] for entry in settings["models"]]
    files = [Path(entry["model"]) / "model.safetensors" for entry in settings["models"]]
    tensors = [load_file(file)["w"].to(dtype) for file in files]
    total = sum(w * tensor for w, tensor in zip(weights, tensors, strict=True))
    if settings["parameters"]["normalize"]:
        total = total / sum(weights)
    return total.to(getattr(torch, settings["out_dtype"]))


def test_mergekit_repeats_a_merge(sweep, tmp_path, capsys):
    source = f"{sweep.directory}:merge-3"
    assert export.main([source, "--to", "mergekit", "--out", str(tmp_path / "o")]) == 0
    text = (tmp_path / "o" / "mergekit.yaml").read_text()
    assert "# merge-3 of " in text
    settings = YAML(typ="safe").load(text)
    assert settings == {
        "merge_method": "linear",
        "parameters": {"normalize": False},
        "dtype": "float32",
        "out_dtype": "float32",
        "models": [
            {"model": str(find_directory(sweep, part)), "parameters": {"weight": part.weight}}
            for part in PARTS
        ],
    }
    files = [find_directory(sweep, part) / "model.safetensors" for part in PARTS]
    first, second = (load_file(file)["w"] for file in files)
    torch.testing.assert_close(merge_linearly(settings), 0.25 * first + 0.75 * second)
    page = (tmp_path / "o" / PAGE).read_text()
    assert "## Rewards" not in page
    assert "prompts.json" in page
    printed = capsys.readouterr().out
    assert f"bash {tmp_path / 'o' / 'run.sh'}" in printed
    assert "exec mergekit-yaml mergekit.yaml merged" in (tmp_path / "o" / "run.sh").read_text()


def export_merge(parents, *overrides):
    return export_to("mergekit", make_recipe(*overrides, parents=tuple(parents)))


def list_models(exported):
    return [entry["model"] for entry in parse_settings(exported)["models"]]


def test_an_adapter_is_merged_into_the_policy_below_it(tmp_path):
    (tmp_path / "adapter_config.json").touch()
    parent = Parent("runs/code:0@30", 1.0, str(tmp_path), is_adapter=True)
    exported = export_merge([parent], "policy=a/b")
    assert list_models(exported) == [{"model": {"path": "a/b"}, "lora": {"path": str(tmp_path)}}]
    assert exported.run == 'exec mergekit-yaml mergekit.yaml merged --lora-merge-dtype float32 "$@"'


@pytest.mark.parametrize("is_remote", [False, True])
def test_an_adapter_of_a_sweep_is_known(sweep, is_remote):
    directory = find_directory(sweep, PARTS[0])
    if is_remote:  # of the marker alone is a copy
        marker = {"files": {"adapter_config.json": {"size": 1}}}
        (directory / "complete.json").write_text(json.dumps(marker))
    else:
        (directory / "adapter_config.json").touch()
    with Ledger.open(sweep, read_only=True) as ledger:
        address = {"address": "s3://b/t"} if is_remote else {}
        records = [replace(record, **address) for record in ledger.get_records()]
    parents = list_parents(Sweep(sweep, records), PARTS, "s3://b" if is_remote else "runs/code")
    assert [parent.is_adapter for parent in parents] == [True, False]
    if is_remote:
        assert list_models(export_merge(parents, "policy=a/b")) == [
            {"model": {"path": "a/b"}, "lora": {"path": "s3://b/t/checkpoint-30"}},
            "s3://b/t/checkpoint-60",
        ]
    asked = [parent for parent in parents if parent.policy.startswith("s3:")]
    assert len(export_merge(parents, "policy=a/b").required_inputs) == len(asked) == 2 * is_remote


@pytest.mark.parametrize("is_adapter", [False, True])
def test_a_merge_has_the_type_of_its_parents_if_they_agree(tmp_path, is_adapter):
    """That of adapters is the one in which they computed."""
    for number, dtype in enumerate(("bfloat16", "bfloat16", "float32")):
        directory = tmp_path / str(number)
        if is_adapter:
            directory.mkdir()
            (directory / "adapter_config.json").touch()
            save_initial_policy(directory, "f00", dtype)
        else:
            save_policy(directory, number, dtype)
    parents = [Parent(f"r:{n}", 0.5, str(tmp_path / str(n))) for n in range(3)]
    for chosen, expected in ((parents[:2], "bfloat16"), (parents[1:], "float32")):
        settings = parse_settings(export_merge(chosen, *(["policy=a/b"] if is_adapter else [])))
        assert (settings["dtype"], settings["out_dtype"]) == ("float32", expected)


def test_a_policy_on_an_object_store_is_for_the_user_to_download():
    parent = Parent("s3://b/code:0", 0.5, "s3://b/code/trials/0/checkpoint-60")
    exported = export_merge([parent])
    assert exported.required_inputs == {
        "models[0].model": "a directory with a copy of s3://b/code/trials/0/checkpoint-60"
    }


def test_a_parent_that_was_not_kept_is_named(sweep):
    with Ledger.open(sweep) as ledger:
        ledger.start({}, "merge", "candidate", 74, parts=[Part(0, 20, 0.5), Part(1, 60, 0.5)])
    with pytest.raises(ExportError) as caught:
        export.main([f"{sweep.directory}:merge-4", "--to", "mergekit"])
    assert f"the policy of {sweep.directory}:0@20 was not kept" in str(caught.value)
    assert f"gdpo_tune.train --from {sweep.directory}:0@20 (its weight is 0.5)" in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("pick", ["1", "0@30"])
def test_mergekit_has_nothing_to_merge_in_a_training(sweep, pick):
    with pytest.raises(ExportError, match="this is one training, so there is nothing to merge"):
        export.main([f"{sweep.directory}:{pick}", "--to", "mergekit"])


@pytest.mark.parametrize("library", TRAINERS)
def test_other_libraries_begin_at_the_weights_of_a_merge(sweep, tmp_path, library):
    out, source = tmp_path / "o", f"{sweep.directory}:merge-4"
    with pytest.raises(UsageError, match="merge-3: its policy was not kept"):
        export.main([f"{sweep.directory}:merge-3", "--to", library, "--out", str(out)])
    with Ledger.open(sweep) as ledger:
        halves = [Part(0, 30, 0.5), Part(1, 60, 0.5)]
        ledger.start({}, "merge", "candidate", 74, parts=halves)
        policy = ledger.get_record(4).directory / "checkpoint-0"
        shutil.copytree(registry.POLICIES["embedded"], policy)
        (policy / "model.safetensors").write_bytes(b"merged")
        ledger.complete(4, replace(build_outcome(0.7, 0.3, 0.5), checkpoint=policy))
    assert export.main([source, "--to", library, "--out", str(out)]) == 0
    assert (out / "policy" / "model.safetensors").read_bytes() == b"merged"
    page = (out / PAGE).read_text()
    assert "repeats trial 1 of sweep, from the weights of merge-4." in page
    assert "begins at its weights, with the parameters of its largest part, trial 1" in page


@pytest.mark.parametrize("library", TRAINERS)
def test_a_checkpoint_is_exported_with_its_steps(sweep, tmp_path, library):
    for name in ("0", "0@30"):
        out = str(tmp_path / name)
        assert export.main([f"{sweep.directory}:{name}", "--to", library, "--out", out]) == 0
    assert "checkpoint 0@30" in (tmp_path / "0@30" / PAGE).read_text()
    lines = []
    for name in ("0", "0@30"):
        files = [path for path in (tmp_path / name).iterdir() if path.suffix in (".yaml", ".sh")]
        lines.append({line for path in files for line in path.read_text().splitlines()})
    more = [line for line in lines[1] - lines[0] if not line.startswith("#")]
    assert any(re.search(r"\b30$", line) for line in more)
