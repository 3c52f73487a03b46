"""Phantom arrays behave like arrays as far as shapes go, and refuse everything that needs values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.base.errors import UsageError
from minidist.base.phantom import Phantom
from minidist.collectives import all_reduce
from minidist.comm import SimWorld


@given(st.integers(0, 20), st.integers(-25, 25), st.integers(-25, 25))
def test_slices_have_the_shapes_of_numpys(size, start, stop):
    real, phantom = np.empty((size, 3), np.float32), Phantom((size, 3), np.float32)
    assert phantom[start:stop].shape == real[start:stop].shape
    assert phantom[start:stop].nbytes == real[start:stop].nbytes
    assert phantom.reshape(-1).shape == real.reshape(-1).shape
    assert len(phantom) == size


def test_sums_and_assignments_check_shapes_and_keep_the_dtype():
    a, b = Phantom(6, np.float16), Phantom(6, np.float16)
    assert np.add(a, b, out=a) is a
    a /= np.float16(3)
    assert (a + b).dtype == np.float16
    assert np.empty_like(a, shape=(2, 5)).shape == (2, 5)
    a[2:4] = b[:2]
    with pytest.raises(ValueError, match="shape"):
        a[2:4] = b[:3]
    with pytest.raises(ValueError, match="add"):
        np.add(a[:2], b[:2], out=a)
    with pytest.raises(ValueError):
        a + b[:4]
    with pytest.raises(ValueError, match="reshape"):
        a.reshape(4, 2)


def test_what_needs_values_is_refused():
    for attempt in (lambda: Phantom(3)[1], lambda: np.asarray(Phantom(3)), lambda: Phantom(3).view(np.uint8)):
        with pytest.raises(UsageError, match="phantom"):
            attempt()
    with pytest.raises(UsageError, match="checks=False"):
        SimWorld(2).run(lambda comm: all_reduce(comm, Phantom(8), async_op=True).wait())
