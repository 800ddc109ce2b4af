"""Memory of a trial on a GPU, computed from the size of its policy; docs/gpus.md states it.

Source: docs/policies.md for what a layer keeps for the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gdpo_tune.core.engines import ADAPTER_RANKS, find_vllm
from gdpo_tune.core.policy_size import PolicySize
from gdpo_tune.core.vllm_memory import CONTEXT, EngineMemory, estimate_engine
from gdpo_tune.spec.model import SweepSpec

NUMBERS = {"auto": 2, "bfloat16": 2, "float32": 4}
"""`model.dtype` on a GPU -> bytes of a parameter that is not trained."""
TRAINED = 4
"""Bytes of a trained weight, and of its gradient: 32 bits."""
AVERAGES = 8
"""Bytes of the optimizer's two averages of a trained number, in 32 bits."""
AVERAGES_8BIT = 2
"""The same in 8 bits; the scales of blocks add 2 %."""
REFERENCE = 4
"""Bytes of a parameter of the reference policy: TRL loads a second copy in 32 bits."""
LOGITS = 300 * 10**6
"""Bytes of the logits that TRL computes at a time."""
GATHERED = 2
"""Layers that FSDP2 gathers at a time: the one that computes, and the next."""


@dataclass(frozen=True)
class Layout:
    """How a trial's memory is spread over processes and trials."""

    workers: int = 1
    """Processes that share the completions of a step."""
    shards: int = 1
    """Processes over which weights, gradients and averages are divided (FSDP2); 1 for none."""
    averages: int = AVERAGES
    """Bytes of a GPU that the optimizer's averages of a trained number take."""
    trials: int = 1
    """Trials of LoRA in a process: one base and one engine, and adapters for each trial."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of the process that trains, without its engine."""

    weights: int
    """Weights, and of those that are trained averages too."""
    gradients: int
    """Gradients of trained weights; several processes without FSDP2 keep them twice."""
    rounded: int
    """What a step computes with beside: trained weights in bfloat16, or what FSDP2 gathers."""
    reference: int
    """The untrained policy, where beta can be above 0 and every weight is trained."""
    head: int
    """Gradient of the output head, and the logits of a tile."""
    activations: int
    """Hidden states that the backward pass of a micro-batch needs, with full-length completions."""
    whole: int = 0
    """Divided policy, where Transformers samples with all of it, or it is not trained at all."""

    @property
    def at_rest(self) -> int:
        """Bytes while completions are sampled."""
        return CONTEXT + self.weights + self.reference

    @property
    def least(self) -> int:
        """Bytes without which no step can be computed, however short the completions are."""
        return max(self.at_rest + self.gradients + self.rounded, self.whole)

    @property
    def total(self) -> int:
        """Bytes with full-length completions."""
        step = self.at_rest + self.gradients + self.rounded + self.head + self.activations
        return max(step, self.whole)


def read_layout(spec: SweepSpec) -> Layout:
    """Return the layout that a file asks for."""
    resources = spec.resources
    return Layout(
        workers=resources.workers,
        shards=resources.workers if resources.shards_policy else 1,
        averages=AVERAGES_8BIT if spec.training.optimizer == "adamw_8bit" else AVERAGES,
        trials=resources.trials_per_process,
    )


def has_reference(spec: SweepSpec) -> bool:
    """Return whether some trial keeps a second copy of the policy, for the KL.

    With adapters, the policy without them is the reference.
    """
    betas = spec.space.list_reachable("beta")
    return not spec.model.lora_rank and (betas is None or any(float(beta) > 0 for beta in betas))


def uses_engine(spec: SweepSpec) -> bool:
    """Return whether vLLM samples in the trainer's process, as far as it is installed."""
    rollout = spec.rollout
    by_default = rollout.engine == "auto" and find_vllm() is not None
    return rollout.vllm_mode == "colocate" and (rollout.engine == "vllm" or by_default)


