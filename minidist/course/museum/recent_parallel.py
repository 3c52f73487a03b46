"""Bugs of split layers, experts and sequences, from public threads of 2024 to 2026: a sum over ranks that is missing,
or one too many.

Proved by: tests/museum/test_recent.py
"""

from typing import Any

import numpy as np

from minidist.core.autograd import Function, Tensor, reshape, softmax
from minidist.core.base.arrays import Array
from minidist.core.comm import Comm, init_device_mesh
from minidist.core.nn import GPT, GPTConfig, experts
from minidist.core.nn.experts import MixtureOfExperts
from minidist.core.parallel.context.ring_attention import RingAttention
from minidist.core.parallel.expert.dispatch import ExpertParallel
from minidist.core.parallel.tensor import vocabulary
from minidist.core.parallel.tensor.parallelize import parallelize_module
from minidist.core.parallel.tensor.regions import own_part
from minidist.course.museum import jobs, split_jobs
from minidist.course.museum.exhibit import Catch, Exhibit, Patch, Recording
from minidist.job.train import recipe, run
from minidist.job.train.job import build
from minidist.job.train.strategies.data_axis import DataAxis
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.parallel.expert import ExpertDataParallel
from minidist.parallel.expert import tensor_parallel as expert_tensor_parallel
from minidist.parallel.tensor import full_tensor

CHECKS, CONTEXT = "tests/museum/test_recent.py", "tests/parallel/test_context.py"
EXPERTS: dict[str, Any] = {"experts": 2, "tp": 2}
OWN_EXPERTS: dict[str, Any] = {"experts": 2, "dp": 2, "ep": 2}
IDLE_EXPERTS: dict[str, Any] = {"experts": 8, "dp": 2, "ep": 2, "micro_batch": 1, "weight_decay": 0.1}


def summands(group: Comm, all_ranks: Comm) -> int:
    """Return of how many means over a rank's rows an expert's gradient is the sum: one of every rank.

    group: the ranks that hold the expert. Its tokens come from all of them.
    """
    return all_ranks.size


def means_of_experts() -> Recording:
    """Train four experts on two ranks; every rank's loss is a mean over its rows, and gradients are averaged."""

    def main(comm: Comm) -> Any:
        mesh = init_device_mesh(comm, (1, 2), ("dp", "ep"))
        sizes = GPTConfig(jobs.WORDS, jobs.LENGTH, 8, 2, 2, n_experts=4, capacity_factor=4.0)
        model = parallelize_module(
            GPT(sizes, dtype=np.float64, seed=3), mesh["ep"], {"transformer.h.*.mlp": ExpertParallel()}, axis="ep"
        )
        parallel = ExpertDataParallel(model, mesh)
        shared, own = parallel.flats
        mine = slice(2 * comm.rank, 2 * comm.rank + 2)

        def whole(parameter: Any, tile: Array) -> Array:
            return np.array(full_tensor(tile, parameter.layout, mesh))

        def loss_of(step: int) -> Tensor:
            inputs, targets = jobs.tokens(step)
            return parallel(inputs[mine], targets[mine], 2 * jobs.LENGTH)  # type: ignore[no-any-return]

        def average() -> None:
            for flat, count in ((shared, comm.size), (own, summands(mesh["dp"], comm))):
                for parameter in flat.parameters:
                    gradient: Any = parameter.grad
                    gradient /= count

        total = jobs.summed(comm)
        mean = lambda value: total(value) / comm.size  # noqa: E731
        both = jobs.EveryFlat(parallel.flats)
        return jobs.loop(parallel, loss_of, both, whole=whole, total=mean, before_step=average, lr=0.3, steps=4)

    return jobs.recorded(2, main)


class OwnRows(Function):
    """This rank's rows of x (batch, T, width); backward has zeros where the other ranks' rows are."""

    @staticmethod
    def forward(ctx: Any, x: Array, comm: Comm) -> Array:
        ctx.comm, ctx.shape = comm, x.shape
        return own_part(comm, x, 1)

    @staticmethod
    def backward(ctx: Any, grad: Array) -> Array:
        whole, rows = np.zeros(ctx.shape, grad.dtype), grad.shape[1]
        whole[:, ctx.comm.rank * rows : (ctx.comm.rank + 1) * rows] = grad
        return whole


