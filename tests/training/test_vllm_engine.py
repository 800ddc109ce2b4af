"""vLLM in a trial, with stand-ins for a GPU and for vLLM.

`tests/vllm` tries the real engine.
"""

import fcntl
import os
import pickle
import sys
import tempfile
import weakref
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from safetensors.torch import load_file
from trl.generation import vllm_generation as trl_vllm

from gdpo_tune.core import errors
from gdpo_tune.core.engines import V2_RUNNER, VLLM
from gdpo_tune.core.settings import DataSettings, ModelSettings, RolloutSettings
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import engine as engines
from gdpo_tune.training import lora, rollout, step_reporter, vllm_engine
from gdpo_tune.training import memory as gpu_module
from gdpo_tune.training.decoding import Decoding
from gdpo_tune.training.trl_arguments import build_trainer_arguments
from tests.support.training import ToyTask
from tests.support.trials import build_trial, run_metrics
from tests.support.vllm_double import RecordingLLM

pytestmark = pytest.mark.usefixtures("closed_engine")
GIB = 2**30
LORA = ModelSettings(dtype="bfloat16", lora_rank=4)


@pytest.fixture
def config(toy, policy, tmp_path):
    return build_trial(policy, tmp_path / "t", seed=7)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A stand-in for a GPU of 80 GiB; yields the shares to which torch was limited."""
    limits = []
    properties = SimpleNamespace(uuid="GPU-a", major=9)
    for name, stand_in in {
        "empty_cache": lambda: None,
        "memory_reserved": lambda: 0,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "mem_get_info": lambda: (70 * GIB, 80 * GIB),
        "get_device_properties": lambda _: properties,
        "set_per_process_memory_fraction": limits.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return limits


def build_arguments(config, model, **rollout):
    """Build TRL's arguments of a trial with vLLM."""
    config = replace(config, rollout=RolloutSettings(engine="vllm", **rollout))
    engine = vllm_engine.build_engine_arguments(config, model)
    return build_trainer_arguments(config, ToyTask.rewards, engine)


def test_a_colocated_engine_gets_its_part_of_the_trials_share(config, loaded_model):
    config = replace(config, gpu_share=0.5)
    arguments = build_arguments(config, loaded_model, vllm_memory_share=0.4)
    assert (arguments.use_vllm, arguments.vllm_mode) == (True, "colocate")
    assert arguments.vllm_gpu_memory_utilization == pytest.approx(0.2)
    assert arguments.vllm_importance_sampling_correction
    end = loaded_model.generation_config.eos_token_id
    assert arguments.generation_kwargs == {"stop_token_ids": [end]}
    assert arguments.top_p == 1.0
    # The policy's 128 positions are fewer than the data could fill.
    assert arguments.vllm_max_model_length == 128
    config = replace(config, data=DataSettings(max_prompt_length=30))
    assert build_arguments(config, loaded_model).vllm_max_model_length == 38


SERVER = {"vllm_mode": "server", "vllm_server": "http://a:1"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (True, "token_truncate", 3.0)),
        (
            {"importance_sampling": "token_truncate", "importance_sampling_cap": 2.0},
            (True, "token_truncate", 2.0),
        ),
        ({**SERVER, "importance_sampling": "token_mask"}, (True, "token_mask", 3.0)),
        ({"importance_sampling": "off"}, (False, "token_truncate", 3.0)),
    ],
)
def test_the_correction_is_a_setting(config, loaded_model, settings, expected):
    arguments = build_arguments(config, loaded_model, **settings)
    found = arguments.vllm_importance_sampling_correction
    assert found is expected[0]
    if found:
        assert expected[1:] == (
            arguments.vllm_importance_sampling_mode,
            arguments.vllm_importance_sampling_clip_max,
        )
    server = {"vllm_mode": "colocate", "vllm_server": None, **settings}
    assert arguments.vllm_mode == server["vllm_mode"]
    assert arguments.vllm_server_base_url == server["vllm_server"]


def test_torch_allocates_at_most_the_trials_share(gpu, monkeypatch):
    gpu_module.limit_gpu_memory(1.0)
    assert gpu == []
    gpu_module.limit_gpu_memory(0.25)
    gpu_module.limit_gpu_memory(0.001)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu_module.limit_gpu_memory(0.25)  # nothing without a GPU
    assert gpu == [pytest.approx(0.25 - 0.5 / 80), 0.0]


