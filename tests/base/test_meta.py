"""Meta arrays have the shapes, dtypes, views and memory layouts of NumPy's arrays, and no values."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.base import arrays as xp
from minidist.base.meta import MAX_VALUES, MetaArray, creating_meta
from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.core.collectives import all_reduce
from tests.cases import each

SHAPES = [(1,), (4,), (1, 3), (3, 1), (3, 2), (2, 3, 4), (1, 3, 2), (2, 1, 1)]
FLOATS = [np.float16, np.float32, np.float64]


def same(meta, real):
    """Assert that a meta array is like a real one: an array with a shape, or a scalar."""
    assert np.shape(meta) == np.shape(real)
    assert meta.dtype == real.dtype
    if isinstance(real, np.ndarray):
        assert isinstance(meta, MetaArray)
        assert meta.nbytes == real.nbytes
        assert meta.flags.c_contiguous == real.flags.c_contiguous
        assert (meta.base is None) == (real.base is None)
    else:
        assert isinstance(meta, np.generic)


def both(shape, dtype=np.float32):
    """Return a meta array and a real one, of equal layout."""
    return MetaArray(shape, dtype), np.ones(shape, dtype)


UNARY = (
    lambda a: a + 1.5,
    lambda a: -a,
    lambda a: xp.exp(a),
    lambda a: a * np.float64(2),
    lambda a: a > 0,
    lambda a: a.T,
    lambda a: a.T + 1,
    lambda a: a.T.reshape(-1),
    lambda a: a.reshape(-1),
    lambda a: a[:1],
    lambda a: a[..., ::2],
    lambda a: a[None],
    lambda a: a[0],
    lambda a: a[np.array([0, 0])],
    lambda a: a[np.ones(a.shape[0], bool)],
    lambda a: a.sum(),
    lambda a: a.sum(axis=-1),
    lambda a: a.sum(axis=0, keepdims=True),
    lambda a: a.max(axis=-1),
    lambda a: a.mean(axis=0),
    lambda a: np.add.reduce(a, axis=0),
    lambda a: a.astype(np.float64),
    lambda a: a.T.astype(np.float64),
    lambda a: a.copy(),
    lambda a: a.view(),
    lambda a: xp.swapaxes(a, 0, -1),
    lambda a: xp.moveaxis(a, 0, -1),
    lambda a: xp.broadcast_to(a, (2, *a.shape)),
    lambda a: xp.empty_like(a),
    lambda a: xp.zeros_like(a.T),
    lambda a: xp.zeros((2, 3), np.float16, a),
    lambda a: xp.concatenate([a, a], axis=0),
    lambda a: xp.stack([a, a], axis=1),
    lambda a: xp.take(a, np.array([[0, 0, 0]]), axis=0),
    lambda a: xp.where(a > 0, a, a * 2),
    lambda a: xp.isfinite(a),
    lambda a: xp.array(a),
    lambda a: xp.as_rows(a),
)


@each("number", range(len(UNARY)))
def test_functions_of_one_array_give_what_numpy_gives(number):
    for shape, dtype in product(SHAPES, FLOATS):
        meta, real = both(shape, dtype)
        same(UNARY[number](meta), UNARY[number](real))


@each(("shape", "first", "second"), [*product(SHAPES, FLOATS, FLOATS)])
def test_functions_of_two_arrays_give_what_numpy_gives(shape, first, second):
    (a, real_a), (b, real_b) = both(shape, first), both(shape[-1:], second)
    same(a + b, real_a + real_b)
    same(xp.maximum(a, b), xp.maximum(real_a, real_b))
    (c, real_c) = both((shape[-1], 5), second)
    same(a @ c, real_a @ real_c)
    same(xp.matmul(a, c), xp.matmul(real_a, real_c))
    same(a.T + a.T, real_a.T + real_a.T)


def test_in_place_operations_keep_the_array_and_check_shapes():
    a, b = MetaArray(6, np.float16), MetaArray(6, np.float16)
    assert np.add(a, b, out=a) is a
    kept = a
    a /= np.float16(3)
    assert a is kept
    a[2:4] = b[:2]
    xp.copyto(a, b)
    for attempt in (
        lambda: a.__setitem__(slice(2, 4), b[:3]),
        lambda: np.add(a, b, out=a[:2]),
        lambda: a + b[:4],
        lambda: a.reshape(4, 2),
        lambda: MetaArray((2, 3)) @ MetaArray((4, 5)),
    ):
        with pytest.raises(ValueError, match=r"shape|broadcast"):
            attempt()


def test_values_are_one_and_true():
    a = MetaArray((3,), np.float32)
    assert float(xp.sqrt((a * a).sum())) == 1.0
    assert bool(xp.isfinite(a).all())
    assert xp.array_equal(a, MetaArray((3,)))
    assert np.asarray(a).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(UsageError, match="has no values"):
        np.asarray(MetaArray(MAX_VALUES + 1))
    with pytest.raises(UsageError, match=r"numpy\.roll has no rule for meta arrays"):
        np.roll(a, 1)


def test_an_array_that_no_machine_could_hold():
    a = MetaArray((10**6, 10**6), np.float32)
    b = (a.T + 1)[:5] @ a
    assert (a.nbytes, b.shape) == (4 * 10**12, (5, 10**6))


def test_new_arrays_are_meta_in_the_block_and_indices_are_real():
    with creating_meta():
        assert isinstance(xp.zeros(3, np.float32), MetaArray)
        assert isinstance(xp.full((2, 2), 7.0, np.float64), MetaArray)
        assert isinstance(xp.zeros(3, np.int64), np.ndarray)
        assert isinstance(xp.zeros(3, np.float32, like=np.ones(1)), np.ndarray)
    assert isinstance(xp.zeros(3, np.float32), np.ndarray)


def test_messages_of_meta_arrays_have_the_bytes_of_real_ones():
    sent = []
    for make in (MetaArray, np.ones):
        world = SimWorld(3, checks=False)
        world.run(lambda comm, make=make: all_reduce(comm, make(1000, np.float32)))
        sent.append(([trace.bytes_by_purpose() for trace in world.traces], world.end_time))
    assert sent[0] == sent[1]
    assert sent[0][1] > 0


@st.composite
def indexed(draw):
    """A shape, and an index with at least one index array or mask."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    parts, axis, arrays, dots = [], 0, 0, False
    extent = draw(st.sampled_from([1, 3]))
    while axis < len(shape):
        kind = draw(st.sampled_from(["slice", "int", "array", "mask", "none", "dots", "array"]))
        length = shape[axis]
        if kind == "slice":
            parts.append(slice(draw(st.integers(0, length)), None, draw(st.sampled_from([1, 2, None]))))
        elif kind == "int":
            parts.append(draw(st.integers(0, length - 1)))
        elif kind == "array":
            parts.append(np.zeros(draw(st.sampled_from([(extent,), (1,), (2, extent)])), int))
            arrays += 1
        elif kind == "mask" and draw(st.booleans()) and axis + 1 < len(shape):
            mask = np.zeros(shape[axis : axis + 2], bool)
            mask.reshape(-1)[0] = True
            parts.append(mask)
            axis += 1
            arrays += 1
        elif kind == "none":
            parts.append(None)
            continue
        elif kind == "dots" and not dots:
            parts.append(Ellipsis)
            dots, axis = True, axis + draw(st.integers(0, len(shape) - axis))
            continue
        elif draw(st.booleans()):
            break
        else:
            parts.append(slice(None))
        axis += 1
    if not arrays:
        parts = [np.zeros(2, int), *[part for part in parts if part is not Ellipsis][1 : len(shape)]]
        parts = [part for part in parts if part is not None]
    return shape, tuple(parts)


