"""Forward and backward pass of adapters: each prompt once, against a prompt with every completion.

    python benchmarks/shared_prompts.py [--small] [--policy DIRECTORY] [--picture FILE.png]
                                        [--completions 64] [--keep-activations]

The policy has random weights in the shape of Qwen2.5-1.5B, a tiny one with `--small`, or is one of
Transformers. It runs on the GPU if there is one, in bfloat16, else in float32 on one thread, whose
CPU seconds count. Tokens are random; completions have half to all of the longest length. For each
shape of a step it prints the seconds and the peak of memory of both passes, and how far their
log-probabilities are from each other, and from those of float32. `--picture` draws the ratio over
group sizes and lengths of prompts. The last line is one JSON object.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from harness import SHAPES, build_config, print_table, run
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training.lora import build_adapter_config
from gdpo_tune.training.micro_batches import MicroBatchTrainer

ON_GPU = torch.cuda.is_available()
RANK = 16
EXACT = 1
"""Shapes that are computed in float32 too, which takes longer than all others."""
REENTRANT = {"use_reentrant": False}


class Shape(NamedTuple):
    """Lengths of a step in tokens, and completions of a prompt."""

    prompt: int
    tokens: int
    group: int


SHAPES_OF_STEPS = (
    *(Shape(104, 256, 8), Shape(104, 40, 8), Shape(838, 128, 8)),
    *(Shape(838, 128, 4), Shape(838, 128, 16)),
    *(Shape(256, 128, 8), Shape(512, 128, 8), Shape(1536, 128, 8)),
)
"""The first are about those of GSM8K, of short word problems, and of ToolRL's requests."""


def build_trainer(policy: str, directory: str, *, exact: bool, recompute: bool, share: str) -> Any:
    """Build a trainer of adapters; `exact` computes in float32."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU and not exact else torch.float32
    if policy in SHAPES:
        with torch.device("cuda" if ON_GPU else "cpu"):
            model = AutoModelForCausalLM.from_config(build_config(policy), dtype=dtype)
        tokenizer = load_policy("embedded")[1]
    else:
        model, tokenizer = load_policy(policy, dtype)
    arguments = GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=8,
        num_generations=8,
        bf16=ON_GPU and not exact,
        gradient_checkpointing=recompute,
        use_cpu=not ON_GPU,
        report_to=[],
    )
    trainer = MicroBatchTrainer(
        model=model,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=tokenizer,
        peft_config=build_adapter_config(model, ModelSettings(lora_rank=RANK), policy),
        shared_prompts=share,
    )
    network: Any = trainer.model.train()
    if recompute:  # as `train` begins
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    return trainer


def draw_batch(shape: Shape, completions: int, device: Any) -> tuple[Tensor, Tensor]:
    """Draw tokens and their mask, [completions, prompt + tokens]."""
    torch.manual_seed(1)
    prompts = torch.randint(3, 500, (completions // shape.group, shape.prompt))
    prompts = prompts.repeat_interleave(shape.group, dim=0)
    ids = torch.cat([prompts, torch.randint(3, 500, (completions, shape.tokens))], dim=1)
    lengths = torch.randint(shape.tokens // 2, shape.tokens + 1, (completions, 1))
    mask = torch.arange(shape.prompt + shape.tokens) < shape.prompt + lengths
    return (ids * mask).to(device), mask.long().to(device)


class Pass(NamedTuple):
    """What a forward and backward pass took and gave."""

    seconds: float
    peak_gib: float
    """Of torch's memory on the GPU; 0 on a CPU."""
    log_probs: Tensor
    gradients: Tensor


def run_pass(trainer: Any, shape: Shape, completions: int, repeats: int) -> Pass:
    """Compute log-probabilities and entropies, and gradients of the sum of the first."""
    model = trainer.model
    ids, mask = draw_batch(shape, completions, model.device)
    present = mask[:, -shape.tokens :].bool()
    seconds: list[float] = []
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats + 1):  # the first is not counted
        model.zero_grad()
        started = read_time()
        log_probs, _, _ = trainer._get_per_token_logps_and_entropies(
            model, ids, mask, shape.tokens, compute_entropy=True
        )
        log_probs[present].sum().backward()
        seconds.append(read_time() - started)
    print(f"{shape}, prompts shared: {not trainer.unshared}: {seconds} s", flush=True)
    gradients = [w.grad.flatten().float().cpu() for w in model.parameters() if w.grad is not None]
    return Pass(
        statistics.median(seconds[1:] or seconds),
        torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0,
        log_probs.detach()[present].float().cpu(),
        torch.cat(gradients),
    )