def test_an_earlier_trainer_leaves_the_gpu(monkeypatch):
    class Trainer:
        pass

    trainer = Trainer()
    trainer.callback = trainer
    gone, emptied = weakref.ref(trainer), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(gone()))
    del trainer
    gpu_module.free_garbage()
    assert emptied == [None]


def test_engines_on_one_gpu_start_one_after_the_other(gpu, tmp_path, monkeypatch):
    file = tmp_path / f"gdpo-tune-{os.getuid()}" / "gpu-GPU-a.lock"

    def is_held():
        with file.open("a") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    with gpu_module.lock_gpu():
        assert is_held()
        other = SimpleNamespace(uuid="GPU-b")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: other)
        with gpu_module.lock_gpu():
            assert is_held()
    assert not is_held()
    with pytest.raises(RuntimeError, match="no memory"), gpu_module.lock_gpu():
        raise RuntimeError("no memory")
    assert not is_held()


def test_without_a_gpu_there_is_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with gpu_module.lock_gpu():
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def engine(monkeypatch):
    """A stand-in for vLLM's class; yields the options of every engine."""
    Accelerator(cpu=True)  # as a trainer does before it sets seeds
    built = []

    def build(**options):
        built.append(options)
        return RecordingLLM()

    monkeypatch.setattr(trl_vllm, "LLM", build, raising=False)
    monkeypatch.setattr(rollout, "find_vllm", lambda: VLLM("0.31.0", on_cpu=False))
    return built


@pytest.fixture
def start(config, engine, loaded_model):
    """Start the engine of a trial that differs from `config` by fields; return its options."""

    def start(loaded=loaded_model, bf16=False, inside=None, **fields):
        arguments = SimpleNamespace(bf16=bf16)
        with vllm_engine.prepare_engine(replace(config, **fields), loaded, arguments):
            inside() if inside else trl_vllm.LLM(model="policy")
        return engine[-1] if engine else {}

    return start


def test_the_engine_computes_as_the_training_does(start, gpu):
    plain = trl_vllm.LLM
    built = [start(), start(bf16=True, model=ModelSettings(revision="v2"))]
    assert [one["dtype"] for one in built] == ["float32", "bfloat16"]
    assert [one["revision"] for one in built] == [None, "v2"]
    assert not any("enable_lora" in one for one in built)
    assert trl_vllm.LLM is plain


def test_on_a_cpu_nothing_is_compiled_and_the_cache_is_bounded(start):
    expected = {"enforce_eager": True, "kv_cache_memory_bytes": GIB}
    assert start().items() >= expected.items()


def test_an_engine_leaves_seed_and_environment_as_they_were(start, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "3")

    def inside():
        torch.manual_seed(0)  # as vLLM does
        os.environ.update(RANK="0", WORLD_SIZE="1")  # as TRL does

    for rank in (0, 1):  # each process of a trial draws of its own
        monkeypatch.setitem(PartialState._shared_state, "process_index", rank)
        start(inside=inside)
        assert torch.initial_seed() == 7 + rank
    assert "RANK" not in os.environ
    assert os.environ["WORLD_SIZE"] == "3"


def test_engines_that_start_together_meet_at_ports_of_their_own(start, monkeypatch):
    """TRL tries four ports, so the second of two engines took the port of the first."""
    monkeypatch.delenv("MASTER_PORT", raising=False)
    ports = []
    for _ in range(3):
        start(inside=lambda: ports.append(int(os.environ["MASTER_PORT"])))
        assert "MASTER_PORT" not in os.environ
    assert len(set(ports)) > 1
    assert not {*ports} & {29500, 23456, 12355, 12345}
    monkeypatch.setenv("MASTER_PORT", "41234")  # of a group that was launched
    start(inside=lambda: ports.append(os.environ["MASTER_PORT"]))
    assert ports[-1] == os.environ["MASTER_PORT"] == "41234"


@pytest.mark.parametrize(("number", "root"), [(0, None), (3, "/cache/vllm/device-3")])
def test_what_vllm_compiles_is_kept_for_each_device_of_a_machine(
    start, gpu, monkeypatch, number, root
):
    # Source: vllm#38962, SkyRL#2183: its cache has a directory for each rank alone.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: number)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    start()
    assert os.environ.get("VLLM_CACHE_ROOT") == root


