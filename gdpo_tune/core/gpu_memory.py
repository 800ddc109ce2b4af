"""Estimate of a trial's memory on a GPU: for the dry run, a refusal, and the room of micro-batches.

Weights, gradients, moments, reference, activations of one group, and vLLM. It is an estimate: the
step metric `train/gpu_peak_gib` says what a trial really took.

Source: docs/measurements.md, peaks of steps on a simulated device; tests repeat them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gdpo_tune.core.engines import ADAPTER_RANKS
from gdpo_tune.core.policy_shapes import PolicyShapes, find_position_limit
from gdpo_tune.core.trial_config import TrialConfig

GIB = 2**30
CUDA_CONTEXT_BYTES = GIB // 2
"""Bytes of a GPU that CUDA takes for a process beside what torch allocates and can limit."""
CUDA_GRAPHS_BYTES = GIB // 2
"""Bytes of an engine's compiled graphs."""
MOST_SEQUENCES = 1024
"""Completions that an engine samples side by side; vLLM allows no more than batched tokens, which
TRL fixes at 4,096, and each costs `SAMPLING_BYTES_PER_LOGIT` for every token of the vocabulary."""
BATCHED_TOKENS = 4096
"""Tokens that an engine of TRL computes at once."""
CACHE_BLOCK = 16
"""Tokens in a block of an engine's cache."""
SAMPLING_BYTES_PER_LOGIT = 16
"""Bytes of an engine for each entry of the vocabulary and each completion that it samples at once:
four arrays of 32-bit numbers while a token is drawn."""
TRAINED_BYTES = 4
"""Bytes of a trained weight, of its gradient, and of a weight of the reference: 32 bits."""
MOMENTS = {"adamw": 8, "adamw_8bit": 2}
"""`training.optimizer` -> bytes of its two moments."""
LOGITS_BYTES = 300 * 10**6
"""Bytes of the logits that TRL computes at a time."""
GATHERED = 2
"""Layers that FSDP2 gathers at a time: the one that computes, and the next."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of vLLM beside the trainer."""

    weights: int
    """The policy's weights, and the slots of adapters."""
    workspace: int
    """Graphs, activations, and the probabilities of the next tokens."""
    longest: int
    """Cache of one completion of full length with its prompt."""

    @property
    def least(self) -> int:
        """Bytes without which vLLM does not start."""
        return self.weights + self.workspace + self.longest


