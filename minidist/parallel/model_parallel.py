"""Model parallelism over one mesh axis, applied to a whole model of this package: one function per axis.

    apply_expert_parallel     ep   each rank keeps some of the experts
    apply_tensor_parallel     tp   each rank keeps its shards of every matrix, also of its experts'
    apply_context_parallel    cp   each rank has a part of every sequence; attention communicates between the parts

Call them in this order, before parameters become flat arrays. Every rank builds the whole model from the same seed, so
none of them sends anything; a rank with other weights is refused, at once or with the next message of a collective.

Proved by: tests/train/test_axes.py, tests/parallel/test_split_examples.py
"""

from minidist.base import arrays as xp
from minidist.comm import Comm, check_communicator
from minidist.nn import GPT, MLP, Llama, Module
from minidist.parallel.context import (
    AllGatherAttention,
    RingAttention,
    UlyssesAttention,
    UlyssesRingAttention,
    part_order,
    sequence_positions,
)
from minidist.parallel.expert import ExpertParallel, expert_gpt_plan, expert_llama_plan
from minidist.parallel.tensor import gpt_plan, llama_plan, mlp_plan, parallelize_module
from minidist.parallel.tensor.parallelize import Plan, weights_checksum


def apply_expert_parallel(model: Module, comm: Comm, ragged: bool = False) -> Module:
    """Shard a model's experts over `comm`: an all-to-all brings each token to the rank of its expert, and back.

    ragged: see `ExpertParallel`.
    """
    place = "model.layers.*.mlp" if isinstance(model, Llama) else "transformer.h.*.mlp"
    return parallelize_module(model, comm, {place: ExpertParallel(ragged)}, axis="ep")


def apply_tensor_parallel(model: Module, comm: Comm, sequence_parallel: bool = False) -> Module:
    """Split the matrices over `comm`; with sequence_parallel norms and dropout work on 1/t of the sequence."""
    return parallelize_module(model, comm, tensor_parallel_plan(model, sequence_parallel))


def tensor_parallel_plan(model: Module, sequence_parallel: bool = False) -> Plan:
    """Return Megatron's plan for a language model; for an MLP columns, and rows in the last layer."""
    if isinstance(model, MLP):
        return mlp_plan(len(model.layers) - 1)
    if isinstance(model, Llama):
        plan = expert_llama_plan if model.config.num_local_experts else llama_plan
        return plan(model.config.vocab_size, sequence_parallel)
    assert isinstance(model, GPT)
    plan = expert_gpt_plan if model.config.n_experts else gpt_plan
    return plan(model.config.vocab_size, sequence_parallel)


def apply_context_parallel(
    model: Module, comm: Comm, length: int, attention: str = "ring", ulysses: int = 2
) -> xp.Array:
    """Split sequences of `length` tokens over `comm`; returns the positions (T_local,) of this rank's tokens.

    attention: "ring", "ulysses", "all-gather", or "ulysses-ring" with Ulysses among `ulysses` neighbours. Every
    attention module gets that as its `attention_fn`; a model that masks documents goes on to do so, except on a ring.
    """
    check_communicator(comm, "apply_context_parallel")
    comm.check_alike("apply_context_parallel", "weights", weights_checksum(model, comm))

    # One object for all layers: it holds no state of a layer, and its messages are matched in the order of calls.
    owners = [module for module in model.modules() if hasattr(module, "attention_fn")]
    crossing: Module
    if attention == "ulysses" and any(isinstance(owner.attention_fn, AllGatherAttention) for owner in owners):
        whole = AllGatherAttention(None, length)
        crossing = UlyssesAttention(comm, length, whole, whole)
    elif attention == "ulysses-ring":
        crossing = UlyssesRingAttention(comm, length, ulysses)
    else:
        kinds = {"ring": RingAttention, "ulysses": UlyssesAttention, "all-gather": AllGatherAttention}
        crossing = kinds[attention](comm, length)
    for module in owners:
        module.attention_fn = crossing

    # Position embeddings and rotary angles look up these numbers; 0..T_local-1 on every rank would be silently wrong.
    positions = sequence_positions(length, comm.rank, comm.size, part_order(attention, ulysses))
    use_positions(model, positions)
    return positions


def mask_documents(model: Module, length: int) -> None:
    """Let attention over whole sequences of `length` tokens stay inside documents; see `context.documents`."""
    whole = AllGatherAttention(None, length)
    for module in model.modules():
        if hasattr(module, "attention_fn"):
            module.attention_fn = whole


def use_positions(model: Module, positions: xp.Array) -> None:
    """Look up position embeddings and rotary angles at `positions`, the tokens' places in the whole text.

    A hook, so that it also holds in a pipeline stage, whose input does not say where its tokens are.
    """
    table: Module = model.transformer.wpe if isinstance(model, GPT) else model.model.rotary_emb  # type: ignore[attr-defined]
    table.register_forward_pre_hook(lambda _, arguments: positions)