def measure_trainer(
    spec: SweepSpec, size: PolicySize, layout: Layout | None = None
) -> TrainerMemory:
    """Compute the memory of a training process without its engine; the file's own layout if None.

    Several trials in the process compute one after another, so activations count once.
    """
    layout = layout or read_layout(spec)
    model, training, width = spec.model, spec.training, NUMBERS[spec.model.dtype]
    rank, numbers = model.lora_rank, size.parameters
    trained = numbers
    if rank:
        trained = layout.trials * size.count_adapter_numbers(rank, model.lora_targets)
    weights = (TRAINED + layout.averages) * trained + (width * numbers if rank else 0)
    plain = layout.workers > layout.shards
    hidden = width if rank else 4
    # Autograd keeps one hidden state a layer, and everything of the layer that is recomputed.
    layer = 2 * width * (4 * size.inner_width + 8 * size.width)
    kept = size.layers if model.gradient_checkpointing == "off" else 1
    token = hidden * size.layers * size.width + kept * layer
    update = training.mini_batch_size or training.completions_per_step
    at_once = training.micro_batch_size or update // layout.workers
    reference = REFERENCE * numbers if has_reference(spec) else 0
    whole = 0
    if layout.shards > 1 and not uses_engine(spec):
        sampling = (weights + reference) // layout.shards + width * numbers
        whole = CONTEXT + max(sampling, (width if rank else TRAINED) * numbers)
    return TrainerMemory(
        weights=weights // layout.shards,
        gradients=(2 if plain else 1) * TRAINED * trained // layout.shards,
        rounded=_measure_rounded(spec, size, layout),
        reference=reference // layout.shards,
        head=(0 if rank else 4 * size.vocabulary * size.width) + LOGITS,
        activations=at_once * get_longest(spec) * token,
        whole=whole,
    )


def _measure_rounded(spec: SweepSpec, size: PolicySize, layout: Layout) -> int:
    """Return the bytes of weights in the number format in which a step computes."""
    rank, width = spec.model.lora_rank, NUMBERS[spec.model.dtype]
    if layout.shards == 1:
        return width * size.parameters if not rank and width < TRAINED else 0
    layer = (size.parameters - size.outer) // max(size.layers, 1)
    gathered = width * (size.outer + GATHERED * layer)
    # Gradients too, until they are divided, and once more in 32 bits while they are summed.
    return gathered if rank else (2 * width + TRAINED) * gathered // width


def measure_engine(spec: SweepSpec, size: PolicySize, layout: Layout | None = None) -> EngineMemory:
    """Compute the memory without which vLLM does not start, from the shape of the policy.

    Each worker has an engine with every weight, for its part of the completions.
    """
    layout, rank = layout or read_layout(spec), spec.model.lora_rank
    slot = next((larger for larger in ADAPTER_RANKS if larger >= rank), rank)
    adapters = size.count_adapter_numbers(slot, spec.model.lora_targets) if rank else 0
    return estimate_engine(
        parameters=size.parameters + layout.trials * adapters,
        width=size.width,
        inner_width=size.inner_width,
        vocabulary=size.vocabulary,
        cached=size.cached,
        completions=layout.trials * spec.training.completions_per_step // layout.workers,
        length=get_longest(spec),
        number=NUMBERS[spec.model.dtype],
    )


def get_longest(spec: SweepSpec) -> int:
    """Return the most tokens of a prompt and its completion together."""
    return spec.data.max_prompt_length + spec.training.max_completion_length


def fits(
    trainer: TrainerMemory, engine: EngineMemory, *, room: int, share: float, sleeps: bool
) -> bool:
    """Return whether trainer and engine fit with full-length completions.

    Args:
        trainer: the process that trains.
        engine: its engine, which takes the `share` of the room.
        room: bytes of the GPU that the process may take.
        share: `rollout.vllm_memory_share`.
        sleeps: whether the engine keeps only its workspace while a step is computed.
    """
    if engine.least > share * room:
        return False
    if sleeps:
        return trainer.at_rest <= (1 - share) * room and trainer.total + engine.workspace <= room
    return trainer.total <= (1 - share) * room


def fits_in(spec: SweepSpec, size: PolicySize, room: int, layout: Layout | None = None) -> bool:
    """Return whether a process of a trial fits into `room` bytes of a GPU as the file divides them.

    Completions count with their full length, those of all trials that the process trains.
    """
    layout = layout or read_layout(spec)
    trainer = measure_trainer(spec, size, layout)
    if not uses_engine(spec):
        return trainer.total <= room
    engine, share = measure_engine(spec, size, layout), spec.rollout.vllm_memory_share
    return fits(trainer, engine, room=room, share=share, sleeps=spec.rollout.sleep)


def count_trials_that_fit(spec: SweepSpec, size: PolicySize, room: int, most: int) -> int:
    """Return how many trials of LoRA, at most `most`, fit into one process; 0 if not even one does.

    They share the base policy and the engine. `room` is the bytes of a GPU that the process may
    take: `resources.gpus` times the GPU's memory.
    """
    layout = read_layout(spec)
    counts = range(most, 0, -1)
    return next((n for n in counts if fits_in(spec, size, room, replace(layout, trials=n))), 0)


def format_bytes(count: float) -> str:
    """Return a number of bytes with two or three digits, in decimal units."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if count >= 10**power:
            amount = count / 10**power
            return f"{amount:.1f} {unit}" if amount < 100 else f"{amount:,.0f} {unit}"
    return f"{count / 1000:.1f} kB"
