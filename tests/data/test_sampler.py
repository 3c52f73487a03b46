"""The global batch does not know the ranks: any split of it is the same batch, and an epoch is every sample once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.core.base.errors import UsageError
from minidist.data import GlobalBatchSampler, TokenDataset, glyphs, microbatch_numbers, microbatch_rows

CONTEXT = 4


def sampler(samples=10, global_batch=6, seed=0):
    """Sample i begins with token i * CONTEXT."""
    tokens = TokenDataset("numbers", np.arange(samples * CONTEXT + 1), samples * CONTEXT + 1)
    return GlobalBatchSampler(tokens, global_batch, CONTEXT, seed)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 20))
def test_ranks_together_have_the_global_batch(replicas, accumulation, micro_batch, step):
    total = replicas * accumulation * micro_batch
    whole = sampler(global_batch=total)
    inputs, targets = whole.batch(step, 0, total)
    parts = []
    for replica in range(replicas):
        own = sampler(global_batch=total)  # each rank has its own sampler
        for number in microbatch_numbers(replica, accumulation):
            parts.append(own.batch(step, *microbatch_rows(number, micro_batch, total)))
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), inputs)
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), targets)


@pytest.mark.parametrize("ranks", [2, 64])
def test_ranks_together_look_up_each_row_once(ranks, monkeypatch):
    """A rank that looked up the whole batch would take a time that grows with the square of the number of ranks."""
    looked_up, indices = [], GlobalBatchSampler._indices
    monkeypatch.setattr(
        GlobalBatchSampler, "_indices", lambda self, places: looked_up.extend(places) or indices(self, places)
    )
    for rank in range(ranks):
        sampler(global_batch=3 * ranks).batch(1, 3 * rank, 3)
    assert looked_up == list(range(3 * ranks, 6 * ranks))


@given(samples=st.integers(1, 30), global_batch=st.integers(1, 40), seed=st.integers(0, 5))
def test_every_epoch_has_every_sample_once(samples, global_batch, seed):
    """Laid end to end, also when a batch is longer than an epoch or does not divide it."""
    one = sampler(samples, global_batch, seed)
    steps = -(-3 * samples // global_batch)
    stream = np.concatenate([one.sample_indices(step) for step in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_the_order_depends_on_seed_and_epoch_alone():
    """Asked for out of order, after others, by another object: the same numbers."""
    one, same, other = sampler(100, 100), sampler(100, 100), sampler(100, 100, seed=1)
    late = same.sample_indices(7)
    steps = [one.sample_indices(step) for step in range(8)]
    np.testing.assert_array_equal(late, steps[7])
    np.testing.assert_array_equal(same.sample_indices(0), steps[0])
    assert not np.array_equal(steps[0], steps[1])
    assert not np.array_equal(steps[0], other.sample_indices(0))
    state = np.random.get_state()[1].copy()  # noqa: NPY002, the process-wide generator is left alone
    sampler(100, 100).sample_indices(3)
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def test_targets_are_the_inputs_one_token_later():
    inputs, targets = sampler().batch(0, 0, 6)
    assert inputs.shape == targets.shape == (6, CONTEXT)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.flags.c_contiguous
    np.testing.assert_array_equal(targets, inputs + 1)
    np.testing.assert_array_equal(inputs[:, 0] % CONTEXT, 0)


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 30))
def test_the_last_micro_batch_is_ragged(number, micro_batch, global_batch):
    first, rows = microbatch_rows(number, micro_batch, global_batch)
    expected = range(global_batch)[number * micro_batch : (number + 1) * micro_batch]
    assert list(range(first, first + rows)) == list(expected)


def test_samples_with_labels():
    data = glyphs(50)
    inputs, targets = GlobalBatchSampler(data, 8, 1, 0).batch(0, 2, 3)
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((3, 144), np.float32, np.int64)
    indices = GlobalBatchSampler(data, 8, 1, 0).sample_indices(0)[2:5]
    np.testing.assert_array_equal(inputs, data.inputs[indices].reshape(3, -1))
    np.testing.assert_array_equal(targets, data.targets[indices])


def test_rows_outside_the_batch_are_an_error():
    with pytest.raises(ValueError, match="rows 4 to 7 of a global batch of 6"):
        sampler().batch(0, 4, 3)
    with pytest.raises(UsageError, match="global batch 0"):
        sampler(global_batch=0)


@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_shorter_than_one_sample_is_an_error(tokens):
    data = TokenDataset("text:short.txt", np.zeros(tokens, np.uint8), 256)
    with pytest.raises(UsageError, match=f"text:short.txt has {tokens} tokens, fewer than one sample of context 64"):
        GlobalBatchSampler(data, 1, 64, 0)
    if tokens == 64:
        assert GlobalBatchSampler(data, 1, 63, 0).samples == 1  # what the message proposes


@given(size=st.integers(2, 40), context=st.integers(1, 39))
def test_every_sample_is_whole_and_none_is_forgotten(size, context):
    data = TokenDataset("numbers", np.arange(size), size)
    if size <= context:
        return
    count = data.samples(context)
    inputs, targets = data.rows(np.arange(count), context)
    np.testing.assert_array_equal(inputs.ravel(), np.arange(count * context))
    np.testing.assert_array_equal(targets, inputs + 1)
    assert (count + 1) * context + 1 > size  # one more would not fit
