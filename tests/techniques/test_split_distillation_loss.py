"""The loss of a student with its vocabulary split, next to `distillation_loss` on whole rows."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base.errors import ShapeError
from minidist.core.parallel.tensor_parallel import padded_vocab_size, vocab_parallel_cross_entropy, vocab_range
from minidist.techniques.distillation.loss import (
    distillation_loss,
    distillation_volume,
    vocab_parallel_distillation_loss,
)
from tests.cases import each


def case(ranks, words, rows=5):
    rng = np.random.default_rng(words + ranks)
    student, teacher = rng.normal(0, 3, (2, rows, words))
    targets = rng.integers(0, words, rows)
    targets[1] = -100
    return student, teacher, targets


def split(comm, student, words):
    """This rank's columns, with the padding's, which must not matter."""
    first, last = vocab_range(words, comm.rank, comm.size)
    own = np.full((len(student), padded_vocab_size(words, comm.size) // comm.size), 7.0)
    own[:, : last - first] = student[:, first:last]
    return own, first, last


@each(("ranks", "words"), [(1, 7), (2, 7), (3, 9), (4, 5), (5, 11)])
@each(("temperature", "weight", "divisor"), [(2.0, 0.5, None), (4.0, 1.0, 20.0), (0.5, 0.1, 3.0)])
def test_it_equals_the_loss_of_whole_rows_and_sends_five_numbers_per_row(ranks, words, temperature, weight, divisor):
    student, teacher, targets = case(ranks, words)
    whole = Tensor(student, requires_grad=True)
    expected = distillation_loss(whole, targets, teacher, temperature, weight, divisor)
    expected.backward()

    def program(comm):
        own, first, last = split(comm, student, words)
        logits = Tensor(own, requires_grad=True)
        loss = vocab_parallel_distillation_loss(
            logits, targets, teacher, temperature, weight, divisor, comm=comm, vocab_size=words
        )
        loss.backward()
        np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-13)
        np.testing.assert_allclose(logits.grad[:, : last - first], whole.grad[:, first:last], rtol=0, atol=1e-14)
        assert not logits.grad[:, last - first :].any()
        return loss.item()

    world = SimWorld(ranks)
    assert len(set(world.run(program))) == 1
    sent = sum(m.nbytes for trace in world.traces for m in trace.sent("tensor_forward"))
    assert sent == 8 * distillation_volume(len(targets), ranks).forward
    assert sum(trace.bytes_by_purpose().get("tensor_backward", 0) for trace in world.traces) == 0


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("name", ["cross_entropy", "distillation_loss"])
def test_the_mean_over_no_rows_is_nan_and_its_gradient_zero(name, rows):
    """Of a rank without rows, and of one whose rows are all masked; the vocabulary whole, and split."""
    student, targets = np.random.default_rng(3).normal(size=(rows, 6)), np.full(rows, -100)

    def program(comm):
        own, *_ = split(comm, student, 6)
        whole, logits = (Tensor(x, requires_grad=True) for x in (student, own))
        settings = {"comm": comm, "vocab_size": 6}
        if name == "cross_entropy":
            losses = [cross_entropy(whole, targets), vocab_parallel_cross_entropy(logits, targets, **settings)]
        else:
            given = (targets, student, 2.0, 0.5)
            losses = [distillation_loss(whole, *given), vocab_parallel_distillation_loss(logits, *given, **settings)]
        for loss, leaf in zip(losses, (whole, logits), strict=True):
            loss.backward()
            assert np.isnan(loss.item())
            assert not leaf.grad.any()

    SimWorld(2).run(program)


def test_a_class_that_the_teacher_excludes_and_large_logits_stay_finite():
    student, teacher, targets = case(2, 6)
    teacher[:, 4] = -np.inf
    student *= 1e3

    def program(comm):
        own, *_ = split(comm, student, 6)
        logits = Tensor(own, requires_grad=True)
        loss = vocab_parallel_distillation_loss(logits, targets, teacher, 2.0, 0.5, comm=comm, vocab_size=6)
        loss.backward()
        assert np.isfinite(loss.item())
        assert np.isfinite(logits.grad).all()

    SimWorld(2).run(program)


def test_half_precision_keeps_the_loss_in_float32_and_returns_half_a_gradient():
    student, teacher, targets = case(2, 8)
    half = student.astype(np.float16)
    whole = Tensor(half, requires_grad=True)
    expected = distillation_loss(whole, targets, teacher.astype(np.float16), 2.0, 0.5)
    expected.backward()

    def program(comm):
        logits = Tensor(half[:, 4 * comm.rank : 4 * comm.rank + 4], requires_grad=True)
        of_teacher = teacher.astype(np.float16)
        loss = vocab_parallel_distillation_loss(logits, targets, of_teacher, 2.0, 0.5, comm=comm, vocab_size=8)
        loss.backward()
        assert (loss.dtype, logits.grad.dtype) == (np.float32, np.float16)
        np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-5)
        mine = whole.grad[:, 4 * comm.rank : 4 * comm.rank + 4]
        np.testing.assert_allclose(logits.grad.astype(float), mine.astype(float), rtol=0, atol=1e-3)

    SimWorld(2).run(program)


@pytest.mark.parametrize("wrong", ["teacher", "targets"])
def test_other_shapes_are_refused(wrong):
    student, teacher, targets = case(2, 6)

    def program(comm):
        own, *_ = split(comm, student, 6)
        of_teacher = teacher[:, :3] if wrong == "teacher" else teacher
        labels = targets[:3] if wrong == "targets" else targets
        vocab_parallel_distillation_loss(Tensor(own), labels, of_teacher, 2.0, 0.5, comm=comm, vocab_size=6)

    with pytest.raises(ShapeError, match="of shape"):
        SimWorld(2).run(program)
