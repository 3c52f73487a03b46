"""The bytes of a pipeline rank in a step, by kind, from the shapes of what it holds.

    parameters    2 bytes each; with ZeRO 3 a float32 shard
    gradients     4 bytes each (float32 sums; 2 if the job says so); divided by the data-parallel ranks from ZeRO 2 on
    optimizer     12 bytes each (float32 copy and two moments of Adam); divided from ZeRO 1 on
                  (other sources count other bytes: `ACCOUNTINGS` in layout.py)
    activations   what the blocks in flight keep (Korthikanti et al., 2022, section 4, equations 1 to 6)
    logits        of the last stage, with their gradient
    gathered      ZeRO 3: a block and the parameters outside the blocks
    prefetch      ZeRO 3: the blocks that are gathered ahead
    reducing      ZeRO 3: the float32 gradients of a block
    workspace     of the block at work: what its backward needs in addition to what was kept; of the last stage only
                  what is more than the logits, which are gone by then
    constant      what is allocated in addition to these (calibration.py)

With 1F1B the first of p stages keeps p micro-batches, stage r keeps p - r; with v chunks per rank the warm-up has
2 (p - r - 1) + (v - 1) p + 1 chunks (Korthikanti et al., section 4.2.3).

Proved by: tests/planning/test_cluster.py, tests/planning/test_published.py, tests/planning/test_saved_by_autograd.py
"""

from dataclasses import dataclass

from minidist.nn.segments import sqrt_segments
from minidist.planning.cluster.calibration import CALIBRATION
from minidist.planning.cluster.host import divided
from minidist.planning.cluster.layout import ClusterLayout, Job, busiest, stage_layers
from minidist.planning.cluster.shared import shared
from minidist.planning.parts import Part, together

EAGER_LOGIT_BYTES = 12.0  # of each logit, at the moment when PyTorch's cross-entropy computes its gradient
WHOLE_LOGIT_BYTES = 16.0  # of each logit that is gathered: these, and in 2 bytes the logit and its gradient


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank on the GPU, by kind, and on the host. eager: the most that eager kernels keep in addition."""

    by_kind: dict[str, int]
    host: int = 0
    eager: int = 0

    @property
    def states(self) -> int:
        """Return the bytes of parameters, gradients and optimizer."""
        return sum(self.by_kind[kind] for kind in ("parameters", "gradients", "optimizer"))

    @property
    def peak(self) -> int:
        """Return the bytes at the fullest moment of a step."""
        return sum(self.by_kind.values())

    def likely(self, job: Job) -> float:
        """Return the bytes at the fullest moment with the likely share of what eager kernels keep."""
        return self.peak + job.eager_shares[1] * self.eager


@shared(
    lambda layout, job, rank, layers: (job,),
    lambda layout, job, rank, layers: (
        *(layout.tp, layout.pp, layout.ep, layout.expert_tp, rank == 0, rank == layout.pp - 1),
        tuple(layers),
    ),
)
def rank_parameters(layout: ClusterLayout, job: Job, rank: int, layers: list[int]) -> Part:
    """Return the parameters of one rank of a pipeline stage, before ZeRO divides them.

    The embedding lies on the first stage and the output projection on the last; tied ones on two stages are two copies.
    """
    model = job.model
    parts = [model.block_at(layer).times(count) for layer, count in model.of_a_kind(layers)]
    if rank == 0:
        parts.append(model.embedding)
    if rank == layout.pp - 1:
        copied = model.is_tied and layout.pp > 1
        parts.append(model.head._replace(split=model.vocabulary * model.width) if copied else model.head)
    held = together(*parts)
    return Part(-(-held.split // layout.tp), held.replicated, -(-held.expert // (layout.expert_tp * layout.ep)))


def divided_states(count: int, copies: int, zero: int, per_parameter: tuple[int, int, int]) -> dict[str, int]:
    """Return a rank's bytes of `count` parameters that `copies` ranks hold, which ZeRO divides among these.

    Each stage divides one more kind of state: the optimizer, the gradients, the parameters. A shard is rounded up to
    whole elements. per_parameter: bytes of each kind.
    """
    shard = -(-count // copies)
    value, gradient, optimizer = per_parameter
    return {
        "parameters": value * (shard if zero >= 3 else count),
        "gradients": gradient * (shard if zero >= 2 else count),
        "optimizer": optimizer * (shard if zero >= 1 else count),
    }


def states(layout: ClusterLayout, job: Job, rank: int, layers: list[int]) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states of one rank of a stage."""
    own = rank_parameters(layout, job, rank, layers)
    per_parameter = job.state_bytes(layout.zero)
    # Experts have fewer copies: of the ranks of a stage, ep hold different ones.
    expert_copies = layout.sharding_ranks * layout.tp // layout.expert_tp // layout.ep
    shared_by_all = divided_states(own.split + own.replicated, layout.sharding_ranks, layout.zero, per_parameter)
    experts = divided_states(own.expert, expert_copies, layout.zero, per_parameter)
    return {kind: nbytes + experts[kind] for kind, nbytes in shared_by_all.items()}


