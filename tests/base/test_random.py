"""Draws depend on key and counter, not on who draws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.base.coordinates import Key, batch_coordinates, current_coordinates, normal, uniform, uniform_rows
from minidist.core.base.random import initial_weight
from minidist.nn.ops.checkpoint import replay_calls, snapshot_calls

KEY = Key(1, "test", 2, "layer", 3)


def test_the_stream_is_philox_with_the_128_bits_of_the_key():
    expected = np.random.Generator(np.random.Philox(key=KEY.generate_state())).standard_normal((5, 7))
    np.testing.assert_array_equal(normal(KEY, (5, 7)), expected)


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 40), count=st.integers(0, 20))
def test_skipping_equals_drawing(start, count):
    np.testing.assert_array_equal(uniform(KEY, start, count), uniform(KEY, 0, 60)[start : start + count])


def test_rows_are_slices_of_the_global_array():
    whole = uniform_rows(KEY, 0, 9, (2, 3))
    np.testing.assert_array_equal(uniform_rows(KEY, 4, 3, (2, 3)), whole[4:7])
    assert whole.min() >= 0
    assert whole.max() < 1


def test_every_part_of_the_key_matters():
    keys = [
        KEY,
        Key(2, "test", 2, "layer", 3),
        Key(1, "other", 2, "layer", 3),
        Key(1, "test", 3, "layer", 3),
        Key(1, "test", 2, "layers", 3),
        Key(1, "test", 2, "layer", 4),
    ]
    assert len({uniform(key, 0, 1)[0] for key in keys}) == len(keys)
    np.testing.assert_array_equal(normal(KEY, (3, 2)), normal(Key(1, "test", 2, "layer", 3), (3, 2)))


def test_initial_weight_laws():
    assert initial_weight(0, "w", (200, 50), "normal", 0.1).std() == pytest.approx(0.1, rel=0.05)
    assert np.abs(initial_weight(0, "w", (200, 50), "uniform", 0.1)).max() <= 0.1
    np.testing.assert_array_equal(initial_weight(0, "w", (2,), "constant", 1.0), [1, 1])
    assert not np.array_equal(initial_weight(0, "w", (4,), "normal", 1)[:2], initial_weight(0, "w", (2,), "normal", 1))
    with pytest.raises(ValueError, match="unknown law 'cauchy' of the initial weight 'w'"):
        initial_weight(0, "w", (2,), "cauchy", 1.0)


def test_a_scale_may_be_an_array_and_a_law_that_is_no_name_is_refused():
    np.testing.assert_array_equal(initial_weight(0, "w", (2, 2), "constant", np.array([1.0, 2.0])), [[1, 2], [1, 2]])
    with pytest.raises(ValueError, match=r"unknown law \['normal'\] of the initial weight"):
        initial_weight(0, "w", (2,), ["normal"], 1.0)


def test_coordinates_count_calls_and_replay_them():
    with pytest.raises(ValueError, match="batch_coordinates"):
        current_coordinates()
    assert snapshot_calls() is None
    with replay_calls(None), batch_coordinates(5, 7) as outer:
        assert (outer.step, outer.sample_offset) == (5, 7)
        assert [outer.next_call("a") for _ in range(2)] == [0, 1]
        calls = snapshot_calls()
        assert current_coordinates().next_call("a") == 2
        with replay_calls(calls):
            assert current_coordinates().step == 5
            assert current_coordinates().next_call("a") == 2
        assert current_coordinates().next_call("a") == 3
        with batch_coordinates(6):
            assert current_coordinates().next_call("a") == 0
