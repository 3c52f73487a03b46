"""What a model's layers send in a run: each technique's closed form, summed over layers, stages and micro-batches.

With A = b T w, the activation of a micro-batch of b sequences, all t tensor-parallel ranks together send

                 forward (tensor_forward)              backward (tensor_backward)       again for backward (regather)
    block        2 all-reduces: 4 (t-1) A              2 all-reduces: 4 (t-1) A         sequence parallel: 2 (t-1) A
    embedding    1 all-reduce                          -                                -
    head         -                                     1 all-reduce                     sequence parallel: (t-1) A
    loss         all-reduces of 3 b T                  -                                -

Each line is a `..._volume` function of `parallel/volume.py`; a technique with another loss has a closed form of
its own (`Extension.loss_volume`). Sequence parallelism gathers and reduce-scatters instead, the same bytes, and sums
the gradients of norms, of biases behind the sum and of the position table.

What runs forward again sends again what forward sends: recomputed blocks, recomputed stages, and once, before the first
step and as purpose startup, the empty pass by which a pipeline learns the shapes at its stages' boundaries.

Proved by: tests/planning/test_volumes.py
"""

from collections import Counter
from collections.abc import Callable

from minidist.core.nn import GPTConfig
from minidist.core.nn.experts import expert_capacity
from minidist.data import load_dataset
from minidist.job.config.models import ITEMSIZE
from minidist.job.config.pipeline_plan import blocks_of_stages, make_plan
from minidist.job.config.train_config import Batches, TrainConfig, has_ragged_shares
from minidist.parallel.context.orders import part_order, sequence_positions
from minidist.parallel.fitting_dims import splits_sums
from minidist.parallel.volume import (
    Volume,
    all_gather_attention_volume,
    capacities_volume,
    column_parallel_volume,
    column_row_volume,
    cross_entropy_volume,
    dispatch_volume,
    embedding_volume,
    expert_tensor_volume,
    head_volume,
    kv_replicas_volume,
    ring_attention_volume,
    row_parallel_volume,
    sequence_parallel_volume,
    ulysses_ring_volume,
    ulysses_volume,
)
from minidist.planning.pipeline_volumes import input_shapes
from minidist.techniques import of_job, recomputed, replayed

FORWARD, BACKWARD, REGATHER, DISPATCH = "tensor_forward", "tensor_backward", "regather", "dispatch"
Elements = Counter[str]
LossVolume = Callable[[int, int], Volume]  # of tokens and ranks


def layer_elements(config: TrainConfig, batches: Batches) -> Elements:
    """Return the elements, by purpose, that all ranks together send inside layers in `config.steps` steps."""
    dims = batches.dims
    if not splits_sums(dims):
        return Counter()
    plan = make_plan(config, batches.accumulation) if dims.pp > 1 else None
    stages = 1 if plan is None else plan.stages
    # The empty passes by which a pipeline's stages learn the shapes of their inputs, by the rows of those.
    empty = Counter[int]() if plan is None else Counter(rows for _, rows in input_shapes(plan, batches))
    loss: LossVolume = cross_entropy_volume
    for extension in of_job(config):
        loss = extension.loss_volume(loss)
    total: Elements = Counter()
    # What a micro-batch sends depends on its rows; count: micro-batches of that size per step, on all replicas.
    for rows, count in batches.shares.sizes.items():
        layers = Layers(config, batches, rows, loss)
        total.update(_of_rows(layers, config, stages, plan is not None, config.steps * count, empty[rows]))
    return total