def block_activations(layout: ClusterLayout, job: Job, layer: int, recompute: str | None = None) -> int:
    """Return the bytes that one block keeps of one micro-batch, in 2-byte values and 1-byte masks.

    With fp8 the inputs of matrix products are kept as 8-bit floats, as Transformer Engine does.

    recompute: none; full (only the block's input is kept); selective, which computes the scores again where they are
    stored, and with fused attention the outputs of norms and of the activation function.
    """
    model, t = job.model, layout.tp
    recompute = layout.recompute if recompute is None else recompute
    tokens = layout.micro_batch * job.length // layout.cp
    # What sequence parallelism divides in addition to what tensor parallelism divides.
    outer = t if layout.sequence_parallel else 1
    if recompute == "full":
        return 2 * tokens * model.width // outer
    again = recompute == "selective" and job.fused_attention
    whole, divided = _attention_activations(layout, job, recompute, again)
    more_whole, more_divided = _mlp_activations(layout, job, layer, again)
    # A layer that is an MLP alone, or has none, keeps the inputs of one norm instead of two.
    kind = model.kinds[model.kind(layer)]
    if not kind.mixes:
        whole, divided = whole // 2, 0
    if not kind.has_mlp:
        whole, more_whole, more_divided = whole // 2, 0, 0
    return (whole + more_whole) // outer + (divided + more_divided) // t


def _attention_activations(layout: ClusterLayout, job: Job, recompute: str, again: bool) -> tuple[int, int]:
    """Return what norms, residuals and attention keep: on every tensor-parallel rank, and divided among these.

    again: outputs of norms are computed again.
    """
    # Norms: their inputs and outputs. Attention: queries, keys, values, and the input of the output projection.
    model, t, operand = job.model, layout.tp, _operand_bytes(job)
    tokens = layout.micro_batch * job.length // layout.cp
    masks = 2 * tokens * model.width if job.has_dropout else 0
    whole = (4 + (0 if again else 2 * operand)) * tokens * model.width + masks
    kv = model.kv_size if t <= (model.kv_heads or model.heads) else model.kv_size * t // (model.kv_heads or model.heads)
    divided = 2 * tokens * (model.query_size + 2 * kv) + operand * tokens * model.value_size
    if model.latent:
        whole += 2 * tokens * (model.latent.kv_rank + (model.latent.q_rank or 0))
    if job.fused_attention:
        # One float32 sum per query and head. The output in 2 bytes is the projection's input, unless that has 1.
        divided += 4 * tokens * model.heads + (2 * tokens * model.value_size if operand == 1 else 0)
    elif recompute == "none":
        divided += _score_bytes(job) * tokens * job.length * model.heads
    return whole, divided


def _score_bytes(job: Job) -> int:
    """Return the bytes that unfused attention keeps for each pair of positions and head.

    The softmax in 2 bytes, with dropout also its copy and a mask; LLaMA's code computes it in float32 and keeps both.
    """
    return 5 if job.has_dropout else 6 if job.model.gated and job.likely_kernels != "fused" else 2


def _mlp_activations(layout: ClusterLayout, job: Job, layer: int, again: bool) -> tuple[int, int]:
    """Return what the MLP keeps: on every tensor-parallel rank, and divided among these.

    Gate, up and their product, or the input and the output of GELU; for experts of each copy of a token.
    """
    model, whole = job.model, 0
    tokens = layout.micro_batch * job.length // layout.cp
    if model.is_sparse(layer):
        copies = busiest(layout, job) * model.top_k + model.shared_experts
        inner = round(copies * (model.expert_inner or model.inner))
        # The copies that experts get. The ranks that share an expert gather the tokens of each other's sequences.
        inputs = round(2 * tokens * model.width * busiest(layout, job) * model.top_k)
        whole = inputs * (layout.expert_tp if layout.sequence_parallel else 1) + 4 * tokens * model.experts
    else:
        inner = model.inner
    return whole, ((4 if model.gated else 2) + (0 if again else _operand_bytes(job))) * tokens * inner


def _operand_bytes(job: Job) -> int:
    """Return the bytes of a value that is kept as the input of a matrix product."""
    return 1 if job.precision == "fp8" else 2


def eager_bytes(layout: ClusterLayout, job: Job, layer: int) -> int:
    """Return what eager kernels keep of a gated block's micro-batch in addition to `block_activations`.

    An RMS norm in PyTorch's own operations keeps its input in float32 and its normalized values (8 bytes per element
    with its output, in place of 4), and SwiGLU keeps silu(gate). A layer norm and GELU have one kernel each. What
    autograd saves in a block of `transformers`' Llama is this, and two float32 numbers per token (4 for each norm).
    """
    model = job.model
    if not model.gated:
        return 0
    tokens, outer = layout.micro_batch * job.length // layout.cp, layout.tp if layout.sequence_parallel else 1
    inner: float = model.inner
    if model.is_sparse(layer):
        inner = (busiest(layout, job) * model.top_k + model.shared_experts) * (model.expert_inner or model.inner)
    norms = 0 if job.likely_kernels == "fused-norms" else 8 * tokens * model.width // outer
    return norms + round(2 * tokens * inner) // layout.tp


