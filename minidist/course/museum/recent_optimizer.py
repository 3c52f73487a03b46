"""Bugs of what happens between backward and the update, from public threads of 2024 to 2026: accumulated gradients,
their norm, the learning rate, and the optimizer's state in a checkpoint.

Proved by: tests/museum/test_recent_optimizer.py
"""

from tempfile import TemporaryDirectory
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base.arrays import Array
from minidist.core.comm import Comm
from minidist.core.parallel.fsdp_unit import FSDPUnit
from minidist.core.parallel.zero import ShardReducer
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Catch, Exhibit, Patch, Recording
from minidist.job.checkpoint import resume
from minidist.job.train import recipe, run
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.job.train.strategies.sharded import FullySharded
from minidist.optim.schedule import WarmupLinear
from minidist.techniques.local_sgd.averaging import OuterOptimizer

CHECKS, RESUME = "tests/museum/test_recent_optimizer.py", "tests/checkpoint/test_resume.py"
TINY: dict[str, Any] = {"width": 8, "layers": 1, "context": 4, "precision": "fp64"}
ACCUMULATED: dict[str, Any] = {"zero": 2, "micro_batch": 1, "accumulation": 3}
OWN_EXPERTS: dict[str, Any] = {"zero": 3, "dp": 2, "ep": 2, "experts": 2, "micro_batch": 1, "accumulation": 2}
SHARDED: dict[str, Any] = {"zero": 3, "micro_batch": 1, "accumulation": 2}
SCALED: dict[str, Any] = {"precision": "fp16", "reduction": "ordered"}
STALE: dict[str, Any] = {"precision": "bf16", "reduction": "ordered", "zero": 3}
ADAM: dict[str, Any] = {"zero": 3, "optimizer": "adam"}
HYBRID: dict[str, Any] = {"zero": 3, "dp_replicate": 2, "clip": 0.05}
CLIPPED_EXPERTS: dict[str, Any] = {"dp": 2, "ep": 2, "experts": 2, "clip": 0.05}


def every_pass_is_the_last(patch: Patch) -> None:
    """every backward pass is taken for the last one before the update, and the next one begins with an empty sum"""
    right = ShardReducer.started

    def started(self: Any) -> None:
        right(self)
        self.shard.filled = self.shard.filled and self.keep_whole

    patch.setattr(ShardReducer, "started", started)


def first_use_alone(patch: Patch) -> None:
    """of a weight that is used twice, the gradient of one use is reduced, and that of the other is lost"""
    right = Parameter.accumulate

    def accumulate(self: Any, compute: Any) -> None:
        sharded = any(isinstance(o, ShardReducer) and not o.keep_whole for o in self.observers)
        if not (sharded and self.gradient.local is not None):
            right(self, compute)

    patch.setattr(Parameter, "accumulate", accumulate)


def doubled_by_a_group_of_one(patch: Patch) -> None:
    """with one rank in the group, the sum of earlier micro-batches is doubled before the next gradient is added"""
    right = FSDPUnit.add_reduced

    def add_reduced(self: Any, piece: Array) -> None:
        if self.shard.filled and self.shard.comm.size == 1:
            self.shard.grad_buffer()[...] *= 2
        right(self, piece)

    patch.setattr(FSDPUnit, "add_reduced", add_reduced)


def overwritten_by_a_group_of_one(patch: Patch) -> None:
    """with one rank in the group, the gradient of a micro-batch is copied over the sum of the earlier ones"""
    right = FSDPUnit.add_reduced

    def add_reduced(self: Any, piece: Array) -> None:
        self.shard.filled = self.shard.filled and self.shard.comm.size > 1
        right(self, piece)

    patch.setattr(FSDPUnit, "add_reduced", add_reduced)


def sum_divided_again(patch: Patch) -> None:
    """in place of the new gradient, what is accumulated so far is divided by the number of ranks"""
    right = FSDPUnit.add_reduced

    def add_reduced(self: Any, piece: Array) -> None:
        if self.shard.filled:
            self.shard.grad_buffer()[...] /= self.shard.comm.size
        piece *= self.shard.comm.size  # not divided: here the loss's divisor has the rows of all ranks
        right(self, piece)

    patch.setattr(FSDPUnit, "add_reduced", add_reduced)


def loss_not_scaled(patch: Patch) -> None:
    """backward begins with the loss itself, and the gradient is divided by the loss scale"""

    def parallelize(made: Any, comm: Comm, *rest: Any) -> Any:
        for extension in made.extensions:
            extension.scaled = lambda loss: loss
        return recipe.parallelize(made, comm, *rest)

    patch.setattr(run, "parallelize", parallelize)


def one_step_too_many(patch: Patch) -> None:
    """a step that made the optimizer's state, before training, is counted"""

    def parallelize(made: Any, comm: Comm, *rest: Any) -> Any:
        strategy = recipe.parallelize(made, comm, *rest)
        for axis in strategy.data_axes:
            axis.optimizer.step_count += 1
            for counted in axis.optimizer._runs:
                counted.count += 1
        return strategy

    patch.setattr(run, "parallelize", parallelize)