@given(indexed())
@settings(max_examples=150)
def test_index_arrays_give_numpys_shape(case):
    shape, index = case
    expected = np.ones(shape, np.float32)[index].shape
    assert MetaArray(shape, np.float32)[index].shape == expected


def test_a_mask_behind_an_ellipsis_copies_nothing():
    """NumPy would copy 2**40 elements to find the shape out."""
    wide = MetaArray((2**20, 2**10, 32, 32), np.float32)
    assert wide[..., np.tri(32, dtype=bool)].shape == (2**20, 2**10, 528)
    wide[..., np.tri(32, dtype=bool)] = 0.0


def test_all_experts_are_chosen_equally_often_in_a_dry_run():
    """Bytes of an expert follow from how many tokens choose it."""
    chosen = MetaArray((12, 4), np.float32).argmax(axis=-1)
    assert np.bincount(chosen, minlength=4).tolist() == [3, 3, 3, 3]


def test_a_sum_of_bools_counts():
    meta, real = both((3, 4), bool)
    for axis in (None, 0):
        same(meta.sum(axis=axis), real.sum(axis=axis))


def test_an_array_that_is_made_read_only_is_the_only_one():
    first, second = MetaArray((3,), np.float32), MetaArray((3,), np.float32)
    first.flags.writeable = False
    assert second.flags.writeable
    assert MetaArray((3,), np.float32).flags.writeable
