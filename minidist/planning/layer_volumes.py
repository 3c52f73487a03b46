"""What the layers themselves send, in closed form: tiles, parts of sequences, dealt-out experts.

With A = b T w, the activation of a micro-batch of b sequences, all t tensor-parallel ranks together send

                 forward (tensor_forward)              backward (tensor_backward)       again for backward (regather)
    block        2 all-reduces: 4 (t-1) A              2 all-reduces: 4 (t-1) A         sequence parallel: 2 (t-1) A
    embedding    1 all-reduce                          -                                -
    head         -                                     1 all-reduce                     sequence parallel: (t-1) A
    loss         3 all-reduces of b T numbers          -                                -

Sequence parallel gathers and reduce-scatters instead, the same bytes, and adds up the gradients of norms, of biases
behind the sum and of the position table. Ring attention sends K and V round, (P-1) hops of 2 b T k, in forward and,
with their gradients, (2P-1) hops in backward; Ulysses (P-1)/P of q, k, v and the output each way. Experts: (e-1) E C w
each way, there and back.

What runs forward again sends again what forward sends: recomputed blocks, recomputed stages, and once, before the first
step, the empty pass by which a pipeline learns the shapes at its borders.
"""

from collections import Counter

from minidist.base.layout import chunk_sizes
from minidist.config.pipeline_plan import make_plan, stage_sizes
from minidist.config.train_config import Batches, TrainConfig
from minidist.data import load_dataset
from minidist.nn.experts import expert_capacity
from minidist.parallel.context import part_order, sequence_positions
from minidist.pipeline.plan import Plan
from minidist.planning.plans import crossings_of
from minidist.train.job import build

FORWARD, BACKWARD, REGATHER, DISPATCH = "tensor_forward", "tensor_backward", "regather", "dispatch"
Elements = Counter[str]


def layer_elements(config: TrainConfig, batches: Batches) -> Elements:
    """Elements, by purpose, that all ranks together send inside layers in `config.steps` steps."""
    dims = batches.dims
    if not dims.splits_sums:
        return Counter()
    plan = make_plan(config, batches.accumulation) if dims.pp > 1 else None
    stages = 1 if plan is None else plan.stages
    layers = Layers(config, batches)
    passes = config.steps * batches.accumulation  # of each replica
    total: Elements = Counter()
    for stage, blocks in enumerate(blocks_of_stages(config, batches, stages)):
        first, last = stage == 0, stage == stages - 1
        forward, backward = layers.forward(blocks, first, last), layers.backward(blocks, first, last)
        forwards = passes
        if plan is not None and _replays_stages(config):
            forwards += passes
        elif config.recompute in ("full", "sqrt"):  # segments of blocks, too, run all of them again
            total.update(_times(layers.forward(blocks, False, False), passes))
        elif config.recompute == "selective":
            total.update(_times(layers.attention(len(blocks)), passes))
        total.update(_times(forward, forwards))
        total.update(_times(backward, passes))
        if plan is not None and not last:
            total.update(_times(forward, _ways(plan)))  # the empty pass
    return _times(total, dims.dp)


def forward_elements(config: TrainConfig, batches: Batches) -> Elements:
    """The same of one forward pass of all micro-batches."""
    stages = make_plan(config, batches.accumulation).stages if batches.dims.pp > 1 else 1
    layers, total = Layers(config, batches), Counter[str]()
    for stage, blocks in enumerate(blocks_of_stages(config, batches, stages)):
        total.update(layers.forward(blocks, stage == 0, stage == stages - 1))
    return _times(total, batches.dims.dp * batches.accumulation) if batches.dims.splits_sums else Counter()


def _times(elements: Elements, factor: int) -> Elements:
    return Counter({name: count * factor for name, count in elements.items()})


def _ways(plan: Plan) -> int:
    """Distinct ways of micro-batches through the ranks."""
    return crossings_of(plan)[2]


def _replays_stages(config: TrainConfig) -> bool:
    return config.recompute == "full" and config.offload != "activations"


def blocks_of_stages(config: TrainConfig, batches: Batches, stages: int) -> list[range]:
    """The blocks (of an MLP: layers) of each stage."""
    ends, result = 0, []
    model = None if config.partition == "uniform" else build(config, batches).model
    sizes = model and stage_sizes(config.partition, model, stages)
    for size in sizes or chunk_sizes(config.layers + (config.model == "mlp"), stages):
        result.append(range(ends, ends + size))
        ends += size
    return result