def masters_alone(patch: Patch) -> None:
    """a step updates the float32 masters, and the 16-bit weights of forward stay as they are"""
    right = FullySharded.step

    def step(self: Any) -> None:
        before = [shard.data.copy() for shard in self.shards]
        right(self)
        for shard, values in zip(self.shards, before, strict=True):
            shard.data[...] = values

    patch.setattr(FullySharded, "step", step)


def norm_over_replicas(patch: Patch) -> None:
    """the squares of the shards are summed over all ranks, also over those that hold copies of a shard"""
    right = MeshStrategy.square_sums_of

    def summed(self: Any, axis: Any, skip: Any = ()) -> Any:
        return right(self, axis, skip) * self.job.config.dp_replicate

    patch.setattr(MeshStrategy, "square_sums_of", summed)


def mean_of_expert_norms(patch: Patch) -> None:
    """the squares of experts on different ranks are averaged, and not summed"""
    right = MeshStrategy.square_sums_of

    def averaged(self: Any, axis: Any, skip: Any = ()) -> Any:
        return right(self, axis, skip) / (self.axes.ep.size if axis.experts else 1)

    patch.setattr(MeshStrategy, "square_sums_of", averaged)


def warmup_subtracted_twice(patch: Patch) -> None:
    """the schedule is told the steps of the decay where it expects the step in which the decay ends"""
    right = WarmupLinear.__call__

    def ends_early(self: Any, step: int) -> float:
        if step < self.warmup_steps:
            return right(self, step)
        decay = self.total_steps - self.warmup_steps
        return float(self.at(min(1.0, (step - self.warmup_steps) / (decay - self.warmup_steps))))

    patch.setattr(WarmupLinear, "__call__", ends_early)


def moments_dropped(patch: Patch) -> None:
    """a resumed job has the weights of the checkpoint, and an optimizer whose moments begin with zeros"""
    right = resume._state

    def zeros(*place: Any) -> dict[str, Array]:
        return {name: array * 0 for name, array in right(*place).items()}

    patch.setattr(resume, "_state", zeros)


def opposite_sign(patch: Patch) -> None:
    """the outer optimizer's gradient is the average less the common weights, and its step leads away from it"""

    def outer_step(self: Any) -> None:
        self.common.grad = self.flat.data - self.common.data
        self.outer.step()
        self.flat.data[...] = self.common.data
        self.flat.updated()

    patch.setattr(OuterOptimizer, "outer_step", outer_step)


def resumed() -> Recording:
    """Train two steps, save a checkpoint, and train two more from it."""
    with TemporaryDirectory() as folder:
        jobs.train_job(1, 2, save=folder, **TINY)()
        return jobs.train_job(1, 4, save=folder, resume=True, **TINY)()