def test_a_start_that_fails_leaves_no_trace(start, monkeypatch):
    def no_memory(**_):
        os.environ["RANK"] = "0"
        raise RuntimeError("no memory")

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(trl_vllm, "LLM", no_memory)
    with pytest.raises(RuntimeError, match="no memory"):
        start()
    assert trl_vllm.LLM is no_memory
    assert "RANK" not in os.environ


def test_an_engine_gets_room_for_adapters_of_the_trials_rank(start):
    adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 32}
    assert start(model=ModelSettings(lora_rank=24)).items() >= adapters.items()
    with pytest.raises(
        errors.EngineError, match=r"model.lora_rank = 600: vLLM .* rank 512 at most"
    ):
        start(model=ModelSettings(lora_rank=600))


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
def test_a_start_reserves_what_a_dry_run_states_for_adapters(
    config, start, loaded_model, gpu, targets
):
    """vLLM reserves memory for adapters on every module, whatever the trial adapts."""
    adapters = ModelSettings(lora_rank=24, lora_targets=targets)
    plain, adapted = (
        (
            start(model=settings, bf16=True)["kv_cache_memory_bytes"],
            gpu_module.estimate_memory(
                replace(config, model=settings), loaded_model
            ).engine.weights,
        )
        for settings in (config.model, adapters)
    )
    assert plain[0] - adapted[0] == adapted[1] - plain[1] > 0


def test_the_cache_is_computed_and_nothing_is_measured(start, gpu):
    """vLLM does not measure the whole device if it is told the size of its cache."""
    share = RolloutSettings(engine="vllm", vllm_memory_share=0.4)
    half, quarter = (
        start(rollout=share, gpu_share=part)["kv_cache_memory_bytes"] for part in (0.5, 0.25)
    )
    assert 15 * GIB < half < 0.5 * 0.4 * 80 * GIB - GIB // 2
    assert half - quarter == pytest.approx(8 * GIB, abs=2)


@pytest.mark.parametrize(("completions", "side_by_side"), [(512, 512), (8192, 1024)])
def test_more_completions_than_vllm_batches_wait(
    config, start, loaded_model, gpu, completions, side_by_side
):
    """vLLM refuses `max_num_seqs` above `max_num_batched_tokens`, which TRL fixes at 4,096.

    Its `SchedulerConfig`: "max_num_batched_tokens must be greater than or equal to max_num_seqs".
    """
    asked, fewer = (
        config.training.replace(completions_per_step=count) for count in (completions, side_by_side)
    )
    assert start(training=asked)["max_num_seqs"] == side_by_side
    stated, possible = (
        gpu_module.estimate_memory(replace(config, training=each), loaded_model).engine.workspace
        for each in (asked, fewer)
    )
    assert stated == possible


def test_a_policy_too_large_for_the_engines_part_is_refused(start, engine, gpu):
    message = r"rollout.vllm_memory_share = 0.45: vLLM's part of"
    with pytest.raises(errors.ResourcesError, match=message):
        start(gpu_share=1e-7, rollout=RolloutSettings(engine="vllm"))
    assert engine == []


def test_an_engine_waits_until_a_neighbour_has_released_memory(gpu, monkeypatch):
    answers = [GIB, GIB, 70 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (answers.pop(0), 80 * GIB))
    gpu_module.wait_for_memory(30 * GIB, pause=0.0)
    assert answers == []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 80 * GIB))
    message = r"needs 30.0 GiB of the GPU, and 1.0 of 80 GiB"
    with pytest.raises(errors.CrowdedGpuError, match=message):
        gpu_module.wait_for_memory(30 * GIB, patience=0.0)


