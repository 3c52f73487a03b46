"""Convolution and batch normalisation: against finite differences, torch, and one device when a pipeline runs them."""

import numpy as np
import pytest

from minidist.base.coordinates import batch_coordinates
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base.errors import AutogradError, ShapeError
from minidist.core.nn import Linear, Module
from minidist.core.nn.flat import FlatParameters
from minidist.core.pipeline.runtime import PipelineStage
from minidist.nn import gradcheck
from minidist.nn.batch_norm import BatchNorm
from minidist.nn.convolution import Conv2d
from minidist.nn.ops.batch_norm import batch_norm
from minidist.nn.ops.convolution import conv2d
from minidist.nn.ops.pooling import global_avg_pool2d, max_pool2d
from minidist.optim import SGD
from minidist.pipeline.passes import additions, recompute
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.schedules import get_schedule
from tests.cases import each


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


@pytest.mark.parametrize(("stride", "padding", "size"), [(1, 0, 3), (2, 1, 3), (1, 2, 2), (3, 0, 1)])
def test_conv2d(stride, padding, size):
    gradcheck(
        lambda x, w, b: conv2d(x, w, b, stride, padding),
        draw(2, 3, 5, 6),
        draw(4, 3, size, size),
        draw(4),
        parameters=True,
    )
    x, w = draw(2, 3, 5, 6), draw(4, 3, size, size)
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    y = conv2d(Tensor(x), Tensor(w), None, stride, padding).data
    for i in range(y.shape[2]):
        for j in range(y.shape[3]):
            window = padded[:, :, i * stride : i * stride + size, j * stride : j * stride + size]
            np.testing.assert_allclose(y[:, :, i, j], np.einsum("nchw,ochw->no", window, w), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "shape"), [(2, (2, 3, 4, 6)), (2, (2, 1, 5, 3)), (3, (1, 2, 7, 3)), (1, (1, 1, 2, 2))]
)
def test_pooling(size, shape):
    gradcheck(lambda x: max_pool2d(x, size), draw(*shape))
    gradcheck(global_avg_pool2d, draw(*shape))
    x, (n, c, h, w) = draw(*shape), shape
    whole = x[:, :, : h // size * size, : w // size * size]
    windows = whole.reshape(n, c, h // size, size, w // size, size)
    assert np.array_equal(max_pool2d(Tensor(x), size).data, windows.max(axis=(3, 5)))
    np.testing.assert_allclose(global_avg_pool2d(Tensor(x)).data, x.mean(axis=(2, 3)), rtol=1e-12, atol=1e-14)


def test_of_equal_pixels_the_first_gets_the_gradient():
    x = Tensor(np.zeros((1, 1, 2, 2)), requires_grad=True)
    max_pool2d(x).sum().backward()
    assert x.grad.tolist() == [[[[1, 0], [0, 0]]]]


@pytest.mark.parametrize("images", [1, 3])
def test_sums_over_images_have_the_same_bits_in_any_memory_order(images):
    """A pipeline makes what arrives C-contiguous, and then must compute as one device does."""
    x = draw(images, 4, 15, 16).astype(np.float32)
    other = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    kernel, channel = Tensor(draw(2, 4, 3, 3).astype(np.float32)), Tensor(np.ones(4, np.float32))
    for operation in (global_avg_pool2d, lambda v: batch_norm(v, channel, channel), lambda v: conv2d(v, kernel)):
        results = []
        for values in (x, other):
            leaf = Tensor(values, requires_grad=True)
            y = operation(leaf)
            (y * y).sum().backward(np.float32(1))
            results.append((y.data, leaf.grad))
        assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(5, 3), (3, 3, 2, 4)])
def test_batch_norm(shape):
    gradcheck(batch_norm, draw(*shape), draw(3), draw(3), parameters=True)
    gradcheck(
        lambda x, w, b: batch_norm(x, w, b, statistics=(np.ones(3), np.full(3, 2.0))), draw(*shape), draw(3), draw(3)
    )
    y = batch_norm(Tensor(draw(*shape)), Tensor(np.ones(3)), Tensor(np.zeros(3)), eps=0.0).data
    axes = tuple(k for k in range(len(shape)) if k != 1)
    np.testing.assert_allclose(y.mean(axis=axes), 0, atol=1e-12)
    np.testing.assert_allclose(y.var(axis=axes), 1, rtol=1e-12)


@pytest.mark.peers
def test_they_are_torchs():
    torch = pytest.importorskip("torch")
    x, w, b, s, t = draw(3, 2, 6, 5), draw(4, 2, 3, 3), draw(4), draw(4, seed=1), draw(4, seed=2)
    mine = [Tensor(a, requires_grad=True) for a in (x, w, b, s, t)]
    theirs = [torch.tensor(a, requires_grad=True) for a in (x, w, b, s, t)]
    (max_pool2d(batch_norm(conv2d(*mine[:3], 2, 1), *mine[3:])) ** 2 * 0.3).sum().backward()
    functional = torch.nn.functional
    z = functional.conv2d(*theirs[:3], stride=2, padding=1)
    z = functional.batch_norm(z, None, None, *theirs[3:], training=True)
    (functional.max_pool2d(z, 2) ** 2 * 0.3).sum().backward()
    for a, c in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a.grad, c.grad.numpy(), atol=1e-10)


