"""Bugs of the memory family, planted: the tests of equality, bytes and memory must turn red for each."""

import pytest

from minidist.optim import AdamW, clip_grad_norm_
from minidist.parallel import shards, zero
from tests.parallel import test_zero
from tests.parallel.models import assert_same, one_device


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