def _eager_of_rank(layout: ClusterLayout, job: Job, rank: int, layers: list[int]) -> int:
    """Return what eager kernels of a rank hold at the fullest moment in addition to fused ones.

    What blocks keep (`eager_bytes`), and the loss: of each logit a fused cross-entropy has `logit_bytes`, and PyTorch's
    three float32 values at one time, the log-softmax, its gradient, and the gradient of the logit. Where each
    tensor-parallel rank gathers all logits, it has these of all, and the gathered logits and their gradient in 2 bytes.
    """
    model, tokens = job.model, layout.micro_batch * job.length // layout.cp
    blocks = _of_a_kind(job, layers)
    largest, _ = blocks[-1]
    if layout.recompute != "none" or layout.host == "activations":
        # What is recomputed, or waits on the host, exists for one block at a time.
        kept = eager_bytes(layout, job, largest)
    else:
        kept = int(sum(count * eager_bytes(layout, job, layer) for layer, count in blocks) * in_flight(layout, rank))
    if rank < layout.pp - 1:
        return kept
    counted = CALIBRATION.logit_bytes / layout.tp
    each = WHOLE_LOGIT_BYTES if job.has_whole_logits else EAGER_LOGIT_BYTES / layout.tp
    return kept + int((each - counted) * tokens * model.vocabulary)


def in_flight(layout: ClusterLayout, rank: int) -> float:
    """Return how many micro-batches of a rank's layers are kept at the fullest moment."""
    p, v, m = layout.pp, layout.vp, layout.microbatches
    if v == 1:
        return min(p - rank, m)
    return min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v) / v


@shared(lambda job, layers: (job,), lambda job, layers: tuple(layers))
def _of_a_kind(job: Job, layers: list[int]) -> list[tuple[int, int]]:
    """Return (a layer, how many there are like it), of layers without experts and then of those with them."""
    return job.model.of_a_kind(layers)


def rank_memory(layout: ClusterLayout, job: Job, rank: int, layers: list[int]) -> RankMemory:
    """Return the memory of one rank at the fullest moment of a step, on the GPU and on the host."""
    model, t = job.model, layout.tp
    tokens = layout.micro_batch * job.length // layout.cp
    outer = t if layout.sequence_parallel else 1
    kinds = dict(states(layout, job, rank, layers))

    # Activations of the micro-batches in flight; embeddings keep a mask, the last norm and projection their inputs.
    blocks = _of_a_kind(job, layers)
    largest, _ = blocks[-1]
    if layout.recompute == "sqrt":
        kept = len(sqrt_segments(len(layers))) * block_activations(layout, job, largest, "full")
    else:
        kept = sum(count * block_activations(layout, job, layer) for layer, count in blocks)
    activations = kept * in_flight(layout, rank)
    if rank == 0 and job.has_dropout:
        activations += tokens * model.width // outer * min(layout.pp, layout.microbatches)
    if rank == layout.pp - 1:
        activations += 4 * tokens * model.width // outer
    kinds["activations"] = int(activations)
    kinds["logits"] = int(CALIBRATION.logit_bytes * tokens * model.vocabulary / t) if rank == layout.pp - 1 else 0

    # What is recomputed, a block or a segment, exists whole for a moment, with the gradient of its widest value; any
    # other block has the gradients that flow through it.
    if layout.runs_forward_twice:
        blocks_at_once = sqrt_segments(len(layers))[0] if layout.recompute == "sqrt" else 1
        whole = blocks_at_once * block_activations(layout, job, largest, "none")
        kinds["workspace"] = whole + 2 * tokens * max(model.width, model.inner // t)
    elif layout.recompute == "selective" and not job.fused_attention:
        kinds["workspace"] = _score_bytes(job) * (tokens * job.length * model.heads // t)
    else:
        kinds["workspace"] = 4 * tokens * max(model.width, model.inner // t)
    # The logits are gone before the first block's backward pass begins.
    kinds["workspace"] = max(0, kinds["workspace"] - kinds["logits"])
    if layout.zero == 3:
        block = rank_parameters(layout, job, 1, [largest])
        rest = model.embedding.total + model.head.total if layout.pp == 1 else model.embedding.total
        kinds["gathered"] = 2 * (block.total + rest // t)
        kinds["prefetch"] = 2 * min(job.prefetch, len(layers) - 1) * block.total
        kinds["reducing"] = 4 * block.total
    kinds["constant"] = int(CALIBRATION.constant_bytes)
    on_gpu, on_host = divided(layout, kinds, 2 * block_activations(layout, job, largest))
    return RankMemory(on_gpu, on_host, _eager_of_rank(layout, job, rank, layers))


def memory_by_rank(layout: ClusterLayout, job: Job) -> list[RankMemory]:
    """Return the memory of one rank of each pipeline stage."""
    stages = stage_layers(layout, job.model.layers)
    return [rank_memory(layout, job, rank, layers) for rank, layers in enumerate(stages)]