class ConvStage(Module):
    """Stage 0: convolution, norm, relu; stage 1 the same; stage 2: flatten and classify."""

    def __init__(self, number):
        self.number = number
        if number < 2:
            self.conv = Conv2d((1, 3)[number], 3, 3, stride=2, padding=1, dtype=np.float64, seed=None)
            self.norm = BatchNorm(3, dtype=np.float64, seed=None)
        else:
            self.head = Linear(3 * 2 * 2, 4, dtype=np.float64, seed=None)
        self.initialize(5, f"stages.{number}")

    def forward(self, x):
        if self.number == 2:
            return self.head(x.reshape(x.shape[0], 12))
        y = self.norm(self.conv(x))
        return y * Tensor((y.data > 0).astype(float))


def loss(logits, targets):
    return cross_entropy(logits, targets, 9.0)


def batch(step):
    """Micro-batches of 3, 3, 2 and 1 images of 8 x 8."""
    rng = np.random.default_rng(step)
    return [rng.standard_normal((n, 1, 8, 8)) for n in (3, 3, 2, 1)], [rng.integers(0, 4, n) for n in (3, 3, 2, 1)]


def train(comm, plan, steps=3):
    stages = [PipelineStage(ConvStage(n), n) for n in plan.stages_of(comm.rank)]
    now = {"step": 0}
    pipe = Pipeline(comm, plan, stages, loss, coordinates=lambda i: batch_coordinates(now["step"], 3 * i))
    optimizers = [SGD(flat, lr=0.5) for flat in pipe.flats]
    for step in range(steps):
        now["step"] = step
        pipe.zero_grad()
        losses = pipe.step(*batch(step))
        for one in optimizers:
            one.step()
    weights = {p.name: p.data.copy() for s in stages for p in s.parameters}
    running = {s.number: s.module.norm.running for s in stages if s.number < 2}
    return losses, weights, running


@each("again", [False, True])
@each("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_pipeline_equals_one_device_with_statistics_of_each_micro_batch(name, again):
    """Bit for bit; with recomputation too; and the moving averages take one step a mini-batch."""
    plan = get_schedule(name).plan(3, 4)
    modules = [ConvStage(n) for n in range(3)]
    flat = FlatParameters([p for module in modules for p in module.parameters()])
    optimizer = SGD(flat, lr=0.5)
    for step in range(3):
        order = additions(plan)[0][0]
        inputs, targets = batch(step)
        flat.zero_grad()
        for i in order:
            with batch_coordinates(step, 3 * i):
                x = Tensor(inputs[i])
                for module in modules:
                    x = module(x)
                loss(x, targets[i]).backward()
        optimizer.step()
    results = SimWorld(3).run(train, recompute(plan) if again else plan)
    for rank, (_, weights, running) in enumerate(results):
        for parameter in flat.parameters:
            if parameter.name in weights:
                assert np.array_equal(weights[parameter.name], parameter.data), (rank, parameter.name)
        for number, (mean, variance) in running.items():
            np.testing.assert_allclose(mean, modules[number].norm.running[0], rtol=1e-12)
            np.testing.assert_allclose(variance, modules[number].norm.running[1], rtol=1e-12)


def test_the_moving_average_takes_one_step_a_mini_batch_and_none_in_evaluation():
    norm = BatchNorm(2, dtype=np.float64)
    x = draw(6, 2)
    for step in range(2):
        for start in (0, 4):
            for _ in range(2):  # a replay of the same rows counts once
                with batch_coordinates(step, start):
                    norm(Tensor(x[start : start + 4] + step))
    mean, variance = norm.running
    np.testing.assert_allclose(mean, 0.9 * 0.1 * x.mean(0) + 0.1 * (x + 1).mean(0))
    np.testing.assert_allclose(variance, 0.81 + 0.19 * x.var(0, ddof=1))
    norm.eval()
    y = norm(Tensor(x)).data
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + 1e-5))
    assert np.array_equal(norm.running[0], mean)


@each(
    ("call", "sentence"),
    [
        (lambda: conv2d(Tensor(draw(2, 3, 5, 5)), Tensor(draw(4, 2, 3, 3))), "must be .N, C, H, W. and .O, C, kh, kw."),
        (
            lambda: conv2d(Tensor(draw(2, 3, 2, 2)), Tensor(draw(4, 3, 3, 3))),
            "the kernel is larger than the image with padding 0",
        ),
        (
            lambda: conv2d(Tensor(draw(2, 3, 5, 5)), Tensor(draw(4, 3, 3, 3)), Tensor(draw(3))),
            "as many elements as there are output channels",
        ),
        (lambda: conv2d(Tensor(draw(2, 3, 5, 5)), Tensor(draw(4, 3, 3, 3)), stride=0), "stride 0 must be at least 1"),
        (lambda: max_pool2d(Tensor(draw(1, 1, 2, 2)), 3), r"max_pool2d: shape .* has no window of 3 x 3"),
        (lambda: max_pool2d(Tensor(draw(1, 1, 2, 2)), 17), "the window 17 must be from 1 to 16"),
        (lambda: global_avg_pool2d(Tensor(draw(2, 3))), r"must be \(N, C, H, W\)"),
        (lambda: batch_norm(Tensor(draw(5, 3)), Tensor(draw(2)), Tensor(draw(3))), "one element a channel"),
    ],
)
def test_what_does_not_fit_is_one_sentence(call, sentence):
    with pytest.raises((ShapeError, AutogradError), match=sentence):
        call()
