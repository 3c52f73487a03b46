"""An exchange of torch sends rows of its input and receives rows of its output. Needs no PyTorch."""

from math import prod
from types import SimpleNamespace

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.collectives import all_to_all
from minidist.debug.torch_ranks.split_sizes import elements, exchange_counts, list_counts, row_of

WIDTH = 2


class Shaped:
    """What is asked of a tensor: its shape, and whether it is complex."""

    def __init__(self, *shape, is_complex=False):
        self.shape, self.dtype = shape, SimpleNamespace(is_complex=is_complex)

    def numel(self):
        return prod(self.shape)

    def dim(self):
        return len(self.shape)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rank_r_gets_from_every_rank_the_rows_that_the_input_s_sizes_give_it(ranks):
    """Rank s sends (s + 1) (r + 2) rows to rank r: no rank's input is split as its output is."""
    rows = [[(s + 1) * (r + 2) for r in range(ranks)] for s in range(ranks)]
    sent = [np.arange(sum(of_rank) * WIDTH) + 1000 * s for s, of_rank in enumerate(rows)]

    def program(comm):
        input_sizes, output_sizes = rows[comm.rank], [of_rank[comm.rank] for of_rank in rows]
        output, source = Shaped(sum(output_sizes), WIDTH), Shaped(sum(input_sizes), WIDTH)
        counts = exchange_counts(output, source, output_sizes, input_sizes, comm.size)
        return counts, all_to_all(comm, sent[comm.rank], send_counts=counts[0], receive_counts=counts[1])

    for r, (counts, received) in enumerate(SimWorld(ranks).run(program)):
        starts = [WIDTH * sum(of_rank[:r]) for of_rank in rows]
        expected = [sent[s][starts[s] : starts[s] + WIDTH * rows[s][r]] for s in range(ranks)]
        assert counts == ([WIDTH * (r + 1) * (k + 2) for k in range(ranks)], [part.size for part in expected])
        assert received.tolist() == np.concatenate(expected).tolist()


@pytest.mark.parametrize(
    ("output_sizes", "input_sizes", "expected"),
    [
        (None, None, (None, None)),
        ([], [], (None, None)),
        ([1, 2, 3], [4, 5, 0], ([20, 25, 0], [2, 4, 6])),
        ([1, 2, 3], None, ([15, 15, 15], [2, 4, 6])),
        (None, [4, 5, 0], ([20, 25, 0], [4, 4, 4])),
    ],
)
def test_a_side_without_sizes_is_split_evenly(output_sizes, input_sizes, expected):
    """The output has 6 rows of 2, the input 9 rows of 5."""
    assert exchange_counts(Shaped(6, 2), Shaped(9, 5), output_sizes, input_sizes, 3) == expected


def test_a_list_of_tensors_is_sent_and_another_one_received():
    outputs, inputs = [Shaped(3), Shaped(2, 2)], [Shaped(7), Shaped(0, 4)]
    assert list_counts(outputs, inputs) == ([7, 0], [3, 4])


def test_a_complex_number_is_two_elements_and_a_tensor_without_axes_is_one_row():
    assert (elements(Shaped(3, 4)), elements(Shaped(3, 4, is_complex=True))) == (12, 24)
    assert [row_of(each) for each in (Shaped(3, 4), Shaped(3, 4, is_complex=True), Shaped(5), Shaped())] == [4, 8, 1, 1]
    assert row_of(Shaped(0, 4)) == 0
    assert exchange_counts(Shaped(2, 3, is_complex=True), Shaped(2, 3), [2, 0], [1, 1], 2) == ([3, 3], [12, 0])