@dataclass(frozen=True)
class TrialMemory:
    """Bytes on the GPU of one process of a trial."""

    config: TrialConfig
    policy: PolicyShapes
    bfloat16: bool
    """True if the trial computes in it, False for float32."""
    recomputes: bool
    """True if the backward pass recomputes activations."""
    may_have_reference: bool
    """True if `beta` can be above 0; with adapters the reference is the policy without them."""
    has_engine: bool
    """True if vLLM samples in the trainer's process."""
    workers: int = 1
    """Processes that share the completions of a step, and the policy if `config.sharded`."""
    group_size: int = 1
    """Completions of a prompt in a step, at most."""

    @property
    def rank(self) -> int:
        """Rank of the trained adapter; 0 if every weight is trained."""
        return self.config.model.lora_rank

    @property
    def number_bytes(self) -> int:
        """Bytes of a number with which layers compute, and of a weight below an adapter."""
        return 2 if self.bfloat16 else 4

    @property
    def shards(self) -> int:
        """Processes over which FSDP2 divides weights, gradients and moments; 1 for none."""
        return self.workers if self.config.sharded else 1

    @property
    def trained(self) -> int:
        """Trainable parameters."""
        targets = self.config.model.lora_targets
        if not self.rank:
            return self.policy.parameters
        return self.policy.count_adapter_parameters(self.rank, targets)

    @property
    def weights(self) -> int:
        """Weights, and moments of those that are trained."""
        each = TRAINED_BYTES + MOMENTS[self.config.training.optimizer]
        frozen = self.number_bytes * self.policy.parameters if self.rank else 0
        return (each * self.trained + frozen) // self.shards

    @property
    def gradients(self) -> int:
        """Gradients of trained weights; several processes without FSDP2 keep them twice."""
        copies = 2 if self.workers > self.shards else 1
        return copies * TRAINED_BYTES * self.trained // self.shards

    @property
    def reference(self) -> int:
        """The untrained policy: TRL loads a second copy in 32 bits."""
        has_copy = self.may_have_reference and not self.rank
        return TRAINED_BYTES * self.policy.parameters * has_copy // self.shards

    @property
    def copies(self) -> int:
        """Weights in the format of the computation, or what FSDP2 gathers of them at a time."""
        policy, number = self.policy, self.number_bytes
        if self.shards == 1:
            return 0 if self.rank or number == TRAINED_BYTES else number * policy.parameters
        outside = policy.parameters_outside_layers
        layers = GATHERED * (policy.parameters - outside) // max(policy.layers, 1)
        # Gradients of layers too, until they are divided, and once more in 32 bits as a sum.
        return number * (outside + layers) + (number + TRAINED_BYTES) * layers * (not self.rank)

    @property
    def head(self) -> int:
        """Gradient of the output head, which has the shape of the embedding, and a tile of logits.

        FSDP2 has it in the format of the computation.
        """
        number = TRAINED_BYTES if self.shards == 1 else self.number_bytes
        trained = self.policy.vocabulary * self.policy.hidden_size * (not self.rank)
        return number * trained + LOGITS_BYTES

    @property
    def tokens(self) -> int:
        """Most tokens of a prompt and its completion together."""
        config = self.config
        asked = config.data.max_prompt_length + config.training.max_completion_length
        return min(asked, find_position_limit(self.policy.config) or asked)

    @property
    def micro_batch(self) -> tuple[int, int]:
        """Prompts and completions of a micro-batch: of one group, unless the settings have a size.

        A prompt counts once, unless prompts are not shared or mini-batches draw their completions.
        """
        training = self.config.training
        own = (training.mini_batch_size or training.completions_per_step) // self.workers
        asked = training.micro_batch_size
        count = min(self.group_size if asked == "auto" else int(asked) or own, own)
        is_apart = training.mini_batch_size or self.config.model.shared_prompts == "off"
        return (count if is_apart else -(-count // self.group_size)), count

    @property
    def position_bytes(self) -> int:
        """Bytes of a token that the backward pass of a micro-batch needs.

        Autograd keeps the hidden state between layers, and everything of the layer whose gradients
        are computed: arrays of the feed-forward part and hidden states. Without recomputation it
        keeps most of that for every layer. PEFT converts the input of each module to 32 bits.
        """
        policy, number, is_whole = self.policy, self.number_bytes, self.shards == 1
        inner, hidden = policy.intermediate_size, policy.hidden_size
        between = hidden * (TRAINED_BYTES if is_whole and not self.rank else number)
        arrays = 7 if self.rank and is_whole and self.bfloat16 else 5
        layer = number * (arrays * inner + 12 * hidden) + 6 * between
        kept = between if self.recomputes else number * (4 * inner + 9 * hidden) + 4 * between
        return policy.layers * kept + layer

    @property
    def activations(self) -> int:
        """Bytes that the backward pass of a micro-batch needs, at full length."""
        (prompts, completions), config = self.micro_batch, self.config
        tokens = prompts * config.data.max_prompt_length
        tokens += completions * config.training.max_completion_length
        return tokens * self.position_bytes

    @property
    def at_rest(self) -> int:
        """Bytes of the trainer while an engine samples."""
        return CUDA_CONTEXT_BYTES + self.weights + self.reference

    @property
    def least(self) -> int:
        """Bytes without which no step can be computed, however short the completions are."""
        # Transformers samples with the whole policy.
        gathers_all = self.shards > 1 and not self.has_engine
        sampling = self.number_bytes * self.policy.parameters if gathers_all else 0
        return self.at_rest + max(self.gradients + self.copies, sampling)

    @property
    def total(self) -> int:
        """Bytes of the trainer with full-length completions and gradients of earlier ones."""
        return self.least + self.head + self.activations

    @property
    def engine(self) -> EngineMemory:
        """Bytes of vLLM; each worker has one for its completions."""
        policy, rank = self.policy, self.config.largest_rank
        slot_rank = next((larger for larger in ADAPTER_RANKS if larger >= rank), rank)
        slots = policy.count_slot_parameters(slot_rank) if rank else 0
        activations = BATCHED_TOKENS * (4 * policy.hidden_size + 3 * policy.intermediate_size)
        own = self.config.training.completions_per_step // self.workers
        sampling = SAMPLING_BYTES_PER_LOGIT * policy.vocabulary * min(own, MOST_SEQUENCES)
        blocks = -(-self.tokens // CACHE_BLOCK) + 2  # vLLM keeps one block empty
        return EngineMemory(
            weights=(policy.parameters + slots) * self.number_bytes,
            workspace=CUDA_GRAPHS_BYTES + activations * self.number_bytes + sampling,
            longest=blocks * CACHE_BLOCK * policy.kv_elements_per_token * self.number_bytes,
        )

    @property
    def least_room(self) -> float:
        """Bytes of a GPU below which no trial can run, as the engine's share divides them."""
        share, least = self.config.rollout.vllm_memory_share, self.least
        if not self.has_engine:
            return least
        if self.config.rollout.sleep:
            step = least + self.engine.workspace
            return max(self.engine.least / share, self.at_rest / (1 - share), step)
        return max(self.engine.least / share, least / (1 - share))

    def get_trainer_room(self, room: float) -> float:
        """Return the bytes of `room` that a step may take beside the engine."""
        if not self.has_engine:
            return room
        if self.config.rollout.sleep:
            return room - self.engine.workspace
        return (1 - self.config.rollout.vllm_memory_share) * room
