"""Bugs of split layers, planted: the tests of equality must turn red for each."""

import pytest

from minidist.base.errors import MismatchError
from minidist.parallel.tensor import linear, replicas, sequence, shards, vocabulary
from tests.parallel import test_tensor as right


def test_bug_7_a_row_parallel_bias_added_on_every_rank(monkeypatch):
    """The bias goes into the product of each rank, so the sum holds it t times."""

    def forward(self, x):
        y = linear.linear(x, self.weight, self.bias, None, self.weight_is_in_out)
        return linear.reduce_from_tensor_parallel_region(y, self.comm)

    monkeypatch.setattr(linear.RowParallelLinear, "forward", forward)
    with pytest.raises(AssertionError):
        right.test_column_and_row_parallel_layers_are_exact_on_integers(2, False)


def test_bug_8_a_fused_qkv_cut_contiguously(monkeypatch):
    """Rank 0 gets Q and half of K: every shape fits, and so do the gathered weights, since joining undoes the cut."""
    cut, join = shards.cut, shards.join
    plain = lambda layout: shards.Layout(layout.global_shape, layout.axes, layout.dims, padding=layout.padding)  # noqa: E731
    monkeypatch.setattr(shards, "cut", lambda array, layout, rank, ranks: cut(array, plain(layout), rank, ranks))
    monkeypatch.setattr(shards, "join", lambda tiles, layout: join(tiles, plain(layout)))
    with pytest.raises(AssertionError, match="step 0: loss"):
        right.assert_gpt(2, "sgd")


@pytest.mark.parametrize("words", [8, 7])
def test_bug_9_vocabulary_ranges_off_by_one_at_the_end(monkeypatch, words):
    """The last word of each range is taken for a stranger; with a vocabulary that divides and one that does not."""
    correct = vocabulary.vocab_range

    def short(size, rank, ranks):
        first, last = correct(size, rank, ranks)
        return first, max(first, last - 1)

    monkeypatch.setattr(vocabulary, "vocab_range", short)
    with pytest.raises(AssertionError):
        right.test_the_embedding_is_exact_for_every_word(2, words)
    with pytest.raises(AssertionError):
        right.test_vocab_parallel_cross_entropy(2, 12, False)


def test_bug_9_the_padding_takes_part_in_the_softmax(monkeypatch):
    correct = vocabulary.vocab_range
    monkeypatch.setattr(
        vocabulary, "vocab_range", lambda size, rank, ranks: correct(vocabulary.padded_vocab_size(size, ranks), rank, ranks)
    )
    with pytest.raises(AssertionError):
        right.test_vocab_parallel_cross_entropy(4, 5, False)


def test_bug_12_layer_norm_gradients_are_not_reduced_under_sequence_parallel(monkeypatch):
    """Every rank keeps the sum over its own rows; the loss falls all the same."""
    monkeypatch.setattr(sequence, "copy_to_tensor_parallel_region", lambda x, comm: x)
    with pytest.raises(AssertionError, match=r"gradients transformer\.(wpe|h\.0\.ln_1)\.weight"):
        right.assert_gpt(2, "sgd", sequence_parallel=True)


def test_bug_12_row_parallel_bias_gradients_are_not_reduced_either(monkeypatch):
    original = linear.copy_to_tensor_parallel_region
    monkeypatch.setattr(
        linear, "copy_to_tensor_parallel_region", lambda x, comm: x if x.ndim == 1 else original(x, comm)
    )
    with pytest.raises(AssertionError, match=r"gradients transformer\.h\.0\.attn\.c_proj\.bias"):
        right.assert_gpt(2, "sgd", sequence_parallel=True)


def test_bug_11_the_norm_of_a_ranks_own_tiles(monkeypatch):
    monkeypatch.setattr(replicas, "all_reduce", lambda comm, array: array)
    with pytest.raises(AssertionError):
        right.test_the_clip_norm_counts_every_global_element_once(2, False)


def test_bug_11_replicated_parameters_counted_once_a_rank(monkeypatch):
    monkeypatch.setattr(replicas, "_cut_over", lambda parameter: (("tp",), 1))
    with pytest.raises(AssertionError):
        right.test_the_clip_norm_counts_every_global_element_once(2, False)


def test_key_value_gradients_of_ranks_that_share_a_head_are_not_summed(monkeypatch):
    """Every holder keeps what its own query heads say, and the copies drift apart."""
    monkeypatch.setattr(linear.ColumnParallelLinear, "_shared", lambda self, parameter: parameter)
    with pytest.raises(MismatchError, match=r"'model\.layers\.0\.self_attn\.k_proj\.weight' .* not the same on rank 1"):
        right.test_fewer_key_value_heads_than_ranks(4, 2, False)
