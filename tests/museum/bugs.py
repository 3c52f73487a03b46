"""The museum: bugs that were found in public code and passed their authors' tests, planted here one at a time.

Each entry says what is wrong, plants it with a monkeypatch, and names the checks, tests of this suite, that must turn red.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from minidist.collectives import ring
from minidist.collectives.registry import algorithms
from minidist.comm import simulated
from minidist.comm.mesh import Mesh
from minidist.optim import Adam
from minidist.parallel import data_parallel, gradients
from tests.collectives import test_ordered
from tests.comm import test_mesh, test_simulated
from tests.optim import test_optimizers
from tests.parallel import test_data_parallel


@dataclass
class Bug:
    """A number of the museum, what is wrong, `plant(monkeypatch)`, and the checks by name, called without arguments."""

    number: int
    title: str
    plant: Callable
    checks: dict[str, Callable]


def only_top_level(monkeypatch):
    """The hooks and buckets know the parameters of the top level and of its layers; nested blocks are skipped."""
    make_buckets, register = gradients.make_buckets, data_parallel.register

    class Shallow:
        def __init__(self, flat):
            self.flat = flat
            self.parameters = [p for p in flat.parameters if p.name.count(".") < 2]

        def __getattr__(self, name):
            return getattr(self.flat, name)

    def shallow_buckets(flat, cap):
        return make_buckets(Shallow(flat), cap)

    def shallow_register(reducer, parameters, enabled):
        register(reducer, [p for p in parameters if p.name.count(".") < 2], enabled)

    monkeypatch.setattr(gradients, "make_buckets", shallow_buckets)
    monkeypatch.setattr(data_parallel, "register", shallow_register)


def transposed_axes(monkeypatch):
    """The group of an axis is made of the ranks with the same coordinate on it."""

    def slice_(self, names):
        axes = [self._index(name) for name in names]
        index = tuple(self.coordinate[a] if a in axes else slice(None) for a in range(len(self.shape)))
        label = "x".join(names) + "".join(f"_{self.coordinate[a]}" for a in axes)
        return self.comm.group(self.ranks[index].reshape(-1).tolist(), label)

    monkeypatch.setattr(Mesh, "_slice", slice_)


def always_sum(monkeypatch):
    """Gradients are summed where the mean was asked for."""
    original = gradients.GradientReducer.__init__

    def init(self, flat, comm, **options):
        original(self, flat, comm, **options | {"op": "sum"})

    monkeypatch.setattr(gradients.GradientReducer, "__init__", init)


def ragged_means():
    """Each rank divides by its own rows and the ranks' means are averaged: right for equal shards only."""
    rows = test_data_parallel.ROWS
    # The expected gradient is the sum, which is `rows` times the mean.
    test_data_parallel.check_ragged_shards(3, "ring", 25.0, "mean", lambda mine: rows / mine)


def no_broadcast(monkeypatch):
    """Replicas keep the values that their own seeds gave them."""
    monkeypatch.setattr(data_parallel, "broadcast", lambda comm, array: array)


def incomplete_buckets_are_forgotten(monkeypatch):
    """`finish` waits for what was sent, and says nothing of what never was."""

    def finish(self):
        for work in self.works:
            work.wait()
        self.flat.add_settled()
        self.reduced = True
        self._begin()

    monkeypatch.setattr(gradients.GradientReducer, "finish", finish)


def nothing_is_looked_for_at_the_end(monkeypatch):
    """A request without a wait and a send without a receive end in silence."""
    monkeypatch.setattr(simulated.SimWorld, "_finish", lambda self: None)


def ordered_is_a_ring(monkeypatch):
    """The ordered reduction adds in the order in which a ring happens to meet the ranks."""
    monkeypatch.setitem(algorithms()["all_reduce"], "ordered", ring.all_reduce)


def counted_once_a_parameter(monkeypatch):
    """Adam's bias correction counts the parameters it has updated, not the steps."""
    descend = Adam._descend

    def wrong(self, *arguments):
        descend(self, *arguments)
        self.step_count += 1

    monkeypatch.setattr(Adam, "_descend", wrong)


def small_blocks():
    with pytest.MonkeyPatch.context() as monkeypatch:
        test_optimizers.test_blocks_do_not_change_bits(Adam, {"lr": 0.1}, monkeypatch)


def small_mean():
    test_data_parallel.test_the_mean_of_equal_shards_is_the_mean_over_the_batch(2)


BUGS = [
    Bug(2, "only the top level's parameters are synchronised", only_top_level, {
        "exact": lambda: test_data_parallel.test_integers_are_exact_with_ragged_shards(3, "ring", 25.0),
        "ordered": lambda: test_data_parallel.test_any_data_to_the_bit_in_rank_order(2, 25.0, 0),
        "bytes": lambda: test_data_parallel.test_several_steps_keep_the_replicas_equal_and_equal_to_one_device(2),
    }),
    Bug(3, "the groups of a mesh axis are transposed", transposed_axes, {
        "axis groups": lambda: test_mesh.check_axis_groups((2, 3)),
        "square mesh": lambda: test_mesh.check_axis_groups((2, 2)),
        "picture": test_mesh.test_the_picture_in_the_docstring,
    }),
    Bug(4, "gradients are summed instead of averaged", always_sum, {"mean": small_mean}),
    Bug(5, "replicas start from different seeds", no_broadcast, {
        "startup": test_data_parallel.test_replicas_from_different_seeds_become_rank_0s,
    }),
    Bug(6, "Adam's step counter advances once a parameter", counted_once_a_parameter, {
        "one counter": test_optimizers.test_one_counter_for_all_parameters,
        "blocks": small_blocks,
    }),
    Bug(17, "a bucket that never completes is forgotten", incomplete_buckets_are_forgotten, {
        "unused": lambda: test_data_parallel.test_an_unused_parameter_is_an_error_that_names_it_and_its_bucket(25.0),
        "zeros": lambda: test_data_parallel.test_an_unused_parameter_may_take_part_as_zeros(1e-4),
    }),
    Bug(20, "a request is never waited for, a send has no partner", nothing_is_looked_for_at_the_end, {
        "unmatched": test_simulated.test_a_send_that_nobody_received,
        "unwaited send": lambda: test_simulated.test_a_request_that_nobody_waited_for("send", 8),
        "unwaited work": lambda: test_simulated.test_a_request_that_nobody_waited_for("work", 0),
    }),
    Bug(23, "the sum depends on where buckets end", ordered_is_a_ring, {
        "buckets": test_ordered.test_the_bits_of_a_sum_do_not_depend_on_the_buckets,
        "data parallel": lambda: test_data_parallel.test_any_data_to_the_bit_in_rank_order(3, 1e-4, 0),
    }),
]  # fmt: skip

# Wrong programs on a right library: the check itself must be red.
WRONG_PROGRAMS = {"4: the mean of means over ragged shards": ragged_means}

assert np.all(np.diff([bug.number for bug in BUGS]) > 0)