def partial_after_the_head(patch: Patch) -> None:
    """the gradient that the split head returns is a summand, and is used as if it were the sum"""
    patch.setattr(vocabulary, "copy_to_tensor_parallel_region", lambda x, comm: x)


def partial_before_experts(patch: Patch) -> None:
    """the gradient of what goes into split experts is each rank's summand; the sum over them is left out"""
    patch.setattr(expert_tensor_parallel, "copy_to_tensor_parallel_region", lambda x, comm: x)


def router_of_own_tokens(patch: Patch) -> None:
    """each rank's router gets the gradient of its tokens alone, and no sum over ranks follows"""
    patch.setattr(expert_tensor_parallel, "scatter_to_sequence_parallel_region", OwnRows.apply)


def divided_by_the_group(patch: Patch) -> None:
    """an expert's gradient is divided by the number of ranks that hold it"""
    patch.setitem(globals(), "summands", lambda group, all_ranks: group.size)


def norm_without_other_experts(patch: Patch) -> None:
    """the norm has the experts of this rank, and not those of the others"""
    right = MeshStrategy.square_sums_of

    def own(self: Any, axis: Any, skip: Any = ()) -> Array:
        return np.asarray(axis.square_sums(set(skip)) if axis.experts else right(self, axis, skip))

    patch.setattr(MeshStrategy, "square_sums_of", own)


def router_detached(patch: Patch) -> None:
    """the gates are copied in a way that the tape does not record"""

    def detached(x: Tensor, shape: Any) -> Tensor:
        # The gates of a choice are (tokens,), and become a column.
        return reshape(x.detach() if x.ndim == 1 else x, shape)

    patch.setattr(experts, "reshape", detached)


def idle_experts_left_out(patch: Patch) -> None:
    """an expert that no token was sent to has no gradient, and the optimizer leaves it out"""
    right = DataAxis.step

    def step(self: Any) -> None:
        before = []
        for parameter in self.parameters if self.experts else ():
            idle = ~parameter.grad.reshape(len(parameter.grad), -1).any(axis=1)
            state = self.optimizer.state.get(parameter.name, {}).values()
            arrays = [parameter.data, *(array.reshape(parameter.shape) for array in state)]
            before += [(array, idle, array[idle].copy()) for array in arrays]
        right(self)
        for array, idle, values in before:
            array[idle] = values

    patch.setattr(DataAxis, "step", step)


def scores_of_own_experts(patch: Patch) -> None:
    """a rank's router gets the gradient of the scores of the experts on this rank, and of no others"""
    forward = MixtureOfExperts.forward
    own: list[Any] = [None]

    def note(self: Any, x: Tensor) -> Tensor:
        comm, count = getattr(self.dispatch, "comm", None), self.num_experts
        own[0] = None if comm is None else np.arange(count) * comm.size // count == comm.rank
        return forward(self, x)

    def partial(x: Tensor) -> Tensor:
        scores = softmax(x)
        if own[0] is None:
            return scores
        mine = own[0].astype(scores.dtype)
        return scores * Tensor(mine) + scores.detach() * Tensor(1 - mine)

    patch.setattr(MixtureOfExperts, "forward", note)
    patch.setattr(experts, "softmax", partial)


def gradient_of_unserved_slots(patch: Patch) -> None:
    """a token without a slot gets a row that is not zero, and a weight that is, with a gradient all the same"""
    right, slots = experts._FromSlots, [np.zeros(0)]

    class Served:
        @staticmethod
        def apply(rows: Tensor, slot: Array) -> Tensor:
            slots[0] = slot
            return right.apply(rows, slot) + Tensor((slot < 0)[:, None] * rows.data[0])

    def weights(x: Tensor, shape: Any) -> Tensor:
        # The gates of a choice are (tokens,), and become a column.
        if x.ndim == 1:
            served = (slots[0] >= 0).astype(x.dtype)
            x = x * Tensor(served) + (x - x.detach()) * Tensor(1 - served)
        return reshape(x, shape)

    patch.setattr(experts, "_FromSlots", Served)
    patch.setattr(experts, "reshape", weights)


