"""Bugs of gradients: which are summed, over which ranks, how often, and by what they are divided.

Proved by: tests/museum/test_museum.py
"""

import contextlib
from typing import Any

from minidist.collectives.algorithms import ALGORITHMS
from minidist.core.autograd.backward import BackwardPass, WeightGradStore
from minidist.core.comm.mesh import Mesh
from minidist.core.optim import Adam
from minidist.core.parallel import data_parallel, gradients, zero
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Catch, Exhibit, Patch

DATA_PARALLEL, CHECKS = "tests/parallel/test_data_parallel.py", "tests/museum/test_checks.py"


def only_top_level(patch: Patch) -> None:
    """the hooks and buckets know the parameters of the top level and of its layers; nested blocks are skipped"""
    make_buckets: Any = gradients.make_buckets
    parameter_ready = gradients.GradientReducer.parameter_ready

    # The flat parameters without those of nested blocks: "layer.weight" has one dot, "block.layer.weight" two.
    class Shallow:
        def __init__(self, flat: Any) -> None:
            self.flat = flat
            self.parameters = [p for p in flat.parameters if p.name.count(".") < 2]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.flat, name)

    def ready(self: Any, parameter: Any) -> None:
        if parameter.name.count(".") < 2:
            parameter_ready(self, parameter)

    patch.setattr(gradients, "make_buckets", lambda flat, *rest: make_buckets(Shallow(flat), *rest))
    patch.setattr(gradients.GradientReducer, "parameter_ready", ready)


def transposed_axes(patch: Patch) -> None:
    """the group of an axis is made of the ranks with the same coordinate on it"""

    def slice_(self: Mesh, names: tuple[str, ...]) -> Any:
        axes = [self._index(name) for name in names]
        index = tuple(self.coordinate[a] if a in axes else slice(None) for a in range(len(self.shape)))
        label = "x".join(names) + "".join(f"_{self.coordinate[a]}" for a in axes)
        return self.comm.group(self.ranks[index].reshape(-1).tolist(), label)

    patch.setattr(Mesh, "_slice", slice_)


def always_sum(patch: Patch) -> None:
    """gradients are summed where the mean was asked for"""
    original = gradients.GradientReducer.__init__

    def init(self: Any, flat: Any, comm: Any, **options: Any) -> None:
        original(self, flat, comm, **options | {"op": "sum"})

    patch.setattr(gradients.GradientReducer, "__init__", init)


def mean_of_means(patch: Patch) -> None:
    """each rank's loss is the mean over its own rows, and the ranks' gradients are averaged"""
    patch.setattr(jobs, "divisor_of", lambda comm, mine: None)
    patch.setattr(jobs, "reduction_of", lambda: "mean")


def no_broadcast(patch: Patch) -> None:
    """replicas keep the values that their own seeds gave them"""
    patch.setattr(data_parallel, "broadcast", lambda comm, array: array)


def counted_once_per_parameter(patch: Patch) -> None:
    """Adam's bias correction counts the ranges of parameters that it has updated, not the steps"""

    def wrong(self: Any, runs: list[Any]) -> None:
        for run in runs:
            run.count = self.step_count
            self._each_block(run, self.update)
            self.step_count += 1

    patch.setattr(Adam, "_step_runs", wrong)


def not_divided(patch: Patch) -> None:
    """the mean loss of each micro-batch is differentiated, and the sum is not divided by their number"""
    patch.setattr(jobs, "divisor_of_micro_batch", lambda counts, number: counts[number])


def divided_again(patch: Patch) -> None:
    """what has been accumulated so far is divided by the number of micro-batches after each of them"""

    def divide(flat: Any, micro_batches: int) -> None:
        for parameter in flat.parameters:
            if parameter.grad is not None:
                parameter.grad[...] /= micro_batches

    patch.setattr(jobs, "after_micro_batch", divide)


def mean_of_the_micro_batches_means(patch: Patch) -> None:
    """each micro-batch is a mean over its own tokens, since the number of all tokens is known only at the end"""
    patch.setattr(jobs, "divisor_of_micro_batch", lambda counts, number: counts[number] * len(counts))


def averaged_though_divided(patch: Patch) -> None:
    """a mean over the ranks, although each loss has the global divisor already"""
    patch.setattr(zero.ShardReducer, "op", property(lambda self: "avg", lambda self, op: None))


def incomplete_buckets_are_forgotten(patch: Patch) -> None:
    """the reducer waits for what was sent, and does not report what never was"""

    def finished(self: Any) -> None:
        for work in self.works:
            work.wait()
        for parameter in self.bucket_of:
            parameter.gradient.was_reduced()
        self.works, self.missing = [], [set(bucket.parameters) for bucket in self.buckets]

    patch.setattr(gradients.GradientReducer, "finished", finished)