def read_time() -> float:
    """Wait for the GPU and return the time; without one, the CPU seconds of this process."""
    if not ON_GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure_difference(one: Pass, other: Pass, name: str) -> dict[str, float]:
    """Return how far two passes are apart: in nats, of gradients by their norm."""
    apart = (one.log_probs - other.log_probs).abs()
    gradients = (one.gradients - other.gradients).norm() / other.gradients.norm()
    figures = {"largest": apart.max(), "mean": apart.mean(), "gradients": gradients}
    return {f"{name}_{kind}": float(f"{value:.3g}") for kind, value in figures.items()}


def measure(
    policy: str = "qwen2.5-1.5b",
    completions: int = 64,
    keep_activations: bool = False,
    repeats: int = 3,
    shapes: int = len(SHAPES_OF_STEPS),
    picture: str = "",
) -> dict[str, Any]:
    """Measure the first `shapes` of `SHAPES_OF_STEPS`, padded and shared."""
    torch.set_num_threads(torch.get_num_threads() if ON_GPU else 1)
    wanted = SHAPES_OF_STEPS[:shapes]
    passes: dict[str, list[Pass]] = {}
    for name, share in (("exact", "off"), ("padded", "off"), ("shared", "on")):
        exact = name == "exact"
        with tempfile.TemporaryDirectory() as directory:
            trainer = build_trainer(
                policy, directory, exact=exact, recompute=not keep_activations, share=share
            )
            passes[name] = [
                run_pass(trainer, shape, completions, 0 if exact else repeats)
                for shape in (wanted[:EXACT] if exact else wanted)
            ]
        del trainer
        if ON_GPU:
            torch.cuda.empty_cache()
    rows: list[dict[str, Any]] = []
    for row, shape in enumerate(wanted):
        padded, shared = passes["padded"][row], passes["shared"][row]
        figures = {
            "padded_seconds": round(padded.seconds, 3),
            "shared_seconds": round(shared.seconds, 3),
            "ratio": round(shared.seconds / padded.seconds, 3),
            "padded_gib": round(padded.peak_gib, 2),
            "shared_gib": round(shared.peak_gib, 2),
            **measure_difference(shared, padded, "differ"),
        }
        for name in ("padded", "shared") if row < EXACT else ():
            exact = passes["exact"][row]
            figures |= measure_difference(passes[name][row], exact, f"{name}_from_float32")
        rows.append({**shape._asdict(), **figures})
    print_table(tuple(rows[-1])[:8], *(tuple(row.values())[:8] for row in rows))
    device = torch.cuda.get_device_name() if ON_GPU else "one CPU thread"
    if picture:
        draw_picture(rows, picture, f"{policy} on {device}")
    return {"device": device, "policy": policy, "completions": completions, "rows": rows}


def draw_picture(rows: list[dict[str, Any]], file: str, title: str) -> None:
    """Draw the ratio of seconds over group sizes, and over lengths of prompts."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    sides = (("group", "completions of a prompt", "prompt", 838),)
    sides += (("prompt", "tokens of a prompt, groups of 8", "group", 8),)
    for axis, (key, label, fixed, value) in zip(axes, sides, strict=True):
        chosen = [row for row in rows if row[fixed] == value and row["tokens"] == 128]
        line = sorted((row[key], row["ratio"]) for row in chosen)
        axis.plot(*zip(*line, strict=True), "o-", color="#1b6ca8")
        for x, y in line:
            axis.annotate(f"{y:.2f}", (x, y), textcoords="offset points", xytext=(0, 7))
        axis.set(xlabel=label, ylabel="seconds: prompts once / padded", ylim=(0, 1))
        axis.margins(x=0.12)
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=140)


if __name__ == "__main__":
    run(measure, {"policy": "tiny", "completions": 16, "repeats": 1, "shapes": 2})