def _of_rows(
    layers: "Layers", config: TrainConfig, stages: int, pipeline: bool, passes: int, empty_passes: int
) -> Elements:
    """Return what this number of forward and backward passes of micro-batches of the same rows send inside layers."""
    total: Elements = Counter()
    again, stages_again = recomputed(config), replayed(config)
    for stage, blocks in enumerate(blocks_of_stages(config, stages)):
        # Every forward pass and every backward pass of the stage.
        first, last = stage == 0, stage == stages - 1
        forward, backward = layers.forward(blocks, first, last), layers.backward(blocks, first, last)
        total.update(_times(forward, passes))
        total.update(_times(backward, passes))

        # What runs again: a pipeline's whole stages, all blocks (also in segments), or attention.
        if pipeline and stage in stages_again:
            total.update(_times(forward, passes))
        elif again in ("full", "sqrt"):
            total.update(_times(layers.forward(blocks, False, False), passes))
        elif again == "selective":
            total.update(_times(layers.attention(len(blocks)), passes))
        if not last:
            total["startup"] += sum(forward.values()) * empty_passes
    return total


def forward_elements(config: TrainConfig, batches: Batches) -> Elements:
    """Return the elements, by purpose, that all ranks send inside layers in one forward pass of all micro-batches."""
    stages = make_plan(config, batches.accumulation).stages if batches.dims.pp > 1 else 1
    total: Elements = Counter()
    if not splits_sums(batches.dims):
        return total
    for rows, count in batches.shares.sizes.items():
        layers = Layers(config, batches, rows)
        for stage, blocks in enumerate(blocks_of_stages(config, stages)):
            total.update(_times(layers.forward(blocks, stage == 0, stage == stages - 1), count))
    return total


def _times(elements: Elements, factor: int) -> Elements:
    return Counter({name: count * factor for name, count in elements.items()})


