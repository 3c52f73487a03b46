"""The seconds of a training step, split into computing, messages that are not hidden, and the pipeline's bubble.

A block's forward pass is its matrix products at a share of the peak, with a loss per product that makes small ones
slow; attention's core; the other operations at the memory's bandwidth; and the all-reduces of tensor parallelism. The
host launches its kernels in `launch_seconds`, so that no block is faster. A backward pass is twice the products, and
recomputation one more forward pass.

A layer with experts also moves its tokens' copies: it sorts them by rank and by expert and back, which are four
permutations in each direction, and exchanges them. In an all-to-all each rank sends for itself, so what leaves a node
leaves through one adapter per GPU; a token goes to a node once, however many of the node's experts it has chosen
(DeepSeek-V3, arXiv:2412.19437, section 3.2.2), and is copied inside. The ranks are equally busy, unless the job has an
imbalance of experts: then the busiest rank, for which all others wait, has that multiple of the mean of the tokens.

A pipeline with v chunks per rank takes m times the slowest rank, and 1 / v of all other ranks to fill and drain: of p
equal ones that is m + (p - 1) / v times one (Narayanan et al., SC 2021, section 2.2). A message between stages also
costs `handoff_seconds`, for which both ranks wait. Collectives cost what a ring costs: (n - 1) / n of the bytes, and a
latency per step of the ring.

Proved by: tests/planning/test_cluster.py, tests/planning/test_published.py
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from minidist.planning.cluster.calibration import CALIBRATION, Calibration
from minidist.planning.cluster.gpus import Machine
from minidist.planning.cluster.host import waiting_seconds
from minidist.planning.cluster.layout import ClusterLayout, Job, busiest, stage_layers
from minidist.planning.cluster.memory import block_activations, rank_parameters
from minidist.planning.cluster.shared import shared

# The speed of a flash-attention kernel as a multiple of the one that the measurements of a family used: version 2 is
# about twice as fast as version 1 (Dao, arXiv:2307.08691, figures 4 to 6).
FLASH = {"a100": {"flash-1": 1.0, "flash-2": 2.0}, "h100": {"flash-1": 0.5}, "b200": {"flash-1": 0.5}}


class Pass(NamedTuple):
    """Seconds of the forward and of the backward pass of one micro-batch, and of the messages in both."""

    forward: float
    backward: float
    messages: dict[str, float]

    @property
    def seconds(self) -> float:
        """Return the seconds of both passes with their messages."""
        return self.forward + self.backward + sum(self.messages.values())


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. exposed: messages that computing does not hide, by axis, and waiting for the host; bubble: the
    share of idle time.
    """

    compute: float
    exposed: dict[str, float]
    bubble: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the step."""
        return (self.compute + sum(self.exposed.values())) / (1 - self.bubble)


Rings = dict[str, tuple[int, tuple[float, int, int, int]]]  # axis -> how many, and bytes, ranks, stride and passes


@dataclass(frozen=True)
class StepModel:
    """The step of one layout on one machine."""

    layout: ClusterLayout
    job: Job
    machine: Machine
    calibration: Calibration = CALIBRATION

    # collectives ------------------------------------------------------------------------------------------------------

    def ring_seconds(self, nbytes: float, ranks: int, stride: int, passes: int = 1, adapters: bool = True) -> float:
        """Return the seconds of a ring over `ranks` GPUs that are `stride` ranks apart; an all-reduce has two passes.

        A ring that leaves the node has as many network adapters as the group has GPUs in a node.
        """
        if ranks == 1:
            return 0.0
        c, machine = self.calibration, self.machine
        near = max(1, min(ranks, machine.gpus_per_node // stride))
        link, network = machine.link * c.link_efficiency, machine.network * c.network_efficiency
        inside = near == ranks
        bandwidth = link if inside else min(link, network * (near if adapters else 1))
        steps = ranks - 1 if inside else near - 1 + ranks // near - 1
        return passes * ((ranks - 1) / ranks * nbytes / bandwidth + steps * c.message_seconds)

    def exchange_seconds(self, nbytes: float) -> float:
        """Return the seconds of an all-to-all in which each token has `nbytes` / top_k bytes for each expert it chose.

        The expert's rank is any of the ep ranks, or with groups of experts any of those of the token's groups
        (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Links inside the node and the adapter work at the same time.
        """
        e, c, machine, copies = self.layout, self.calibration, self.machine, self.job.model.top_k
        groups, chosen = self.job.model.expert_groups
        near = max(1, min(e.ep, machine.gpus_per_node // e.expert_tp))
        nodes = -(-e.ep // near)
        # The nodes that a token's experts may lie on, and how many nodes it reaches besides its own.
        possible = min(nodes, chosen * max(1, nodes // groups))
        reached = (nodes - 1) / nodes * possible * (1 - (1 - 1 / possible) ** copies)
        inside = (near - 1) / near * nbytes / (machine.link * c.link_efficiency)
        across = reached / copies * nbytes / (machine.network * c.network_efficiency)
        return max(inside, across) + c.message_seconds

    # a block ----------------------------------------------------------------------------------------------------------

    def products_seconds(self, flops: float) -> float:
        """Return the seconds of matrix products of `flops` operations."""
        return flops / (self.machine.peak(self.job.precision) * self.product_efficiency)

    @property
    def product_efficiency(self) -> float:
        """Return the share of the peak that matrix products reach."""
        c = self.calibration
        shares = c.fp8_efficiency if self.job.precision == "fp8" else c.product_efficiency
        return shares[self.machine.family]

    def moved_seconds(self, nbytes: float) -> float:
        """Return the seconds in which operations that compute little read and write this number of bytes."""
        return nbytes / (self.machine.memory_bandwidth * self.calibration.memory_efficiency)

    @shared(
        lambda self, layer: (self.job, self.machine, self.calibration),
        lambda self, layer: (
            *(self.layout.tp, self.layout.cp, self.layout.ep, self.layout.expert_tp, self.layout.sequence_parallel),
            *(self.layout.micro_batch, self.layout.recompute, self.job.model.kind(layer)),
        ),
    )
    def layer_pass(self, layer: int) -> Pass:
        """Return one layer's seconds for one micro-batch on one rank of a stage."""
        c, e, job, model = self.calibration, self.layout, self.job, self.job.model
        tokens = self._tokens
        sparse = model.is_sparse(layer)
        experts = model.expert_flops * tokens / e.tp if sparse else 0.0
        products = model.layer_flops(layer, 0) * tokens / e.tp - experts
        linear = self.products_seconds(products + experts * busiest(e, job) / c.expert_efficiency)
        core = self._core_seconds(layer, tokens)
        others = self.moved_seconds(self._moved_bytes(layer, tokens))

        forward, backward = linear + core + others, 2 * linear + 2.5 * core + 2 * others
        if sparse:
            # Each micro-batch reads and writes the sums of the gradients of all experts that the rank has.
            own = model.block_at(layer).expert / (e.expert_tp * e.ep)
            backward += self.moved_seconds(2 * job.gradient_bytes * own)
        again = 0.0
        if e.runs_forward_twice:
            again = forward
        elif e.recompute == "selective":
            again = others if job.fused_attention else core
        # Kernels are launched one after the other, and those of the forward pass again when it is repeated.
        launch = c.sparse_launch_seconds if sparse else c.launch_seconds
        repeats = 3 if e.runs_forward_twice else 2
        return Pass(max(forward, launch), max(backward + again, repeats * launch), self._layer_messages(layer))

    @property
    def eager(self) -> float:
        """Return the likely share of what the eager kernels of a gated block move in addition to fused ones."""
        return self.job.eager_shares[1] if self.job.model.gated else 0.0

    def _core_seconds(self, layer: int, tokens: float) -> float:
        """Return the seconds of attention's scores, softmax and outputs, forward."""
        job, machine, tp = self.job, self.machine, self.layout.tp
        peak = machine.peak("bf16" if job.precision != "fp16" else "fp16")
        peak *= self.calibration.attention_efficiency[machine.family]
        scores = 2 * job.model.layer_scores(layer, job.length) * tokens / tp
        if job.fused_attention:
            # Scores cost half where a fused kernel leaves out what the causal mask hides.
            return 0.5 * scores / (peak * FLASH[machine.family].get(job.attention_kernel, 1.0))
        # A fused softmax reads and writes 10 bytes for each pair of positions. One of PyTorch's operations also writes
        # the scores scaled, masked, in float32, and back.
        moved = (10 + 22 * self.eager) * tokens * job.length * job.model.heads / tp
        return scores / peak + self.moved_seconds(moved)

    def _moved_bytes(self, layer: int, tokens: float) -> float:
        """Return the bytes that a layer's other operations read and write, forward: norms, residuals, activations."""
        c, e, job, model = self.calibration, self.layout, self.job, self.job.model
        outer = e.tp if e.sequence_parallel else 1
        inner: float = model.inner
        if model.is_sparse(layer):
            inner = (busiest(e, job) * model.top_k + model.shared_experts) * (model.expert_inner or model.inner)
        # Norms, masks and residuals are about half of what moves the width; the heads' operations are divided.
        moved = c.block_passes * (model.width / outer + (model.width + inner / 2) / e.tp)
        # Each of two RMS norms of PyTorch's operations reads or writes 36 bytes per element where a fused one has 4;
        # rotations of queries and keys have 20 bytes, and SwiGLU 10 instead of 6.
        heads = model.query_size + model.kv_size
        moved += self.eager * (2 * 32 * model.width / outer + (20 * heads + 4 * inner) / e.tp)
        if job.precision == "fp8":
            # Each input of a product is read in 2 bytes, and written in 1 byte, twice: as it is, and transposed.
            moved += 4 * (2 * model.width / outer + (model.value_size + inner) / e.tp)
        if model.is_sparse(layer):
            moved += 2 * c.permutation_passes * busiest(e, job) * model.top_k * model.width / outer
        return tokens * moved

    def rings(self) -> Rings:
        """Return by axis how many rings a layer has for a micro-batch, and the arguments of `ring_seconds` for one."""
        e, model, tokens = self.layout, self.job.model, self._tokens
        again, result = e.runs_forward_twice, Rings()
        if e.tp > 1:
            # Two all-reduces in each direction, and two more when the forward pass is repeated.
            result["tp"] = 4 + 2 * again, (2 * tokens * model.width, e.tp, 1, 2)
        if e.cp > 1:
            # Keys and values travel around the ring, and with their gradients back.
            result["cp"] = 3 + again, (4 * tokens * model.kv_size / e.tp * e.cp, e.cp, e.tp, 1)
        return result

    def exchanges(self) -> tuple[int, float]:
        """Return how many exchanges a layer with experts has for a micro-batch, and the bytes of one.

        Tokens go to their experts and back, in both directions.
        """
        e, model = self.layout, self.job.model
        nbytes = busiest(e, self.job) * (2 * self._tokens * model.width) * model.top_k
        return 4 + 2 * e.runs_forward_twice, nbytes / (e.tp if e.sequence_parallel else 1)

    @property
    def _tokens(self) -> float:
        """Return the tokens of a micro-batch on a context-parallel rank."""
        return self.layout.micro_batch * self.job.length / self.layout.cp

    def _layer_messages(self, layer: int) -> dict[str, float]:
        """Return the seconds of a layer's messages, forward and backward, by axis."""
        result = {axis: count * self.ring_seconds(*ring) for axis, (count, ring) in self.rings().items()}
        if self.layout.ep > 1 and self.job.model.is_sparse(layer):
            count, nbytes = self.exchanges()
            result["ep"] = count * self.exchange_seconds(nbytes)
        return result

    # a step -----------------------------------------------------------------------------------------------------------

    def stage_pass(self, rank: int, layers: list[int]) -> Pass:
        """Return the seconds of all layers of a pipeline rank for one micro-batch, with embedding and projection."""
        e, model = self.layout, self.job.model
        forward = backward = 0.0
        messages: dict[str, float] = {}
        for layer, count in model.of_a_kind(layers):
            one = self.layer_pass(layer)
            forward, backward = forward + count * one.forward, backward + count * one.backward
            for axis, seconds in one.messages.items():
                messages[axis] = messages.get(axis, 0.0) + count * seconds
        tokens = self._tokens
        if rank == e.pp - 1:
            head = self.products_seconds(2 * tokens * model.width * model.vocabulary / e.tp)
            loss = self.moved_seconds(16 * tokens * model.vocabulary / e.tp)
            forward, backward = forward + head + loss, backward + 2 * head + loss
        if e.pp > 1:
            # An activation and a gradient per chunk; tensor-parallel ranks each send their share.
            nbytes = 2 * tokens * model.width / e.tp
            near = e.ranks <= self.machine.gpus_per_node
            bandwidth = self.machine.link if near else self.machine.network
            share = self.calibration.link_efficiency if near else self.calibration.network_efficiency
            messages["pp"] = 2 * e.vp * (nbytes / (bandwidth * share) + self.calibration.handoff_seconds)
        return Pass(forward, backward, messages)

    @shared(lambda self: (self.job,), lambda self: (self.layout.pp, self.layout.vp))
    def _kinds_of_ranks(self) -> dict[int, int]:
        """Return one pipeline rank of each kind, and how many ranks are of this kind.

        Ranks are of one kind when they have equally many layers of each kind; the last rank has the projection, too.
        """
        stages = stage_layers(self.layout, self.job.model.layers)
        kind_of = self.job.model.kind
        kinds = [(rank == self.layout.pp - 1, *sorted(map(kind_of, layers))) for rank, layers in enumerate(stages)]
        return {kinds.index(kind): count for kind, count in Counter(kinds).items()}

    def gradients_seconds(self, layers: list[int], rank: int, compute: float) -> float:
        """Return the seconds of the gradients' and ZeRO's collectives that computing does not hide."""
        e, c = self.layout, self.calibration
        own = rank_parameters(e, self.job, rank, layers)
        seconds = shards = 0.0
        for count, copies, stride in (
            (own.split + own.replicated, e.sharding_ranks, e.tp),
            (own.expert, e.sharding_ranks * e.tp // e.expert_tp // e.ep, e.expert_tp * e.ep),
        ):
            if count == 0 or copies == 1:
                continue
            if e.zero == 3:
                # Gathered for the forward and for the backward pass, and reduced, for every micro-batch.
                shards += e.microbatches * (
                    3 * self.ring_seconds(2 * count, copies, stride, adapters=self.job.framework != "deepspeed")
                )
            else:
                reduced = e.microbatches if e.zero == 2 else 1
                seconds += reduced * self.ring_seconds(2 * count, copies, stride) + self.ring_seconds(
                    2 * count, copies, stride
                )
        return c.gradients_exposed * seconds + max(c.shards_exposed * shards, shards - c.shards_hidden * compute)

    def step(self) -> StepTime:
        """Return the seconds of a step of the slowest pipeline rank."""
        e, c = self.layout, self.calibration
        stages = stage_layers(e, self.job.model.layers)
        ranks = self._kinds_of_ranks()
        passes = {rank: self.stage_pass(rank, stages[rank]) for rank in ranks}
        slowest = max(passes, key=lambda rank: passes[rank].seconds)
        one = passes[slowest]
        compute = e.microbatches * (one.forward + one.backward)
        exposed = {axis: e.microbatches * seconds for axis, seconds in one.messages.items()}

        # The pipeline fills and drains: one chunk's passes of a micro-batch go through each of the other ranks.
        others = sum(count * passes[rank].seconds for rank, count in ranks.items()) - one.seconds
        bubble = others / e.vp / (e.microbatches * one.seconds + others / e.vp)

        # Once per step: gradients, the optimizer, and a constant.
        own = rank_parameters(e, self.job, slowest, stages[slowest])
        data = self.gradients_seconds(stages[slowest], slowest, compute)
        if data:
            exposed["dp"] = data
        shard = own.total / (e.sharding_ranks if e.zero else 1)
        update = c.update_passes * 28 * shard / (self.machine.memory_bandwidth * c.memory_efficiency)
        waiting = 0.0
        if e.host != "none":
            update = update if e.host == "activations" else 0.0
            blocks = self.job.model.of_a_kind(stages[slowest])
            kept = sum(count * block_activations(e, self.job, layer) for layer, count in blocks)
            waiting = waiting_seconds(e, self.job, shard, kept, compute)
            exposed["host"] = waiting
        once = data + waiting + update + c.step_seconds
        # Those are outside of the pipeline, so its share of the whole is smaller.
        pipelined = (compute + sum(exposed.values()) - data - waiting) / (1 - bubble)
        return StepTime(compute + update + c.step_seconds, exposed, bubble * pipelined / (pipelined + once))
