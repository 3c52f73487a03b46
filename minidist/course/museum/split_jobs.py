"""The small jobs of the exhibits of split layers: a GPT in tiles, a sequence in parts, experts on several ranks.

Proved by: tests/museum/test_museum.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.core.autograd import Tensor
from minidist.core.base.arrays import Array
from minidist.core.comm import Comm, Mesh, init_device_mesh
from minidist.core.nn import GPT, GPTConfig
from minidist.core.nn.flat import FlatParameters
from minidist.core.parallel.context_parallel import RingAttention
from minidist.core.parallel.expert_parallel import ExpertParallel
from minidist.core.parallel.model_parallel import parallelize_module
from minidist.course.museum.jobs import BATCH, LENGTH, WORDS, EveryFlat, Tensors, loop, on_ranks, summed, tokens
from minidist.nn import Llama, LlamaConfig
from minidist.parallel.context.orders import sequence_positions
from minidist.parallel.context.ulysses import UlyssesAttention
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.expert import ExpertDataParallel
from minidist.parallel.fitting_dims import gradient_axes as axes_of_a_sequence
from minidist.parallel.tensor import clip_grad_norm_, full_tensor, llama_plan
from minidist.parallel.tensor.sequence_layers import gpt_plan


def gradient_axes(mesh: Mesh) -> Comm:
    """Return the ranks over which gradients are summed when a sequence is split: dp and cp, also when dp is 1."""
    return axes_of_a_sequence(mesh)


def in_tiles(model: Any, comm: Comm, as_they_are: Sequence[str] = (), **options: Any) -> tuple[list[float], Tensors]:
    """Train a model whose layers are cut over the ranks. as_they_are: parts of names of weights that are not joined."""
    flat = FlatParameters(model.parameters())
    layouts = {p.name: (p.layout, p.shape) for p in flat.parameters}

    def whole(parameter: Any, tile: Array) -> Array:
        layout, shape = layouts[parameter.name]
        if any(part in parameter.name for part in as_they_are):
            return tile
        return np.array(full_tensor(tile.reshape(shape), layout, {"tp": comm}))

    return loop(model, lambda step: model(*tokens(step), BATCH * LENGTH), flat, whole=whole, lr=0.3, **options)


@on_ranks(2)
def split(comm: Comm, sequence_parallel: bool = False, clip: float | None = None) -> tuple[list[float], Tensors]:
    """Train a GPT whose layers are cut over two ranks."""
    model: Any = GPT(GPTConfig(WORDS, LENGTH, 16, 2, 4), dtype=np.float64, seed=3)
    rng = np.random.default_rng(7)
    for parameter in model.parameters():  # biases that are not zero, as after some training
        if parameter.name.endswith("bias"):
            parameter.data[...] = 0.1 * rng.standard_normal(parameter.shape)
    model = parallelize_module(model, comm, gpt_plan(WORDS, sequence_parallel))
    before = (lambda: clip_grad_norm_(model, clip, comm)) if clip else (lambda: None)
    return in_tiles(model, comm, before_step=before)


@on_ranks(2)
def shared_heads(comm: Comm) -> tuple[list[float], Tensors]:
    """Train a Llama with one key-value head on two ranks."""
    sizes = LlamaConfig(WORDS, 16, 24, 2, 4, 1, max_position_embeddings=LENGTH)
    model = parallelize_module(Llama(sizes, dtype=np.float64, seed=3), comm, llama_plan(WORDS))
    return in_tiles(model, comm, as_they_are=(".k_proj.", ".v_proj."))


@on_ranks(2)
def long_context(comm: Comm, name: str = "gpt", kind: str = "ring") -> tuple[list[float], Tensors]:
    """Train on a sequence that is split over two ranks; one replica."""
    order, attention = {"ring": ("zigzag", RingAttention), "ulysses": ("contiguous", UlyssesAttention)}[kind]
    mesh = init_device_mesh(comm, (1, comm.size), ("dp", "cp"))
    fn: Any = attention(mesh["cp"], LENGTH)
    if name == "gpt":
        model: Any = GPT(GPTConfig(WORDS, LENGTH, 16, 2, 4), dtype=np.float64, seed=3, attention_fn=fn)
    else:
        sizes = LlamaConfig(WORDS, 16, 24, 2, 4, 4, max_position_embeddings=LENGTH)
        model = Llama(sizes, dtype=np.float64, seed=3, attention_fn=fn)
    parallel = DistributedDataParallel(model, gradient_axes(mesh), reduction="sum")
    # Each rank has its positions of the sequence; in zig-zag they are not contiguous.
    mine = sequence_positions(LENGTH, comm.rank, comm.size, order)

    def loss_of(step: int) -> Tensor:
        inputs, targets = tokens(step)
        return parallel(inputs[:, mine], targets[:, mine], BATCH * LENGTH, positions=mine)

    return loop(parallel, loss_of, parallel.flat, total=summed(comm), lr=0.3)


def four_experts(comm: Comm, divisor: float, **sizes: Any) -> tuple[Mesh, Any, Any, Any]:
    """Return the mesh of two ranks that share out four experts, the model, its loss, and what joins its tiles."""
    mesh = init_device_mesh(comm, (1, 2), ("dp", "ep"))
    config = GPTConfig(WORDS, LENGTH, 8, 2, 2, n_experts=4, **sizes)
    model = parallelize_module(
        GPT(config, dtype=np.float64, seed=3), mesh["ep"], {"transformer.h.*.mlp": ExpertParallel()}, axis="ep"
    )
    parallel = ExpertDataParallel(model, mesh)
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)

    def whole(parameter: Any, tile: Array) -> Array:
        return np.array(full_tensor(tile, parameter.layout, mesh))

    def loss_of(step: int) -> Any:
        inputs, targets = tokens(step)
        return parallel(inputs[mine], targets[mine], divisor)

    return mesh, parallel, loss_of, whole


@on_ranks(2)
def with_experts(comm: Comm, factor: float = 4.0) -> tuple[list[float], Tensors]:
    """Train four experts distributed over two ranks."""
    settings = {"capacity_factor": factor, "aux_loss_weight": 0.1}
    _, parallel, loss_of, whole = four_experts(comm, BATCH * LENGTH, **settings)
    return loop(parallel, loss_of, EveryFlat(parallel.flats), whole=whole, total=summed(comm), lr=0.3)


@on_ranks(2)
def large_scores(comm: Comm) -> tuple[list[float], Tensors]:
    """Compute attention over a split sequence, of queries and keys with entries of about 100."""
    qkv = np.random.default_rng(0).standard_normal((1, 8, 6)) * 100
    mine = sequence_positions(8, comm.rank, comm.size)
    with np.errstate(all="ignore"):
        return [], {"outputs": {"attention": RingAttention(comm, 8)(Tensor(qkv[:, mine]), 1).data.copy()}}
