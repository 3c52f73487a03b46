"""The dynamic loss scale against the rules of Megatron-LM's, and optimizers with masters against float32 ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.base.half import named_dtype
from minidist.core.base.arrays import downcast
from minidist.core.base.errors import UsageError
from minidist.core.optim import AdamW
from minidist.optim import (
    SGD,
    Adagrad,
    DynamicLossScaler,
    LossScaleError,
    ParameterSlice,
    RMSProp,
    StaticLossScaler,
    clip_grad_norm_,
)
from minidist.optim.adam import Adam
from tests.cases import each

FLOAT16 = np.dtype(np.float16)


def test_a_static_scale_stays_and_counts_what_is_skipped():
    scaler = StaticLossScaler(1024.0)
    for overflow in [True] * 5 + [False] * 5000 + [True]:
        scaler.update(overflow)
    assert (scaler.scale, scaler.skipped) == (1024.0, 6)
    other = StaticLossScaler(1024.0)
    other.load_state_dict(scaler.state_dict())
    assert other.skipped == 6


def scales(overflows, interval, hysteresis, floor, initial):
    """The rules once more, in other words: runs of good steps, and overflows since the last growth."""
    scale, good, bad, result = initial, 0, 0, []
    for overflow in overflows:
        if overflow:
            good, bad = 0, bad + 1
            scale = max(scale / 2, floor) if bad >= hysteresis else scale
        else:
            good += 1
            if good % interval == 0:
                scale, good, bad = scale * 2, 0, 0
        result.append(scale)
    return result


@given(
    overflows=st.lists(st.booleans(), max_size=60),
    interval=st.integers(1, 5),
    hysteresis=st.integers(1, 3),
    floor=st.sampled_from([1.0, 2.0**-3]),
    initial=st.sampled_from([1.0, 2.0**16]),
    stop=st.integers(0, 60),
)
def test_the_scale_follows_the_rules_and_a_checkpoint_changes_nothing(
    overflows, interval, hysteresis, floor, initial, stop
):
    def make():
        return DynamicLossScaler(
            initial, growth_interval=interval, hysteresis=hysteresis, floor=floor, floor_limit=10**6
        )

    scaler, seen = make(), []
    for i, overflow in enumerate(overflows):
        if i == stop:
            state, scaler = scaler.state_dict(), make()
            scaler.load_state_dict(state)
        scaler.update(overflow)
        seen.append(scaler.scale)
    assert seen == scales(overflows, interval, hysteresis, floor, initial)
    assert scaler.skipped == sum(overflows)


def test_it_says_so_when_the_smallest_scale_is_too_large():
    scaler = DynamicLossScaler(4.0, hysteresis=1, floor=1.0, floor_limit=3)
    for _ in range(4):  # 4, 2, 1, and one overflow down there
        scaler.update(True)
    scaler.update(False)  # in between one that fits: the count begins anew
    for _ in range(2):
        scaler.update(True)
    with pytest.raises(
        LossScaleError, match=r"3 steps in a row at the smallest loss scale, 1; .* lower the learning rate"
    ):
        scaler.update(True)


def deepspeeds_scale(overflows, window, shift, floor, initial):
    """DeepSpeed's DynamicLossScaler.update_scale: the scale after each step, and "raised" where it stops."""
    scale, hysteresis, last = initial, shift, -1
    for step, overflow in enumerate(overflows):
        if not overflow:
            stable = step - last - 1
            if stable > 0 and stable % window == 0:
                scale, hysteresis = scale * 2, shift
        elif shift == 1 or hysteresis == 1:
            if scale == floor:
                yield "raised"
                return
            scale, last = max(scale / 2, floor), step
        else:
            hysteresis, last = hysteresis - 1, step
        yield scale


@given(
    runs=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=12),
    shift=st.integers(1, 3),
    initial=st.sampled_from([1.0, 4.0, 2.0**5]),
)
def test_with_a_limit_of_one_the_error_at_the_floor_is_deepspeeds(runs, shift, initial):
    """Windows longer than any run of good steps: after an overflow DeepSpeed counts them from 0, Megatron-LM from 1."""
    overflows = [kind for good, bad in runs for kind in [False] * good + [True] * bad]
    scaler = DynamicLossScaler(initial, growth_interval=100, hysteresis=shift, floor_limit=1)
    for overflow, expected in zip(overflows, deepspeeds_scale(overflows, 100, shift, 1.0, initial), strict=False):
        if expected == "raised":
            with pytest.raises(LossScaleError, match="1 steps in a row"):
                scaler.update(overflow)
            return
        scaler.update(overflow)
        assert scaler.scale == expected


def test_a_state_that_lacks_something_is_one_sentence():
    state = DynamicLossScaler().state_dict()
    del state["patience"]
    with pytest.raises(UsageError, match="lacks 'patience'"):
        DynamicLossScaler().load_state_dict(state)