def test_an_engine_waits_for_its_part_and_for_weights_that_are_not_yet_on_the_gpu(
    start, policy, loaded_model, gpu, monkeypatch
):
    """Trials of a shared worker have one base, which the first of them has moved there.

    Of N workers that share a policy, each moves its part (FSDP2).
    """
    waits, on_gpu = [], load_policy(policy)[0].to("meta")  # stands for a GPU

    def wait(needed):
        waits.append(needed)
        assert engines.PROCESS_ENGINE.runner == "", "the engine of the trial before is closed"

    monkeypatch.setattr(vllm_engine, "wait_for_memory", wait)
    monkeypatch.setattr(vllm_engine.distributed, "count_processes", lambda: 4)
    share = RolloutSettings(vllm_memory_share=0.4, reuse_engine=False)
    for model, sharded in ((loaded_model, False), (loaded_model, True), (on_gpu, True)):
        start(model, rollout=share, sharded=sharded)
    part, weights = int(0.4 * 80 * GIB), loaded_model.num_parameters() * 4
    assert waits == [part + weights, part + weights // 4, part]


@pytest.mark.parametrize(
    ("version", "kind", "before", "after"),
    [
        ("0.24.0", "qwen2", None, "1"),
        ("0.25.3", "qwen2", None, "1"),
        ("0.24.0", "qwen2", "0", "0"),
        ("0.26.0", "qwen2", None, None),
        ("0.24.0", "qwen2_moe", None, None),
    ],
)
def test_an_old_vllm_draws_from_seeds_in_a_kernel(
    start, policy, gpu, monkeypatch, version, kind, before, after
):
    """vLLM 0.24 takes V2 for Llama, Mistral and Qwen3, and 0.26 for all without experts.

    Told to, it takes V2 for what V2 cannot compute, too.

    Source: `VllmConfig._is_default_v2_model_runner_model`.
    """
    monkeypatch.setattr(vllm_engine, "find_vllm", lambda: VLLM(version, on_cpu=False))
    monkeypatch.delenv(V2_RUNNER, raising=False)
    if before is not None:
        monkeypatch.setenv(V2_RUNNER, before)
    model = load_policy(policy)[0]
    model.config.model_type = kind
    start(model)
    assert os.environ.get(V2_RUNNER) == after


def test_an_adapter_is_written_to_memory_where_it_fits(tmp_path):
    assert lora.choose_memory(1, tmp_path) == tmp_path
    assert lora.choose_memory(10**15, tmp_path) is None
    assert lora.choose_memory(1, tmp_path / "missing") is None


@pytest.fixture
def adapted(policy):
    """A policy in bfloat16 with an adapter whose change is not 0."""
    peft = pytest.importorskip("peft")
    model = load_policy(policy, torch.bfloat16)[0]
    wrapped = peft.get_peft_model(model, lora.build_adapter_config(model, LORA, policy))
    for name, weight in wrapped.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=7.5e-5)
    return wrapped


class SpelledTokenizer:
    """Writes tokens as their numbers."""

    def batch_decode(self, batch, *, skip_special_tokens):
        assert skip_special_tokens
        return [" ".join(map(str, tokens)) for tokens in batch]


def build_trainer(llm, **generation):
    """Build a trainer whose engine is `llm`."""
    engine = engines.KeptEngine().open("a", lambda: llm, threads=1)
    generation = {"model": None, "llm": engine, "generate": None, **generation}
    return SimpleNamespace(
        vllm_generation=SimpleNamespace(**generation),
        state=SimpleNamespace(global_step=0),
        _last_loaded_step=-1,
        judges_early=False,
    )


@pytest.fixture
def adapter_engine(adapted, monkeypatch):
    """A trainer with a stand-in for vLLM that loads adapters, and what it has loaded."""
    fake = ModuleType("vllm.lora.request")
    fake.LoRARequest = lambda *names, load_inplace: (*names, load_inplace)
    modules = {"vllm": ModuleType("vllm"), "vllm.lora": ModuleType("vllm.lora")}
    for name, module in (modules | {fake.__name__: fake}).items():
        monkeypatch.setitem(sys.modules, name, module)
    loaded = []
    layer = torch.nn.Module()
    layer.lora_a_stacked = (torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 8))

    def add_lora(request):
        loaded.append((request, load_file(f"{request[2]}/adapter_model.safetensors")))
        return True

    llm = RecordingLLM()
    llm.llm_engine.add_lora = add_lora
    llm.apply_model = lambda function: [function(layer)]
    llm.layer = layer
    trainer = build_trainer(llm, model=adapted, sync_weights=None)
    trainer.told, trainer.judges_early = [], True
    trainer.processing_class = SpelledTokenizer()
    trainer.note_sampled = lambda row, text: trainer.told.append((row, text))
    vllm_engine.ColocatedEngine(trainer)
    return trainer, llm, loaded