class Layers:
    """Elements that one replica's ranks send for one micro-batch."""

    def __init__(self, config: TrainConfig, batches: Batches) -> None:
        self.config, self.dims, self.rows = config, batches.dims, batches.micro_batch
        self.activation = self.rows * config.context * config.width  # of all context-parallel ranks together
        self.others = self.dims.tp - 1
        self.split = config.sequence_parallel
        kv_heads = config.kv_heads or config.heads
        self.keys = kv_heads * (config.width // config.heads)  # width of the keys, and of the values
        self.copies = max(1, self.dims.tp // kv_heads)  # neighbours that have the same ones
        self.classes = getattr(load_dataset(config.data), "classes", 0)

    def forward(self, blocks: range, first: bool, last: bool) -> Elements:
        """Of some blocks, with the embedding (first) and with head and loss (last)."""
        if self.config.model == "mlp":
            return self._mlp_forward(blocks)
        reduced = 0 if not self.others else 2 * self.others * self.activation
        sums = (
            self._sums_of_a_block() * len(blocks)
            + (0.5 if self.split else 1) * first
            + (0.5 if self.split else 0) * last
        )
        number = 2 if self.config.precision in ("fp16", "bf16") else 1  # float32 among elements of two bytes
        losses = 3 * 2 * self.others * self.rows * self.config.context * last * number
        result = self.attention(len(blocks))
        result[FORWARD] += int(reduced * sums) + losses + self._tiles_of_experts() * len(blocks)
        result[DISPATCH] += self._dispatch() * len(blocks)
        return result

    def backward(self, blocks: range, first: bool, last: bool) -> Elements:
        """The same in backward."""
        if self.config.model == "mlp":
            inputs = sum(1 for i in blocks if 0 < i < self.config.layers)  # the first layer's input needs no gradient
            return Counter({BACKWARD: 2 * self.others * self.rows * self.config.width * inputs})
        reduced = 2 * self.others * self.activation
        sums = (
            self._sums_of_a_block() * len(blocks)
            + (0.5 if self.split else 0) * first
            + (0.5 if self.split else 1) * last
        )
        result = self.attention(len(blocks), backward=True)
        result[BACKWARD] += int(reduced * sums) + self._tiles_of_experts() * len(blocks)
        result[DISPATCH] += self._dispatch() * len(blocks)
        # Neighbours with the same key-value heads add up the gradients of their weights.
        result[BACKWARD] += 2 * (self.copies - 1) * 2 * self.keys * self.config.width * self.dims.cp * len(blocks)
        if self.split:
            result[REGATHER] += self.others * self.activation * (self._sums_of_a_block() * len(blocks) + last)
            gpt = self.config.model == "gpt"
            vectors = (
                (4 + self._sums_of_a_block() if gpt else 2) * len(blocks)
                + (2 if gpt else 1) * last
                + self.config.context * (gpt and first)
            )
            result[BACKWARD] += 2 * self.others * self.config.width * vectors * self.dims.cp
        return result

    def _sums_of_a_block(self) -> int:
        """Behind attention and, unless experts are there, behind the MLP."""
        return 1 if self.config.experts else 2

    def attention(self, blocks: int, backward: bool = False) -> Elements:
        """Across the parts of the sequences."""
        config, cp = self.config, self.dims.cp
        if cp == 1:
            return Counter()
        tokens = self.rows * config.context
        keys = tokens * self.keys * self.copies
        if config.attention == "ring":
            sent = 2 * keys * (2 * cp - 1 if backward else cp - 1)
        else:
            sent = (2 * tokens * config.width + 2 * keys) // cp * (cp - 1)
        return Counter({BACKWARD if backward else FORWARD: sent * blocks})

    def _dispatch(self) -> int:
        """The two all-to-alls of a block; a replica has 1 / ep of them."""
        ep = self.dims.ep
        return 2 * self._slots() * (ep - 1) * self.dims.tp // ep

    def _tiles_of_experts(self) -> int:
        """The sum of the slots over the tiles, and with the sequence split the tokens, gathered before the router."""
        if not self.config.experts:
            return 0
        return self.others * (2 * self._slots() + (self.activation if self.split else 0))

    def _slots(self) -> int:
        """Elements in all experts' slots for one micro-batch, of all groups: each context-parallel rank has one."""
        config, cp = self.config, self.dims.cp
        if not config.experts:
            return 0
        parts = [len(sequence_positions(config.context, rank, cp, part_order(config.attention))) for rank in range(cp)]
        capacities = [
            expert_capacity(self.rows * part, config.experts, config.top_k, config.capacity_factor) for part in parts
        ]
        return config.experts * sum(capacities) * config.width

    def _mlp_forward(self, blocks: range) -> Elements:
        last = self.config.layers
        gathered = sum(1 for i in blocks if i < last - 1)
        sent = self.rows * (gathered * self.config.width + 2 * self.classes * (last in blocks))
        return Counter({FORWARD: self.others * sent})
