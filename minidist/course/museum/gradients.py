"""Bugs of gradients: which are summed, over which ranks, how often, and by what they are divided.

Proved by: tests/museum/test_museum.py
"""

import contextlib
from typing import Any

from minidist.collectives.algorithms import ALGORITHMS
from minidist.core.autograd.backward import BackwardPass, WeightGradStore
from minidist.core.comm.mesh import Mesh
from minidist.core.nn.flat import FlatParameters
from minidist.core.optim import AdamW
from minidist.core.parallel import data_parallel, zero
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Patch, replaces
from minidist.parallel.unused import ZerosReducer


def only_top_level(patch: Patch) -> None:
    """the hooks and buckets know the parameters of the top level and of its layers; nested blocks are skipped"""
    make_buckets: Any = data_parallel.make_buckets
    parameter_ready = data_parallel.GradientReducer.parameter_ready

    # The flat parameters without those of nested blocks: "layer.weight" has one dot, "block.layer.weight" two.
    class Shallow(FlatParameters):
        def __init__(self, flat: Any) -> None:
            self.flat = flat
            self.parameters = [p for p in flat.parameters if p.name.count(".") < 2]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.flat, name)

    def ready(self: Any, parameter: Any) -> None:
        if parameter.name.count(".") < 2:
            parameter_ready(self, parameter)

    patch.setattr(data_parallel, "make_buckets", lambda flat, *rest: make_buckets(Shallow(flat), *rest))
    patch.setattr(data_parallel.GradientReducer, "parameter_ready", ready)


@replaces(Mesh, "_slice")
def transposed_axes(_: Any, self: Mesh, names: tuple[str, ...]) -> Any:
    """the group of an axis is made of the ranks with the same coordinate on it"""
    axes = [self.axis_names.index(name) for name in names]
    index = tuple(self.coordinate[a] if a in axes else slice(None) for a in range(len(self.shape)))
    label = "x".join(names) + "".join(f"_{self.coordinate[a]}" for a in axes)
    return self.comm.group(self.ranks[index].reshape(-1).tolist(), label)


@replaces(data_parallel.GradientReducer, "__init__")
def always_sum(original: Any, self: Any, flat: Any, comm: Any, **options: Any) -> None:
    """gradients are summed where the mean was asked for"""
    original(self, flat, comm, **options | {"op": "sum"})


def mean_of_means(patch: Patch) -> None:
    """each rank's loss is the mean over its own rows, and the ranks' gradients are averaged"""
    patch.setattr(jobs, "divisor_of", lambda comm, mine: None)
    patch.setattr(jobs, "reduction_of", lambda: "mean")


def no_broadcast(patch: Patch) -> None:
    """replicas keep the values that their own seeds gave them"""
    patch.setattr(data_parallel, "broadcast", lambda comm, array: array)


@replaces(AdamW, "_step_runs")
def counted_once_per_parameter(_: Any, self: Any, runs: list[Any]) -> None:
    """Adam's bias correction counts the ranges of parameters that it has updated, not the steps"""
    for run in runs:
        run.count = self.step_count
        self._each_block(run, self.update)
        self.step_count += 1


def not_divided(patch: Patch) -> None:
    """the mean loss of each micro-batch is differentiated, and the sum is not divided by their number"""
    patch.setattr(jobs, "divisor_of_micro_batch", lambda counts, number: counts[number])


@replaces(jobs, "after_micro_batch")
def divided_again(_: Any, flat: Any, micro_batches: int) -> None:
    """what has been accumulated so far is divided by the number of micro-batches after each of them"""
    for parameter in flat.parameters:
        if parameter.grad is not None:
            parameter.grad[...] /= micro_batches


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

    for kind in (data_parallel.GradientReducer, ZerosReducer):
        patch.setattr(kind, "finished", finished)


@replaces(WeightGradStore, "put")
def twice(put: Any, self: Any, parameter: Any, *rest: Any) -> None:
    """the deferred weight-gradient pass counts a weight again at its second site"""
    if any(work[0] is parameter for work in self.work):
        put(self, parameter, *rest)
        with contextlib.suppress(KeyError):
            self._owner.sites[parameter] += 1
    put(self, parameter, *rest)


@replaces(BackwardPass, "site_done")
def twice_at_once(once: Any, self: Any, parameter: Any, *work: Any) -> None:
    """each site of a weight adds its contribution, and then once more for each other site"""
    for _ in range(2 if work else 1):
        with contextlib.suppress(KeyError):
            once(self, parameter, *work)


def ordered_is_a_ring(patch: Patch) -> None:
    """the reduction that promises rank order adds in the order of a ring"""
    patch.setitem(ALGORITHMS["all_reduce"], "ordered", ALGORITHMS["all_reduce"]["ring"])