def twice(patch: Patch) -> None:
    """the deferred weight-gradient pass counts a weight again at its second site"""
    put = WeightGradStore.put

    def doubled(self: Any, parameter: Any, *rest: Any) -> None:
        if any(work[0] is parameter for work in self._work):
            put(self, parameter, *rest)
            with contextlib.suppress(KeyError):
                self._owner.sites[parameter] += 1
        put(self, parameter, *rest)

    patch.setattr(WeightGradStore, "put", doubled)


def twice_at_once(patch: Patch) -> None:
    """each site of a weight adds its contribution, and then once more for each other site"""
    once = BackwardPass.contribute

    def doubled(self: Any, parameter: Any, *work: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(KeyError):
                once(self, parameter, *work)

    patch.setattr(BackwardPass, "contribute", doubled)


def ordered_is_a_ring(patch: Patch) -> None:
    """the reduction that promises rank order adds in the order of a ring"""
    patch.setitem(ALGORITHMS["all_reduce"], "ordered", ALGORITHMS["all_reduce"]["ring"])


EXHIBITS = [
    Exhibit(
        "1a",
        "the mean of means over ragged shards",
        "Averaging the ranks' mean gradients is right when all shards have the same size. With 11 rows on 3 ranks"
        " they do not: rows of a small shard weigh more than others. From October 2024 to August 2026 seven projects"
        " were told that they take such a mean, over ranks or over micro-batches (10c): transformers, torchtitan, verl,"
        " prime-rl, mlx-lm, nanochat and speculators.",
        mean_of_means,
        jobs.replicas,
        (Catch(CHECKS, "test_ragged_shards_train_like_one_device", (3,), error="MismatchError"),),
        "https://github.com/huggingface/transformers/issues/34242",
    ),
    Exhibit(
        "1b",
        "the mean of means over masked labels",
        "The same with padding, or with prompts that do not count: each rank divides by the number of labels that count"
        " on it, and that number differs from rank to rank even where the batch divides.",
        mean_of_means,
        lambda: jobs.replicas(masked=0.5),
        (Catch(CHECKS, "test_masked_labels_train_like_one_device", error="MismatchError"),),
        "https://github.com/pytorch/torchtitan/issues/1842",
    ),
    Exhibit(
        "2",
        "only the top level's parameters are synchronised",
        "The wrapper iterated over the model's direct children and registered a hook for each of their parameters. It"
        " was written for a model of plain layers and was right for it. Later the layers were put into blocks. Each"
        " replica continued to learn, on its own data, with its own blocks.",
        only_top_level,
        jobs.train_job(2, dp=2),
        (
            Catch(DATA_PARALLEL, "test_integers_are_exact_with_ragged_shards", (3, "ring", 25.0)),
            Catch(DATA_PARALLEL, "test_any_data_to_the_bit_in_rank_order", (2, 25.0, 0)),
            Catch(DATA_PARALLEL, "test_several_steps_keep_the_replicas_equal_and_equal_to_one_device", (2,)),
        ),
    ),
    Exhibit(
        "3",
        "the groups of a mesh axis are transposed",
        "A reshape puts ranks into a grid, and one index picks a row where a column was meant. On a square grid every"
        " group still has the right size. The ranks that now sum their gradients are those that saw the same rows: each"
        " sum counts half of the batch twice and the other half not at all.",
        transposed_axes,
        jobs.grid,
        (
            Catch("tests/comm/test_mesh.py", "check_axis_groups", ((2, 3),)),
            Catch("tests/comm/test_mesh.py", "check_axis_groups", ((2, 2),)),
            Catch("tests/comm/test_mesh.py", "test_the_picture_in_the_docstring"),
        ),
    ),
    Exhibit(
        "4",
        "gradients are summed instead of averaged",
        "The collective had no average, only a sum, and the division was left for later. With Adam hardly anything"
        " changes, since its update does not depend on the gradient's scale; with SGD it is a learning rate that grows"
        " with the number of ranks.",
        always_sum,
        lambda: jobs.replicas(ragged=False, averaged=True),
        (Catch(DATA_PARALLEL, "test_the_mean_of_equal_shards_is_the_mean_over_the_batch", (2,)),),
    ),
    Exhibit(
        "5",
        "replicas start from different seeds",
        "Each process seeded its generator with its rank, which was right for dropout, and built its model after that."
        " Equal gradients are added to unequal weights, and the distance never goes away.",
        no_broadcast,
        jobs.replicas,
        (Catch(DATA_PARALLEL, "test_replicas_from_different_seeds_become_rank_0s"),),
    ),
    Exhibit(
        "6",
        "Adam's step counter advances once per parameter",
        "The counter of the bias correction was in the loop over parameters, one line too deep. The correction fades"
        " out within the first step instead of the first hundred; where ranks own different numbers of parameters,"
        " it also differs between ranks.",
        counted_once_per_parameter,
        jobs.train_job(2, dp=2, zero=3, optimizer="adam"),
        (
            Catch("tests/optim/test_optimizers.py", "test_one_counter_for_all_parameters"),
            Catch("tests/train/test_sharded.py", "test_compare_is_equal_bit_for_bit", (3, 2)),
        ),
    ),
    Exhibit(
        "10a",
        "the loss is not divided by the number of micro-batches",
        "Accumulation was added to a loop that was right for one batch: the mean of each micro-batch is differentiated,"
        " and the sum of means is as many times too large as there are micro-batches.",
        not_divided,
        jobs.accumulating,
        (Catch(CHECKS, "test_micro_batches_of_any_length_are_one_batch"),),
    ),
    Exhibit(
        "10b",
        "accumulated gradients are divided again at each step of the accumulation",
        "The division was inside the loop. The first micro-batch is divided four times, the last once: a batch in"
        " which late samples weigh 64 times what early ones do.",
        divided_again,
        jobs.accumulating,
        (Catch(CHECKS, "test_micro_batches_of_any_length_are_one_batch"),),
    ),
    Exhibit(
        "10c",
        "each micro-batch is a mean over its own tokens",
        "Texts have different lengths. A mean of means makes each token of a short text weigh more than each of a long"
        " one. Several large training codes had this bug and fixed it in the same month.",
        mean_of_the_micro_batches_means,
        jobs.accumulating,
        (Catch(CHECKS, "test_micro_batches_of_any_length_are_one_batch"),),
    ),
    Exhibit(
        "10d",
        "a sum with a global divisor is averaged once more",
        "Two conventions met: the loss had the count of all ranks in it already, and the sharded optimizer's reduction"
        " averaged.",
        averaged_though_divided,
        jobs.train_job(2, dp=2, zero=1),
        (Catch("tests/train/test_sharded.py", "test_compare_is_equal_bit_for_bit", (1, 2)),),
    ),
    Exhibit(
        "17",
        "a bucket that never completes is forgotten",
        "A parameter of a branch that is not always taken gets no gradient, and its bucket is never sent. The other"
        " parameters of that bucket keep the gradient of their own rank's rows. minidist reports parameter and bucket,"
        " or lets the parameter take part as zeros.",
        incomplete_buckets_are_forgotten,
        jobs.branches,
        (
            Catch(
                DATA_PARALLEL,
                "test_an_unused_parameter_is_an_error_that_names_it_and_its_bucket",
                (25.0,),
                error="Failed",
            ),
            Catch(DATA_PARALLEL, "test_an_unused_parameter_may_take_part_as_zeros", (1e-4,), error="DeadlockError"),
        ),
    ),
    Exhibit(
        "22a",
        "a weight that is used at two sites is counted twice",
        "Zero-bubble schedules defer the weight gradients. The list of deferred work was filled once per site, and"
        " each entry added the sum over all sites. With tied embeddings the whole vocabulary learns at twice the rate.",
        twice,
        jobs.deferred_weight_gradients,
        (Catch(CHECKS, "test_two_sites_under_zero_bubble"), Catch(CHECKS, "test_a_weight_at_two_sites", ("deferred",))),
    ),
    Exhibit(
        "22b",
        "a weight that is used at two sites is counted twice, in the ordinary pass",
        "The same without a schedule: both uses of a weight found the same entry in a table, and each added for both.",
        twice_at_once,
        jobs.twice_used,
        (Catch(CHECKS, "test_a_weight_at_two_sites", ("now",)),),
    ),
    Exhibit(
        "23",
        "the sum depends on where buckets end",
        "No number is wrong, and yet a day was lost: the job gave other digits after the bucket size was changed. A"
        " ring begins to add at another rank for each chunk. This is documented as the float tier; the ordered"
        " reduction promises more, and keeps it.",
        ordered_is_a_ring,
        jobs.train_job(3, dp=3, reduction="ordered"),
        (
            Catch("tests/collectives/test_ordered.py", "test_the_bits_of_a_sum_do_not_depend_on_the_buckets"),
            Catch(DATA_PARALLEL, "test_any_data_to_the_bit_in_rank_order", (3, 1e-4, 0)),
        ),
    ),
]