def test_a_sync_hands_the_adapter_over_and_writes_no_weight(adapter_engine, adapted):
    """TRL's own sync merges it into the weights, which then differ after a few syncs."""
    trainer, llm, loaded = adapter_engine
    generation = trainer.vllm_generation
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    for _ in range(3):
        generation.sync_weights()
    after = adapted.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert len(loaded) == 3
    requests = [request for request, _ in loaded]
    assert {(number, in_place) for _, number, _, in_place in requests} == {(1, True)}
    # What a cached prompt is known by: vLLM's `kv_cache_utils._gen_lora_extra_hash_keys`.
    assert len({name for name, *_ in requests}) == len({r[2] for r in requests}) == 3
    sent = loaded[-1][1]
    trained = {n.replace(".default.", "."): v for n, v in before.items() if ".lora_" in n}
    assert sent.keys() == trained.keys()
    assert all(torch.equal(sent[name], trained[name]) for name in sent)
    prompts = [{"prompt_token_ids": [3, 3]}, {"prompt_token_ids": [4]}]
    generation.llm.generate(prompts, sampling_params=SimpleNamespace(), use_tqdm=False)
    assert trainer.told == [(1, "4"), (0, "3")]  # for the judge, as they end
    seeds = [one.seed for one in llm.requests[-1][1]]
    assert seeds[0] != seeds[1]
    request, _ = llm.adapters
    assert request[:3] == requests[-1][:3]
    assert request[3] is False  # or every request would load the adapter again


def test_an_adapter_that_vllm_refuses_ends_the_trial(adapter_engine):
    trainer, llm, _ = adapter_engine
    llm.llm_engine.add_lora = lambda request: False
    with pytest.raises(errors.TrialFailure, match="has refused the adapter"):
        trainer.vllm_generation.sync_weights()


def test_a_cache_of_prompts_that_stays_is_an_error(adapter_engine):
    # Source: vllm#42125; `reset_prefix_cache` returns False while a block is in use.
    trainer, llm, _ = adapter_engine
    llm.resets_succeed = False
    generation = trainer.vllm_generation
    for reset in (generation.sync_weights, generation.llm.reset_prefix_cache):  # as TRL calls it
        with pytest.raises(errors.EngineDiedError, match="keeps its cache of prompts"):
            reset()


@pytest.fixture
def trainer(monkeypatch, gpu):
    """A trainer whose engine counts how often it gets weights."""
    fake = ModuleType("vllm")
    fake.SamplingParams = lambda **options: options
    monkeypatch.setitem(sys.modules, "vllm", fake)

    def sync_weights():
        trainer.vllm_generation.synced += 1

    trainer = build_trainer(RecordingLLM(), synced=0, sync_weights=sync_weights)
    return trainer


DECODING = Decoding(max_new_tokens=9, temperature=1.0, end_tokens=(1, 5), pad_token=0)


def test_an_engine_that_dies_says_so_with_its_last_words(trainer):
    def die(*_, **__):
        try:
            raise RuntimeError("CUDA error: an illegal memory access\nsecond line")
        except RuntimeError as error:
            raise ValueError("see the log above") from error

    trainer.vllm_generation.llm.llm.generate = die
    sampler = vllm_engine.ColocatedEngine(trainer)
    with pytest.raises(errors.EngineDiedError) as caught:
        sampler.generate(None, [[3]], DECODING, torch.Generator())
    message = (
        "vLLM died after 0 optimizer steps: RuntimeError: CUDA error: an illegal memory access"
    )
    assert str(caught.value) == str(pickle.loads(pickle.dumps(caught.value))) == message


@pytest.mark.parametrize("name", ["generate", "sync_weights"])
def test_errors_of_both_calls_of_trl_are_named_and_lack_of_memory_is_not(trainer, name):
    def fail(error):
        raise error

    setattr(trainer.vllm_generation, name, fail)
    vllm_engine.name_engine_failures(trainer)
    called = getattr(trainer.vllm_generation, name)
    with pytest.raises(errors.EngineDiedError, match="ConnectionError: refused"):
        called(ConnectionError("refused"))
    for passed in (torch.OutOfMemoryError("out of memory"), errors.CrowdedGpuError("full")):
        with pytest.raises(type(passed)):
            called(passed)


