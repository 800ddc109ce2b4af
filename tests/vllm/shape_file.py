"""A task of a sweep whose engine dies once, in the middle of one trial."""

from __future__ import annotations

from pathlib import Path

from gdpo_tune.tasks.custom import RewardFunctionTask

MARK = Path(__file__).with_name("died")
LAST_WORDS = "CUDA error: an illegal memory access was encountered"


def digits(completions, **_):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def short(completions, **_):
    break_engine_once()
    return [float(len(text) % 7 < 3) for text in completions]


def break_engine_once():
    """Let the next work of an engine in this process fail, unless one has failed before."""
    from vllm.v1.engine.llm_engine import LLMEngine

    if hasattr(LLMEngine, "unbroken"):
        return
    LLMEngine.unbroken = LLMEngine.step

    def step(self):
        try:
            MARK.touch(exist_ok=False)
        except FileExistsError:
            return self.unbroken()
        raise RuntimeError(LAST_WORDS)

    LLMEngine.step = step


class Shape(RewardFunctionTask):
    reward_funcs = [digits, short]
    ranges = {"digits": (0.0, 1.0), "short": (0.0, 1.0)}

    def rows(self):
        return [{"prompt": f"Write f(x): k is {i}, plus 9\n"} for i in range(200)]
