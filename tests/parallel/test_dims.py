"""Degrees are checked in one place, and what an error proposes fits."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.parallel.fitting_dims import dims_of

degrees = st.integers(1, 4)


@given(pp=degrees, dp=st.none() | degrees, cp=degrees, tp=degrees, ranks=st.integers(1, 24))
def test_the_product_is_the_number_of_ranks_or_a_setting_that_fits_is_named(pp, dp, cp, tp, ranks):
    asked = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    try:
        assert dims_of(ranks, **asked).ranks == ranks
        return
    except UsageError as error:
        text = str(error)
    assert f"{ranks} ranks" in text
    assert ("is missing" in text) == (ranks % (pp * (dp or 1) * cp * tp) == 0)
    flags = re.findall(r"--(\w+) (\d+)", text.partition(";")[2])
    starts = re.findall(r"start (\d+) ranks", text)
    assert 1 <= len(flags) + len(starts) <= 2
    for name, degree in flags:
        assert dims_of(ranks, **{**asked, name: int(degree)}).ranks == ranks
    for start in starts:
        assert dims_of(int(start), **asked).ranks == int(start)


def test_an_expert_parallel_degree_divides_the_data_parallel_one():
    assert dims_of(8, tp=2, ep=2).edp == 2
    with pytest.raises(UsageError, match=r"--ep 3 does not divide --dp 4.*--ep 2 or --ep 4, or --dp 6"):
        dims_of(4, ep=3)


def test_tensor_parallel_ranks_are_neighbours():
    def main(comm):
        axes = dims_of(comm.size, pp=2, dp=2, tp=2, ep=2).axes(comm)
        return {name: axes[name].members for name in ("pp", "dp", "cp", "tp", "ep", "data", "expert_data")}

    of_rank_5 = SimWorld(8).run(main)[5]
    assert of_rank_5 == {
        "pp": [1, 5],
        "dp": [5, 7],
        "cp": [5],
        "tp": [4, 5],
        "ep": [5, 7],
        "data": [5, 7],
        "expert_data": [5],
    }


def test_one_axis_is_the_communicator_itself():
    for ranks in (1, 3):
        assert SimWorld(ranks).run(lambda comm: dims_of(comm.size).axes(comm).data is comm) == [True] * ranks