EXHIBITS = [
    Exhibit(
        "121",
        "of the accumulated gradients the last one is left",
        "The loop accumulated gradients by itself, and the library was told that a step has one backward pass. So every"
        " pass was the boundary at which ZeRO 2 stores the sum and resets its accumulator: only the gradient of the"
        " last micro-batch reached the update. ZeRO 3 resets it in the step, and was right.",
        every_pass_is_the_last,
        jobs.train_job(2, steps=3, **TINY, **ACCUMULATED),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, ACCUMULATED)),),
        "https://github.com/allenai/open-instruct/pull/1498",
    ),
    Exhibit(
        "122",
        "a group of one rank doubles the gradient with every micro-batch",
        "With sharded gradients, a buffer whose data-parallel group has one rank (experts, where expert parallelism"
        " uses all ranks) became twice its content plus the new gradient: after N micro-batches about 2^N times the"
        " gradient. Clipping hid it. At 128 micro-batches the norm overflowed, and clipping multiplied all gradients"
        " by about zero.",
        doubled_by_a_group_of_one,
        jobs.train_job(2, steps=3, **TINY, **OWN_EXPERTS),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, OWN_EXPERTS)),),
        "https://github.com/NVIDIA/Megatron-LM/issues/6660",
    ),
    Exhibit(
        "123",
        "the norm counts every replica of a shard",
        "With hybrid sharding, the powers of the elements were summed over all data-parallel ranks. Only the ranks"
        " that hold different shards have different elements; the replicas hold the same. The norm was too large,"
        " and more so the more replicas there were.",
        norm_over_replicas,
        jobs.train_job(4, steps=3, **TINY, **HYBRID),
        (Catch(CHECKS, "test_a_job_equals_one_device", (4, HYBRID)),),
        "https://github.com/ByteDance-Seed/VeOmni/issues/184",
    ),
    Exhibit(
        "124",
        "the norm has the mean over experts in place of their sum",
        "The norm was averaged over the data-parallel ranks. That keeps what all of them hold; but experts are"
        " different ones on the ranks of an expert-parallel group, and their part has to be summed over it.",
        mean_of_expert_norms,
        jobs.train_job(2, steps=3, **TINY, **CLIPPED_EXPERTS),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, CLIPPED_EXPERTS)),),
        "https://github.com/deepspeedai/DeepSpeed/pull/5259",
    ),
    Exhibit(
        "125",
        "the learning rate is zero before the end",
        "The schedule takes the step in which the decay ends, and subtracts the steps of the warm-up itself. It was"
        " given the steps of the decay, from which they had been subtracted already. The cosine ended one warm-up too"
        " early: a run of 220 steps with 22 of warm-up had a rate of 0 from step 198 on.",
        warmup_subtracted_twice,
        jobs.train_job(1, steps=10, warmup=2, decay="cosine", **TINY),
        (Catch("tests/optim/test_schedule.py", "test_cosine_at_its_ends_and_in_the_middle"),),
        "https://github.com/areal-project/AReaL/pull/1289",
    ),
    Exhibit(
        "126",
        "a checkpoint is loaded without the optimizer's moments",
        "The template into which a checkpoint is loaded was made without telling that it is for loading, and the"
        " optimizer's moments were dropped. No error was raised.",
        moments_dropped,
        resumed,
        (
            Catch(
                "tests/checkpoint/test_resume.py", "test_the_next_steps_have_the_bits_of_the_uninterrupted_run", (0, 1)
            ),
        ),
        "https://github.com/areal-project/AReaL/pull/1468",
    ),
    Exhibit(
        "127",
        "the outer step leads away from the average",
        "In DiLoCo replicas train alone, and an outer optimizer steps the common weights by a pseudo-gradient: the"
        " common weights less the average of the replicas. Its sign was mended in this pull request.",
        opposite_sign,
        jobs.train_job(2, steps=4, local_steps=2, outer_optimizer="nesterov", optimizer="sgd", **TINY),
        (Catch("tests/techniques/test_local_steps.py", "test_two_rounds_of_the_paper_by_hand"),),
        "https://github.com/meta-pytorch/torchft/pull/233",
    ),
    Exhibit(
        "128",
        "ZeRO 2 reduces the gradient of one of two uses",
        "An encoder was applied twice in a step, in the main path and for an auxiliary loss. Its parameters received"
        " gradients from two parts of the graph, and on several ranks the gradient that ZeRO 2 reduced lacked the"
        " contribution of one of them. There was no error and no warning. Here it is the embedding, which the head"
        " uses again.",
        first_use_alone,
        jobs.train_job(2, steps=3, zero=2, **TINY),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, {"zero": 2})),),
        "https://github.com/deepspeedai/DeepSpeed/issues/8224",
    ),
    Exhibit(
        "133",
        "a group of one rank keeps the last micro-batch",
        "A reduced gradient is copied into the shard for the first micro-batch, and added for the others. The branch"
        " for one rank, where nothing is to be reduced, had the copy alone. Most parameters got about one of N parts of"
        " their gradient; weights whose buffer was their own, such as the tied embedding, were right.",
        overwritten_by_a_group_of_one,
        jobs.train_job(2, steps=3, **TINY, **OWN_EXPERTS),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, OWN_EXPERTS)),),
        "https://github.com/ServiceNow/Fast-LLM/issues/550",
    ),
    Exhibit(
        "134",
        "what is accumulated is divided, and the new gradient is not",
        "A gradient had to be divided by the number of ranks before it was added to the shard. The division was of the"
        " shard, which is another array than the gradient where gradients are sharded: earlier micro-batches were"
        " divided with each later one, and the last one never.",
        sum_divided_again,
        jobs.train_job(2, steps=3, **TINY, **SHARDED),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, SHARDED)),),
        "https://github.com/NVIDIA/Megatron-LM/pull/3023",
    ),
    Exhibit(
        "135",
        "gradients are divided by a scale that the loss never had",
        "In bf16 without ZeRO the optimizer had a dynamic loss scale of 65,536. Backward did not multiply the loss by"
        " it, and the step divided the gradients by it. Here the precision is fp16, where the loss needs the scale.",
        loss_not_scaled,
        jobs.train_job(2, steps=3, optimizer="sgd", **{**TINY, **SCALED}),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, SCALED)),),
        "https://github.com/deepspeedai/DeepSpeed/pull/7839",
    ),
    Exhibit(
        "139",
        "Adam's first step is counted as its second",
        "To have state into which a checkpoint can be loaded, the sharded optimizer made a step with gradients of zero"
        " first. Adam counted it, so the first update of the training had the bias correction of step 2 and was about"
        " 1.34 times too small.",
        one_step_too_many,
        jobs.train_job(2, steps=3, **TINY, **ADAM),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, ADAM)),),
        "https://github.com/NVIDIA/Megatron-LM/issues/5974",
    ),
    Exhibit(
        "140",
        "the weights of forward are not those that the optimizer updates",
        "The copy from the float32 weights to the 16-bit ones was moved from before the forward to after the step, and"
        " one optimizer's hook for that did nothing. Its weights were updated, and forward kept the old ones. A test"
        " compared losses of three steps with a tolerance of 1 %, and passed.",
        masters_alone,
        jobs.train_job(2, steps=3, **{**TINY, **STALE}),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, STALE)),),
        "https://github.com/NVIDIA/Megatron-LM/pull/6336",
    ),
]