class Layers:
    """What one replica's ranks send for a micro-batch of this number of rows: the sum of what each technique states.

    loss: what the loss function sends; that of held-out data is cross-entropy.
    """

    def __init__(
        self, config: TrainConfig, batches: Batches, rows: int, loss: LossVolume = cross_entropy_volume
    ) -> None:
        self.config, self.batches, self.rows, self.loss = config, batches, rows, loss
        self.dims = batches.dims
        self.activation = self.rows * config.context * config.width  # of all context-parallel ranks together
        kv_heads = config.kv_heads or config.heads
        self.key_width = kv_heads * (config.width // config.heads)  # of the keys, and of the values
        self.kv_replicas = max(1, self.dims.tp // kv_heads)
        self.classes = getattr(load_dataset(config.data), "classes", 0)

    def forward(self, blocks: range, first: bool, last: bool) -> Elements:
        """Return the elements of some blocks' forward pass, with embedding (first) and with head and loss (last)."""
        return Counter(
            {
                FORWARD: self._tensor(blocks, first, last).forward + self._attention().forward * len(blocks),
                DISPATCH: (self._dispatch().forward + self._capacities()) * len(blocks),
            }
        )

    def backward(self, blocks: range, first: bool, last: bool) -> Elements:
        """Return the elements of some blocks' backward pass, arguments as for `forward`."""
        tensor = self._tensor(blocks, first, last)
        return Counter(
            {
                BACKWARD: tensor.backward + self._attention().backward * len(blocks),
                REGATHER: tensor.regather,
                DISPATCH: self._dispatch().backward * len(blocks),
            }
        )

    def attention(self, blocks: int) -> Elements:
        """Return the elements that attention alone sends in the forward pass of this number of blocks."""
        return Counter({FORWARD: self._attention().forward * blocks})

    def _tensor(self, blocks: range, first: bool, last: bool) -> Volume:
        """Return the volume of tensor, sequence and vocabulary parallelism."""
        config, tp = self.config, self.dims.tp
        if tp == 1:
            return Volume()
        if config.model == "mlp":
            return self._mlp(blocks)
        split = config.sequence_parallel
        total = self._block() * len(blocks)
        if first:
            total += embedding_volume(self.activation, tp, split)
        if last:
            total += head_volume(self.activation, tp, split)
            # The loss travels in float32, which counts as two elements where the others are of 16 bits.
            number = 2 if config.precision in ("fp16", "bf16") else 1
            total += self.loss(self.rows * config.context, tp) * number
        if split:
            # Each context-parallel rank sums its own gradients of these.
            total += sequence_parallel_volume(self._replicated(len(blocks), first, last), tp) * self.dims.cp
        return total

    def _block(self) -> Volume:
        """Return the volume of a transformer block.

        Attention is a pair of layers; the MLP is another pair, or a mixture of experts.
        """
        config, tp, split = self.config, self.dims.tp, self.config.sequence_parallel
        total = column_row_volume(self.activation, tp, split)
        if config.experts:
            total += expert_tensor_volume(self._slots(), self.activation, tp, split)
        else:
            total += column_row_volume(self.activation, tp, split)

        # Ranks that share a key-value head sum the gradients of its columns.
        key_and_value = 2 * self.key_width * config.width
        return total + kv_replicas_volume(key_and_value, self.kv_replicas) * self.dims.cp

    def _replicated(self, blocks: int, first: bool, last: bool) -> int:
        """Return the elements of the parameters that every rank holds and uses on its part of the sequence."""
        config = self.config
        # Llama: the weights of two norms per block, and of the last norm.
        if config.model == "llama":
            return config.width * (2 * blocks + last)
        # GPT: two norms of weight and bias per block, the biases behind its sums, the last norm and the position table.
        biases = 1 if config.experts else 2
        return config.width * ((4 + biases) * blocks + 2 * last + config.context * first)

    def _mlp(self, blocks: range) -> Volume:
        """Return the volume of an MLP's layers: columns, the last two a pair; the first input needs no gradient."""
        tp, last, hidden = self.dims.tp, self.config.layers, self.rows * self.config.width
        total = Volume()
        for i in blocks:
            if i < last:
                total += column_parallel_volume(hidden if i else 0, hidden, tp, gather_output=i < last - 1)
            else:
                total += row_parallel_volume(self.rows * self.classes, tp)
        return total

    def _attention(self) -> Volume:
        """Return the volume of one block's attention between the parts of the sequences."""
        cp, tokens = self.dims.cp, self.rows * self.config.context
        keys = tokens * self.key_width * self.kv_replicas
        if self.config.attention == "ring":
            return ring_attention_volume(keys, cp)
        if self.config.attention == "all-gather":
            return all_gather_attention_volume(keys, cp)
        if self.config.attention == "ulysses-ring":
            return (
                ulysses_ring_volume(tokens * self.config.width, keys, cp, self.config.ulysses) if cp > 1 else Volume()
            )
        return ulysses_volume(tokens * self.config.width, keys, cp)

    def _dispatch(self) -> Volume:
        """Return the volume of one block's all-to-alls, on all tensor-parallel ranks."""
        return dispatch_volume(self._slots() * self.dims.tp, self.dims.ep)

    def _capacities(self) -> int:
        """Return the elements of a replica's capacities, one number from each of its ranks, where they differ."""
        if not self.config.experts or not has_ragged_shares(self.config, self.batches):
            return 0
        return self.dims.tp * self.dims.cp * capacities_volume(self.dims.ep) // ITEMSIZE[self.config.precision]

    def _slots(self) -> int:
        """Return the elements in all experts' slots for one micro-batch, of all context-parallel ranks."""
        config, cp = self.config, self.dims.cp
        if not config.experts:
            return 0

        # A capacity is rounded up, and parts may differ by a token, so each rank's slots are counted by themselves.
        parts = [
            len(sequence_positions(config.context, rank, cp, part_order(config.attention, config.ulysses)))
            for rank in range(cp)
        ]
        top_k = config.optional("top_k") or GPTConfig.expert_top_k
        factor = config.optional("capacity_factor") or GPTConfig.capacity_factor
        capacities = [expert_capacity(self.rows * part, config.experts, top_k, factor) for part in parts]
        return config.experts * sum(capacities) * config.width
