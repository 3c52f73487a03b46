"""The products of a step: each is recorded once per call, and every way to compute it gives the same matrix."""

from collections import Counter

import numpy as np
import pytest

from minidist.core.base import arrays as xp
from minidist.core.nn import GPTConfig
from minidist.report.bench import products as module
from minidist.report.bench.products import Layout, lines, measure_products, recording, ways
from minidist.report.bench.workloads import StepCase, make_model, own_step


def test_products_are_recorded_with_their_layouts():
    honest = xp.matmul
    x, w = np.ones((3, 4), np.float32), np.ones((5, 4), np.float32)
    with recording() as calls:
        for _ in range(2):
            assert np.array_equal(xp.matmul(x, w.T), x @ w.T)
        xp.matmul(x, w[0])  # a vector
    assert xp.matmul is honest
    ((product, seconds),) = calls.items()
    assert product.a == Layout((3, 4), (16, 4), "<f4")
    assert (str(product.a), str(product.b)) == ("3x4", "4x5.T")
    assert len(seconds) == 2


def test_all_ways_compute_one_product():
    rng = np.random.default_rng(0)
    for a, b in (
        (rng.standard_normal((6, 7)), rng.standard_normal((7, 5))),
        (rng.standard_normal((7, 6)).T, rng.standard_normal((5, 7)).T),
        (rng.standard_normal((2, 3, 6, 8)), rng.standard_normal((2, 3, 8, 4))),
    ):
        out = np.empty((*a.shape[:-1], b.shape[-1]))
        for name, way in ways(a, b, out).items():
            out[...] = np.nan
            way()
            if name != "by columns":
                assert np.allclose(out, a @ b), (name, a.shape)


def test_a_gpt_step_has_its_products(monkeypatch):
    monkeypatch.setattr(module, "ROUNDS", 2)
    case = StepCase("small", 2, 1.0, config=GPTConfig(16, 8, 16, 1, 2), length=8)
    found = measure_products(own_step(case, make_model(case)), step_s=1.0)
    calls = Counter()
    for row in found["products"]:
        calls[row["shapes"]] += row["calls"]

    # Per step and linear layer: the output, and the gradients of input and weight.
    for shapes, number in {
        "16x16 @ 16x48": 1,  # qkv: a layer stores its weight as (inputs, outputs)
        "16x48 @ 48x16.T": 1,
        "16x16.T @ 16x48": 1,
        "16x16.T @ 16x64": 1,  # the MLP's first weight
        "64x16.T @ 16x16": 1,  # and its second
    }.items():
        assert calls[shapes] == number, (shapes, calls)
    # Attention: scores and output; the scores again and their gradient, and those of queries, keys and values.
    assert sum(number for shapes, number in calls.items() if shapes.startswith(("1x2x", "2x2x"))) >= 6, calls
    assert found["other_s"] == 1.0 - found["products_s"]
    assert found["products_s"] == pytest.approx(sum(row["seconds"] for row in found["products"]))
    names = ("as it is", "first copied", "second copied", "by columns", "two parts")
    assert all(row["floor"] > 0 and row["fastest"] in names for row in found["products"])


def test_the_floor_is_the_fastest_way():
    product = module.Product(*[Layout((4, 4), (16, 4), "<f4")] * 3)
    seconds = {"as it is": [1.0, 9.0, 4.0, 4.0, 4.0] * 2, "two parts": [2.0] * 10, "torch": [1.0] * 10}
    row = module._row(product, seconds, rounds=5)
    assert row == {
        "shapes": "4x4 @ 4x4", "calls": 2.0, "seconds": 8.0, "floor": 4.0, "fastest": "two parts", "torch": 2.0
    }  # fmt: skip
    first, second = lines(
        {"products_s": 8.0, "floor_s": 4.0, "other_s": 1.0, "torch_products_s": None, "products": [row]}
    )
    assert first.strip() == "products 8000.000 ms, 2.00 of the floor 4000.000 ms; everything else 1000.000 ms"
    assert "2 calls  8000.000 ms, 2.00 of the floor 4000.000 ms; PyTorch's 2000.000 ms (two parts)" in second


def test_every_way_is_measured_within_the_step_and_gives_its_result(monkeypatch):
    monkeypatch.setattr(module, "ROUNDS", 2)
    seen = []
    monkeypatch.setattr(module, "ways", lambda *arrays: seen.append(arrays) or ways(*arrays))
    x, w, total = np.arange(24.0).reshape(4, 6).T, np.arange(20.0).reshape(4, 5), np.empty((6, 5))

    def step():
        total[...] = np.nan
        xp.matmul(x, w, out=total)
        assert np.array_equal(total, x @ w)
        assert np.array_equal(xp.matmul(x, w), x @ w)
        return 0.0

    (row,) = measure_products(step, step_s=1.0)["products"]
    assert row["calls"] == 2
    # The operands are the step's: two rounds of two calls in each way, of which "as it is" needs no other array.
    ours = [arrays for arrays in seen if arrays[0] is x]
    assert len(ours) == 2 * 2 * (len(ways(x, w, total)) - 1)
    assert all(b is w for _, b, _ in ours)
    assert sum(out is total for _, _, out in ours) == len(ours) / 2
