"""Memory of a trial on a GPU, computed from the shapes of its policy; docs/gpus.md states it.

Source: docs/measurements.md, peaks of steps of the trainer on a simulated device, from which what a
layer keeps and needs was read; tests repeat them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gdpo_tune.core.engines import ADAPTER_RANKS
from gdpo_tune.core.policy_shapes import PolicyShapes, find_position_limit
from gdpo_tune.core.settings import EVERY_LINEAR

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
NUMBER_BYTES = {"auto": 2, "bfloat16": 2, "float32": 4}
"""`model.dtype` on a GPU -> bytes of a parameter that is not trained."""
TRAINED_PARAMETER_BYTES = 4
"""Bytes of a trained weight, of its gradient, and of a weight of the reference: 32 bits."""
MOMENTS = {"adamw": 8, "adamw_8bit": 2}
"""`training.optimizer` -> bytes of its two moments; the scales of 8 bits add 2 %."""
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
    """Graphs, activations, and the probabilities of the next tokens: an estimate."""
    longest: int
    """Cache of one completion of full length with its prompt."""

    @property
    def least(self) -> int:
        """Minimum memory for vLLM."""
        return self.weights + self.workspace + self.longest


@dataclass(frozen=True)
class TrialMemory:
    """Bytes on the GPU of one process of a trial, by what it trains and how it is spread."""

    policy: PolicyShapes
    completions: int
    """Completions of a step, over all workers."""
    prompt_tokens: int
    """Most tokens of a prompt."""
    completion_tokens: int
    """Most tokens of a completion."""
    group_size: int = 1
    """Completions of a prompt in a step."""
    shares_prompts: bool = True
    """True if a prompt is computed once for its completions in a micro-batch, without padding."""
    micro_batch: int | str = "auto"
    """Completions of a forward and backward pass; 0: all of a worker's part of a mini-batch; auto:
    as many as fit, and the estimate is of a group."""
    mini_batch: int = 0
    """Completions of an optimizer step, over all workers; 0: all."""
    rank: int = 0
    engine_rank: int = 0
    """Rank of the largest adapter for which vLLM has room; 0: `rank`."""
    targets: tuple[str, ...] = (EVERY_LINEAR,)
    number_bytes: int = 2
    moment_bytes: int = 8
    has_reference: bool = False
    """True if the untrained policy is kept for the KL; with adapters it is the policy without."""
    recomputes: bool = True
    workers: int = 1
    """Processes that share the completions of a step."""
    shards: int = 1
    """Processes over which weights, gradients and moments are divided (FSDP2); 1 for none."""
    engine_share: float = 0.0
    """Part of the room that vLLM takes; 0 without an engine."""
    sleeps: bool = False
    """True if the engine keeps only its workspace while a step is computed."""

    @property
    def trained(self) -> int:
        """Trainable parameters."""
        if not self.rank:
            return self.policy.parameters
        return self.policy.count_adapter_parameters(self.rank, self.targets)

    @property
    def weights(self) -> int:
        """Weights, and moments of those that are trained."""
        frozen = self.number_bytes * self.policy.parameters if self.rank else 0
        return (
            (TRAINED_PARAMETER_BYTES + self.moment_bytes) * self.trained + frozen
        ) // self.shards

    @property
    def gradients(self) -> int:
        """Gradients of trained weights; several processes without FSDP2 keep them twice."""
        copies = 2 if self.workers > self.shards else 1
        return copies * TRAINED_PARAMETER_BYTES * self.trained // self.shards

    @property
    def compute_copies(self) -> int:
        """Extra copies while layers compute: trained weights in bfloat16, or what FSDP2 gathers."""
        policy, number = self.policy, self.number_bytes
        if self.shards == 1:
            has_copies = not self.rank and number < TRAINED_PARAMETER_BYTES
            return number * policy.parameters if has_copies else 0
        outside = policy.parameters_outside_layers
        layers = GATHERED * (policy.parameters - outside) // max(policy.layers, 1)
        # Gradients of layers too, until they are divided, and once more in 32 bits as a sum.
        summed = 0 if self.rank else (number + TRAINED_PARAMETER_BYTES) * layers
        return number * (outside + layers) + summed

    @property
    def reference(self) -> int:
        """The untrained policy: TRL loads a second copy in 32 bits."""
        return TRAINED_PARAMETER_BYTES * self.policy.parameters * self.has_reference // self.shards

    @property
    def _head_gradient(self) -> int:
        """Bytes of the gradient of the output head, which has the shape of the embedding."""
        policy = self.policy
        # FSDP2 computes in another format than it sums in.
        number = TRAINED_PARAMETER_BYTES if self.shards == 1 else self.number_bytes
        return 0 if self.rank else number * policy.vocabulary * policy.hidden_size

    @property
    def head(self) -> int:
        """Gradient of the output head, and the logits of a tile."""
        return self._head_gradient + LOGITS_BYTES

    @property
    def last_gradients(self) -> int:
        """Gradients of embedding and head at the end of a backward pass, beside no activations.

        A head that is the embedding has two of them, which are added up. FSDP2 has gathered both,
        and sums their gradients in 32 bits.
        """
        if self.rank:
            return 0
        outside, number = self.policy.parameters_outside_layers, self.number_bytes
        is_tied = outside < 2 * self.policy.vocabulary * self.policy.hidden_size
        if self.shards == 1:
            return self._head_gradient * (2 if is_tied else 1)
        return (2 * number + TRAINED_PARAMETER_BYTES) * outside + self._head_gradient * is_tied

    @property
    def tokens(self) -> int:
        """Most tokens of a prompt and its completion together."""
        asked = self.prompt_tokens + self.completion_tokens
        return min(asked, find_position_limit(self.policy.config) or asked)

    @property
    def micro_batch_size(self) -> tuple[int, int]:
        """Prompts and completions of a micro-batch; each prompt is computed once."""
        own = (self.mini_batch or self.completions) // self.workers
        asked = self.group_size if self.micro_batch == "auto" else int(self.micro_batch)
        count = prompts = min(asked or own, own)
        # Completions of a mini-batch are drawn at random, groups apart.
        if self.shares_prompts and self.mini_batch in (0, self.completions):
            prompts = -(-count // self.group_size)
        return prompts, count

    @property
    def positions(self) -> int:
        """Tokens of a micro-batch of full length, padding included."""
        prompts, count = self.micro_batch_size
        return prompts * self.prompt_tokens + count * self.completion_tokens

    @property
    def position_bytes(self) -> int:
        """Bytes of a token that the backward pass of a micro-batch needs.

        Autograd keeps the hidden state between layers, in 32 bits where every weight is trained and
        not divided. Without recomputation it keeps everything of each layer: four arrays of the
        feed-forward part, nine hidden states in the computation's format, and four as they are
        between layers. The layer whose gradients are computed has a fifth array, and more hidden
        states. Where adapters in 32 bits are not divided, PEFT converts the input of each module.
        """
        policy, number = self.policy, self.number_bytes
        inner, hidden = policy.intermediate_size, policy.hidden_size
        is_whole = not self.rank and self.shards == 1
        between = (TRAINED_PARAMETER_BYTES if is_whole else number) * hidden
        converts = self.rank and self.shards == 1 and number < TRAINED_PARAMETER_BYTES
        arrays = 7 if converts else 5
        layer = number * (arrays * inner + 12 * hidden) + 6 * between
        if self.recomputes:
            return policy.layers * between + layer
        return (policy.layers - 1) * (number * (4 * inner + 9 * hidden) + 4 * between) + layer

    @property
    def activations(self) -> int:
        """Bytes that the backward pass of a micro-batch needs, at full length."""
        return self.positions * self.position_bytes

    @property
    def full_policy(self) -> int:
        """Whole policy, where Transformers samples with it or it is not trained; 0 elsewhere."""
        if self.shards == 1 or self.engine_share:
            return 0
        numbers = self.policy.parameters
        sampling = self.weights + self.reference + self.number_bytes * numbers
        return CUDA_CONTEXT_BYTES + max(
            sampling, (self.number_bytes if self.rank else TRAINED_PARAMETER_BYTES) * numbers
        )

    @property
    def at_rest(self) -> int:
        """Bytes of the trainer while completions are sampled."""
        return CUDA_CONTEXT_BYTES + self.weights + self.reference

    @property
    def least(self) -> int:
        """Bytes without which no step can be computed, however short the completions are."""
        step = max(self.compute_copies, self.last_gradients)
        return max(self.at_rest + self.gradients + step, self.full_policy)

    @property
    def total(self) -> int:
        """Bytes of the trainer with full-length completions and gradients of earlier ones.

        With recomputation, copies in bfloat16 live until the head is computed, and the gradient of
        the head from then on. Gathered weights, and what autograd keeps for each layer, live on.
        """
        copies, head = self.compute_copies, self.head
        is_one_after_the_other = self.recomputes and self.shards == 1
        beside = max(copies, head) if is_one_after_the_other else copies + head
        step = max(beside + self.activations, self.last_gradients)
        return max(self.at_rest + self.gradients + step, self.full_policy)

    @property
    def engine(self) -> EngineMemory:
        """Memory without which vLLM does not start; each worker has one for its completions."""
        policy, rank = self.policy, self.engine_rank or self.rank
        slot_rank = next((larger for larger in ADAPTER_RANKS if larger >= rank), rank)
        slots = policy.count_slot_parameters(slot_rank) if rank else 0
        activations = BATCHED_TOKENS * (4 * policy.hidden_size + 3 * policy.intermediate_size)
        sampled = min(self.completions // self.workers, MOST_SEQUENCES)
        blocks = -(-self.tokens // CACHE_BLOCK) + 2  # vLLM keeps one block empty
        return EngineMemory(
            weights=(policy.parameters + slots) * self.number_bytes,
            workspace=CUDA_GRAPHS_BYTES
            + activations * self.number_bytes
            + SAMPLING_BYTES_PER_LOGIT * policy.vocabulary * sampled,
            longest=blocks * CACHE_BLOCK * policy.kv_elements_per_token * self.number_bytes,
        )

    @property
    def least_room(self) -> float:
        """Bytes of a GPU below which no trial can run, as the engine's share divides them."""
        share = self.engine_share
        if not share:
            return self.least
        parts = [self.engine.least / share]
        if self.sleeps:
            parts += [self.at_rest / (1 - share), self.least + self.engine.workspace]
        else:
            parts.append(self.least / (1 - share))
        return max(parts)

    def get_trainer_room(self, room: float) -> float:
        """Return the bytes of `room` that a step may take beside the engine."""
        if self.engine_share and self.sleeps:
            return room - self.engine.workspace
        return (1 - self.engine_share) * room

    def fits(self, room: int) -> bool:
        """Return whether the process fits into `room` bytes, with full-length completions."""
        share = self.engine_share
        if share and self.engine.least > share * room:
            return False
        if self.sleeps and self.at_rest > (1 - share) * room:
            return False
        return self.total <= self.get_trainer_room(room)