OPTIMIZERS = [
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (Adagrad, {"lr": 0.1}),
    (RMSProp, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (AdamW, {"lr": 0.01}),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=lambda x: getattr(x, "__name__", ""))
def test_masters_are_the_float32_optimizer_and_the_parameters_are_masters_rounded(kind, settings, dtype):
    """More than one block of 64 K elements; a loss scale, and clipping, on the way."""
    half, scale, limit = named_dtype(dtype), 2.0**10, 0.5
    draw = np.random.default_rng(0)
    values = draw.normal(size=70_000).astype(half)
    small, whole = ParameterSlice(values.copy(), None, "w"), ParameterSlice(values.astype(np.float32), None, "w")
    ours, theirs = kind([small], **settings), kind([whole], **settings)
    for _ in range(3):
        small.grad = (draw.normal(size=values.size) * scale / 300).astype(half)
        stored = small.grad.copy()
        whole.grad = small.grad.astype(np.float32)
        ours.grad_scale = 1 / scale
        norm = clip_grad_norm_(small, limit, ours)
        coefficient = limit / (norm + 1e-6)
        assert norm == pytest.approx(np.linalg.norm(whole.grad.astype(np.float64)) / scale)
        assert coefficient < 1
        whole.grad *= np.float32(coefficient / scale)
        ours.step()
        theirs.step()
        # The gradient is scaled while it is read, never in its memory.
        assert np.array_equal(small.grad.view(np.uint16), stored.view(np.uint16))
        assert ours.grad_scale == 1.0
        assert np.array_equal(ours.state["w"]["master"], whole.data)
        assert np.array_equal(small.data.view(np.uint16), downcast(whole.data, half).view(np.uint16))
        for name, array in theirs.state["w"].items():
            assert np.array_equal(ours.state["w"][name], array)


def test_steps_below_the_last_digit_add_up_in_the_master():
    """1 + 1,000 x 1e-4 is 1.1; float16 has nothing between 1 and 1.001."""
    weight = ParameterSlice(np.ones(4, FLOAT16), np.full(4, -1.0, FLOAT16), "w")
    optimizer = SGD([weight], lr=1e-4)
    for _ in range(1000):
        optimizer.step()
    assert np.allclose(weight.data.astype(float), 1.1, atol=1e-3)
    alone = np.ones(4, FLOAT16)
    for _ in range(1000):
        alone += np.float16(1e-4)
    assert alone[0] == 1


def test_a_state_dict_with_masters_goes_on_with_the_same_bits():
    draw = np.random.default_rng(1)
    gradients = [draw.normal(size=100).astype(FLOAT16) for _ in range(4)]

    def run(steps, weight, optimizer):
        for gradient in gradients[steps]:
            weight.grad = gradient
            optimizer.step()

    weight = ParameterSlice(np.ones(100, FLOAT16), None, "w")
    optimizer = AdamW([weight], lr=0.01)
    run(slice(0, 2), weight, optimizer)
    other = ParameterSlice(weight.data.copy(), None, "w")
    resumed = AdamW([other], lr=0.01)
    resumed.load_state_dict(optimizer.state_dict())
    run(slice(2, 4), weight, optimizer)
    run(slice(2, 4), other, resumed)
    assert np.array_equal(optimizer.state["w"]["master"], resumed.state["w"]["master"])
    assert np.array_equal(weight.data, other.data)
    state = optimizer.state_dict()
    del state["state"]["w"]["master"]
    with pytest.raises(UsageError, match=r"needs.*master"):
        AdamW([other], lr=0.01).load_state_dict(state)


def test_gradients_of_a_wrong_dtype_are_refused():
    weight = ParameterSlice(np.ones(4, np.float32), np.ones(4, FLOAT16), "w")
    with pytest.raises(UsageError, match=r"float32 and gradient .* float16"):
        SGD([weight]).step()


def test_the_floor_is_a_power_of_two_because_the_scale_stops_there():
    with pytest.raises(UsageError, match=r"floor 0.1 is not a power of two, so unscaling would lose bits; use 0.125"):
        DynamicLossScaler(floor=0.1)
    assert DynamicLossScaler(floor=0.125).floor == 0.125


@each(
    ("settings", "words"),
    [
        ({"initial_scale": float("nan")}, "initial_scale=nan; it must be a finite number above 0"),
        ({"initial_scale": True}, "initial_scale=True; it must be a finite number above 0"),
        ({"floor": 0}, "floor=0; it must be a finite number above 0"),
        ({"initial_scale": float("inf")}, "initial_scale=inf; it must be a finite number above 0"),
        ({"initial_scale": 1000.0}, "not a power of two.*1024"),
        ({"growth_interval": 0}, "growth_interval=0; it must be a whole number of at least 1"),
        ({"growth_interval": 2.5}, "growth_interval=2.5; it must be a whole number"),
        ({"hysteresis": True}, "hysteresis=True; it must be a whole number"),
        ({"growth_factor": 1}, "growth_factor 1 must be above 1"),
        ({"backoff_factor": 2}, "backoff_factor 2 between 0 and 1"),
        ({"initial_scale": 0.5}, "initial_scale 0.5 must not be below the floor 1"),
        ({"initial_scale": 1, "floor": 2}, "initial_scale 1 must not be below the floor 2"),
    ],
)
def test_wrong_settings_of_a_scaler(settings, words):
    with pytest.raises(UsageError, match=words):
        DynamicLossScaler(**settings)
