"""Bugs of the memory family, planted: the tests of equality, bytes and memory must turn red for each."""

from contextlib import nullcontext
from importlib import import_module

import pytest

from minidist.autograd.parameter import ParameterUse
from minidist.base.errors import MinidistError
from minidist.comm import SimWorld
from minidist.optim import AdamW, clip_grad_norm_
from minidist.parallel import shards, zero
from minidist.parallel.fully_shard import Unit
from minidist.train import resume
from tests.checkpoint import test_directory, test_resume
from tests.nn import test_recompute
from tests.parallel import test_fully_shard, test_zero
from tests.parallel.models import assert_same, one_device
from tests.train import test_sharded

checkpoint_module = import_module("minidist.autograd.checkpoint")  # the package has a function of that name


def reference(ranks, clip=0.3):
    return one_device(lambda flat: AdamW(flat, lr=0.01, weight_decay=0.1), ranks, 2, False, clip=clip)


def test_bug_11_the_clip_norm_of_the_local_shard(monkeypatch):
    """Each rank clips by the norm of what it owns."""
    monkeypatch.setattr(zero, "clip_shards_", lambda comm, parts, limit: [clip_grad_norm_(p, limit) for p in parts])
    result = test_zero.SimWorld(3).run(test_zero.zero, 1, clip=0.3)[0]
    with pytest.raises(AssertionError):
        assert_same(result, reference(3))


def test_bug_11_replicated_elements_counted_once_a_rank(monkeypatch):
    """Every rank contributes the blocks of the same shard."""
    right = shards.all_gather

    def repeated(comm, array, **keywords):
        whole = right(comm, array, **keywords)
        return whole if array.dtype.itemsize == 4 else whole.reshape(comm.size, -1)[[0] * comm.size].reshape(-1)

    monkeypatch.setattr(shards, "all_gather", repeated)
    result = test_zero.SimWorld(3).run(test_zero.zero, 1, clip=0.3)[0]
    with pytest.raises(AssertionError):
        assert_same(result, reference(3))


def test_bug_10_accumulated_gradients_divided_again(monkeypatch):
    """The mean over ranks although each loss has the global divisor already."""
    right = zero.ShardReducer.__init__
    monkeypatch.setattr(zero.ShardReducer, "__init__", lambda self, *a, **k: right(self, *a, **{**k, "op": "avg"}))
    result = test_zero.SimWorld(3).run(test_zero.zero, 1, clip=0.3)[0]
    with pytest.raises(AssertionError):
        assert_same(result, reference(3))


def test_bug_19_full_weights_kept_alive_by_the_graph(monkeypatch):
    """A node keeps the array that its forward read: gathers and releases go on, and the memory never falls."""
    right = ParameterUse.__init__

    def keeps(self, parameter, version):
        right(self, parameter, version)
        kept.append(parameter._data)

    kept = []
    monkeypatch.setattr(ParameterUse, "__init__", keeps)
    with pytest.raises(AssertionError, match="unsharded"):
        test_fully_shard.check_peaks(2, 0)


def test_bug_19_released_one_unit_late(monkeypatch):
    """The average is right, the peak is not."""
    previous = []

    def late(self):
        previous.append(self.flat.release() if not self.flat.released else None)
        del previous[:-1]

    monkeypatch.setattr(Unit, "release", late)
    with pytest.raises(AssertionError, match="unsharded"):
        test_fully_shard.check_peaks(2, 0)


def test_the_micro_batches_of_a_unit_added_before_they_are_summed_over_ranks():
    """Another order of additions than the declared one: stage 3 is not DDP with no_sync."""
    result = test_fully_shard.SimWorld(3).run(test_fully_shard.train)[0]
    with pytest.raises(AssertionError):
        assert_same(result, reference(3, clip=None))


def test_bug_16_rank_0_alone_saves(tmp_path):
    """Whoever leaves the others out of a save is told at once who waits for whom."""

    def save_alone(comm):
        if comm.rank == 0:
            test_directory.write(comm, tmp_path, 1)

    with pytest.raises(MinidistError, match="barrier"):
        SimWorld(2).run(save_alone)


def test_bug_16_the_state_of_another_rank(tmp_path, monkeypatch):
    """Every rank restores the optimizer state of rank 0's elements."""
    right = resume._state
    monkeypatch.setattr(resume, "_state", lambda checkpoint, p, start, stop: right(checkpoint, p, 0, stop - start))
    with pytest.raises(AssertionError):
        test_resume.test_the_next_steps_have_the_bits_of_the_uninterrupted_run(2, 4, tmp_path)


def test_bug_14_recomputation_draws_a_new_dropout_mask(monkeypatch):
    """The replay counts its draws on from where the forward stopped."""
    monkeypatch.setattr(checkpoint_module, "replay_calls", lambda calls: nullcontext())
    for check in (
        lambda: test_recompute.test_gradients_have_the_same_bits_with_dropout("full"),
        lambda: test_sharded.test_recomputation_is_equal_bit_for_bit("full", 3),
    ):
        with pytest.raises(AssertionError):
            check()