def test_an_engine_sleeps_from_the_samples_of_a_step_to_the_next_need(trainer):
    def sample(engine):
        prompts = [{"prompt_token_ids": [3]}]
        engine.generate(prompts, sampling_params=SimpleNamespace(), use_tqdm=False)

    engine = trainer.vllm_generation.llm
    vllm_engine.ColocatedEngine(trainer)
    sample(trainer.vllm_generation.llm)
    assert engine.llm.naps == 0, "unless it is asked to"
    trainer.vllm_generation.llm = engine
    sampler = vllm_engine.ColocatedEngine(trainer, sleeps=True)
    steps = trainer.vllm_generation.llm
    llm = steps.engine.llm
    for step in (1, 2):
        sample(steps)
        assert llm.llm_engine.is_asleep
        assert llm.naps == step
        trainer.state.global_step = step
        trainer.vllm_generation.sync_weights()  # into memory that is there
        assert not llm.llm_engine.is_asleep
        assert not torch.isnan(llm.cache).any()
    sample(steps)
    assert sampler.generate(None, [[3]], DECODING, torch.Generator()) == [[3]]
    assert not llm.llm_engine.is_asleep  # other batches of the evaluation follow


def test_vllm_is_told_that_it_will_sleep(start, gpu, monkeypatch):
    sleeping = RolloutSettings(engine="vllm", sleep=True)
    built = [start(), start(rollout=sleeping)]
    assert [one.get("enable_sleep_mode") for one in built] == [None, True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.EngineError, match="vLLM on a CPU has no sleep mode"):
        start(rollout=sleeping)


def test_completions_of_one_prompt_have_seeds_of_their_own(trainer):
    sampler = vllm_engine.ColocatedEngine(trainer)
    prompts = [[3, 4], [3, 4], [8]]

    def sample(seed):
        drawn = sampler.generate(None, prompts, DECODING, torch.Generator().manual_seed(seed))
        assert drawn == [[3], [3], [8]]
        inputs, settings = trainer.vllm_generation.llm.engine.llm.requests[-1]
        assert inputs == [{"prompt_token_ids": prompt} for prompt in prompts]
        return settings

    once, again, other = sample(0), sample(0), sample(1)
    assert once == again != other
    assert len({one["seed"] for one in once}) == 3
    del once[0]["seed"]
    wanted = {"temperature": 1.0, "max_tokens": 9, "stop_token_ids": [1, 5]}
    assert once[0] == {**wanted, "detokenize": False}, "its texts are read by nobody"
    sampler.generate(None, [[3]], replace(DECODING, temperature=None), torch.Generator())
    greedy = trainer.vllm_generation.llm.engine.llm.requests[-1][1][0]
    assert greedy["temperature"] == 0


def test_weights_are_sent_once_per_step(trainer):
    sampler = vllm_engine.ColocatedEngine(trainer)
    for step, synced in ((0, 1), (0, 1), (1, 2), (2, 3)):
        trainer.state.global_step = step
        sampler.generate(None, [[3]], DECODING, torch.Generator())
        assert trainer.vllm_generation.synced == synced
        assert trainer._last_loaded_step == step  # so TRL gives them no second time


def test_a_trial_without_vllm_says_what_to_install(config, monkeypatch):
    monkeypatch.setattr(rollout, "find_vllm", lambda: None)
    with pytest.raises(errors.EngineError, match="pip install"):
        run_metrics(replace(config, rollout=RolloutSettings(engine="vllm")))


@pytest.mark.parametrize(
    ("engine_name", "uses_fast_cpu"), [("auto", True), ("transformers", False)]
)
def test_only_the_chosen_engine_samples(config, engine_name, uses_fast_cpu, monkeypatch):
    calls = {"LlamaDecoder": [], "sample_from_cache": []}
    for name, found in calls.items():
        inner = getattr(rollout, name)

        def counted(model, prompts, *arguments, inner=inner, found=found, **keywords):
            found.append(len(prompts))
            return inner(model, prompts, *arguments, **keywords)

        monkeypatch.setattr(rollout, name, counted)
    run_metrics(replace(config, rollout=RolloutSettings(engine=engine_name)))
    batch, steps = config.training.completions_per_step, config.training.steps
    assert calls["LlamaDecoder"].count(batch) == steps * uses_fast_cpu
    assert calls["sample_from_cache"].count(batch) == steps * (not uses_fast_cpu)


def test_the_mismatch_is_kept_under_the_names_of_trl():
    kept = {
        "loss": 1.0,
        "sampling/importance_sampling_ratio/mean": 0.99,
        "sampling/sampling_logp_difference/mean": 0.01,
        "sampling/sampling_logp_difference/max": 0.2,
    }
    logs = {**kept, "sampling/importance_sampling_ratio/min": 0.0}
    expected = {f"train/{name}": value for name, value in kept.items()}
    assert step_reporter.select_metrics(logs) == expected