def own_initial_values(patch: Patch) -> None:
    """the position embedding, which every rank holds whole, has initial values that each rank draws for itself"""

    def build_differently(config: Any, batches: Any, comm: Comm) -> Any:
        made = build(config, batches, comm)
        weight = made.model.transformer.wpe.weight
        weight.data[...] = 0.02 * np.random.default_rng(comm.rank).standard_normal(weight.shape)
        return made

    patch.setattr(run, "build", build_differently)


def noise_by_rank(patch: Patch) -> None:
    """dropout is seeded with the rank, also on ranks that split a layer"""

    def parallelize(made: Any, comm: Comm, *rest: Any) -> Any:
        strategy = recipe.parallelize(made, comm, *rest)
        made.seed = comm.rank
        return strategy

    patch.setattr(run, "parallelize", parallelize)


def first_keys_in_backward(patch: Patch) -> None:
    """in backward every step of the ring computes with the keys and values of the first one"""
    right = RingAttention._round

    def keep_first(self: Any, block: Array, why: str) -> Any:
        for owner, here in right(self, block, why):
            yield owner, block if why == "tensor_backward" else here

    patch.setattr(RingAttention, "_round", keep_first)


EXHIBITS = [
    Exhibit(
        "116",
        "a summand of a gradient is labelled as the sum",
        "The loss was computed in chunks, from a head that is split over tensor-parallel ranks, and the gradients of"
        " the chunks were collected in a buffer. On each rank they are summands, and the buffer had the label of the"
        " activation, which is the same on every rank. No sum followed, and the loss stayed well above that of one"
        " device. It was found by comparing context with tensor parallelism, and then both with one device.",
        partial_after_the_head,
        jobs.train_job(2, steps=3, tp=2, precision="fp64"),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, {"tp": 2})),),
        "https://github.com/pytorch/torchtitan/pull/3412",
    ),
    Exhibit(
        "117a",
        "a gradient before split experts is not summed",
        "Inside the mixture of experts the local part of a distributed tensor was used, and nothing told the tape how"
        " the gradient of that part becomes one of the whole. A reduction in backward was missing (mended by #1878).",
        partial_before_experts,
        jobs.train_job(2, steps=3, precision="fp64", **EXPERTS),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, EXPERTS)),),
        "https://github.com/pytorch/torchtitan/issues/1805",
    ),
    Exhibit(
        "117b",
        "the router's weights differ from rank to rank",
        "The router is on every rank, and the scores of the tokens were split over the tensor-parallel ranks. Each rank"
        " had the gradient of its slice of the tokens, and under some settings no all-reduce followed. A user had"
        " reported that the routers' weights differed (#2387).",
        router_of_own_tokens,
        jobs.train_job(2, steps=3, precision="fp64", sequence_parallel=True, **EXPERTS),
        (
            Catch(CHECKS, "test_a_job_equals_one_device", (2, {**EXPERTS, "sequence_parallel": True})),
            Catch(
                CHECKS, "test_replicas_stay_equal", (2, {**EXPERTS, "sequence_parallel": True}), error="MismatchError"
            ),
        ),
        "https://github.com/pytorch/torchtitan/pull/2416",
    ),
    Exhibit(
        "118",
        "experts' gradients are as many times too large as ranks share them out",
        "With two expert-parallel ranks each gradient of an expert was exactly twice that of one rank, and the"
        " reporter's loss curves were equal all the same. How that comes about is written where another library had it"
        " (NVIDIA/Megatron-LM#5956): an expert has seen the tokens of all ranks, so its gradient is a sum over them"
        " already, and the mean divided by the number of ranks that hold the expert.",
        divided_by_the_group,
        means_of_experts,
        (Catch(CHECKS, "test_means_of_experts_are_the_mean_over_all_rows"),),
        "https://github.com/pytorch/pytorch/issues/160285",
    ),
    Exhibit(
        "119",
        "every group of experts clips by its norm alone",
        "The squares of the experts' gradients were not summed over the expert-parallel ranks. Each rank had another"
        " norm, printed it, and scaled the parameters that all share by another factor, in the report by factors that"
        " are ten times apart. Clipping is on by default, and nothing in the logs shows it.",
        norm_without_other_experts,
        jobs.train_job(2, steps=3, dp=2, ep=2, experts=2, clip=0.05, precision="fp64"),
        (
            Catch(
                CHECKS,
                "test_a_job_equals_one_device",
                (2, {"dp": 2, "ep": 2, "experts": 2, "clip": 0.05}),
                error="MismatchError",
            ),
        ),
        "https://github.com/NVIDIA-NeMo/Automodel/issues/3816",
    ),
    Exhibit(
        "120",
        "the ring's backward has the keys of its first step",
        "Keys and values went round the ring in local variables. The backward of one step took them from what was saved"
        " for backward, and that was saved in the first step of the forward: this rank's own. Every step computed"
        " gradients against the same keys. The forward was right, there was no error and no NaN.",
        first_keys_in_backward,
        split_jobs.long_context(),
        (Catch(CONTEXT, "test_packed_attention_forward_and_backward", (2, "ring", 16)),),
        "https://github.com/huggingface/diffusers/issues/14265",
    ),
    Exhibit(
        "141",
        "a layer that every tensor-parallel rank holds begins with other values on each",
        "Layers of the user's own are not split, so every rank has a whole one. Each rank drew its initial values from"
        " a generator in another state, and nothing made them equal. The first loss was 11.75 on one rank, 5.83 on two"
        " and 1.45 on eight.",
        own_initial_values,
        jobs.train_job(2, steps=3, tp=2, precision="fp64"),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, {"tp": 2}), error="MismatchError"),),
        "https://github.com/NVIDIA-NeMo/Automodel/issues/1291",
    ),
    Exhibit(
        "142",
        "tensor-parallel ranks draw different noise for the same sample",
        "Noise that is added to the samples came from a generator that was seeded with the rank. Ranks that split a"
        " layer changed the same batch in different ways, and gradients were of no network. The noise of a sample also"
        " depended on the number of ranks, so runs on one and on four nodes differed from the first step.",
        noise_by_rank,
        jobs.train_job(2, steps=3, tp=2, precision="fp64", dropout=0.2),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, {"tp": 2, "dropout": 0.2})),),
        "https://github.com/NVIDIA-NeMo/Automodel/issues/3149",
    ),
    Exhibit(
        "143",
        "the router does not learn from the loss",
        "The routing probabilities were gathered from all ranks with a collective that the tape does not know. The"
        " router was cut off from the loss, and learned from the auxiliary losses alone.",
        router_detached,
        jobs.train_job(2, steps=3, precision="fp64", **OWN_EXPERTS),
        (Catch("tests/parallel/test_expert.py", "test_without_drops_it_is_the_dense_computation", (1,)),),
        "https://github.com/NVIDIA-NeMo/Automodel/pull/2995",
    ),
    Exhibit(
        "144",
        "experts without tokens are left out of the update",
        "When no token is sent to the experts of a rank, a computation in their place makes gradients, and it used one"
        " expert's weight. The others had no gradient: their momentum did not decay, their weights did not, and the"
        " optimizer made no step. Their state became another one than on ranks that had sent tokens.",
        idle_experts_left_out,
        jobs.train_job(2, steps=4, precision="fp64", **IDLE_EXPERTS),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, IDLE_EXPERTS)),),
        "https://github.com/NVIDIA-NeMo/Automodel/pull/2995",
    ),
    Exhibit(
        "145",
        "the router's gradient is that of one rank's experts",
        "Under expert parallelism the scores of experts on other ranks were zeroed on each rank, so the gradient of the"
        " scores covered a rank's own experts, and these parts were never summed. Everything before the experts lost"
        " gradient.",
        scores_of_own_experts,
        jobs.train_job(2, steps=3, precision="fp64", **OWN_EXPERTS),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, OWN_EXPERTS)),),
        "https://github.com/huggingface/transformers/pull/48205",
    ),
    Exhibit(
        "146",
        "the router gets a gradient from what its experts never did",
        "A slot that no expert of the rank serves had an output that was not zero, and a routing weight of zero. The"
        " product is right in forward. In backward the weight's gradient is that output, so the router collected"
        " gradient for tokens that the rank never routed. The loss was right and only the gradient was not: nothing in"
        " a training run looks off.",
        gradient_of_unserved_slots,
        jobs.train_job(1, steps=3, precision="fp64", experts=2, capacity_factor=0.5),
        (Catch(CHECKS, "test_dropped_tokens_give_the_router_no_gradient"),),
        "https://github.com/huggingface/transformers/issues/48687",
    ),
]
