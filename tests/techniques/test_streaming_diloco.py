"""Streaming DiLoCo: fragments that take turns and arrive late equal their replay on one device; bytes and resume."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.commands.runner import run_training
from minidist.core.base.errors import UsageError
from minidist.core.nn import MLP, FlatParameters
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.trainer import train
from minidist.optim import SGD
from minidist.techniques.local_sgd.streaming import StreamingOuterOptimizer, Turns, fragments_of, turn_of
from tests.cases import each
from tests.jobs import has_the_bits_of, replicas_equal_one_device

SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 8, "steps": 8, "micro_batch": 2, "reduction": "ordered"}
OUTER = {"local_steps": 3, "outer_optimizer": "nesterov", "outer_lr": 0.5}
STREAM = {**OUTER, "outer_fragments": 3, "outer_delay": 2, "outer_mixing": 0.5}


def config(**values):
    return TrainConfig.make(**{**SMALL, **values})


@each(
    ("ranks", "values"),
    [
        (3, {**STREAM, "optimizer": "adamw", "dropout": 0.1}),
        (2, {**STREAM, "outer_fragments": 2, "outer_mixing": 0.0, "outer_momentum": 0.0}),
        (4, {**OUTER, "outer_delay": 1}),
        (1, {**STREAM, "outer_fragments": 1}),
        (2, {**STREAM, "weights": "3,1", "micro_batch": None, "global_batch": 8, "accumulation": 2}),
        (2, {**STREAM, "offload": "optimizer"}),
    ],
    sampled=2,
)
def test_it_equals_its_delayed_replay_on_one_device_bit_for_bit(ranks, values):
    """Own and common weights, gradients, inner state, outer momentum and what is on its way, after every step."""
    made = config(**values)
    check_rules(made, resolve_batches(made, ranks))
    expected = replicas_equal_one_device(ranks, made)
    keys = {key.rsplit(".", 1)[-1] for key in expected[0][-1]["optimizer"]}
    assert {"outer_momentum", "outer_gradient", "common", "own"} <= keys
    if ranks > 1:
        name = "transformer.h.0.mlp.c_fc.weight"
        own = [each[0]["weights"][name] for each in expected]
        assert not np.array_equal(own[0], own[1])


def weights(ranks, **values):
    seen = {}

    def note(state):
        seen[state.rank, state.step] = state.strategy.tensors()["weights"]

    SimWorld(ranks).run(train, config(**values), [note])
    return seen


def test_a_round_of_the_paper_by_hand():
    """Fragment 0 of 2 leaves after step 2 of 4 and is merged after step 3, whatever the rank did meanwhile."""
    lr, mu, alpha = 0.5, 0.8, 0.25

    def program(comm):
        flat = FlatParameters(MLP([2, 3, 2], dtype=np.float64).parameters())
        flat.data[...] = np.arange(flat.numel)
        start, turns = flat.data.copy(), Turns(4, 2, 1, alpha)
        outer = StreamingOuterOptimizer(SGD(flat, 1.0), flat, comm, turns, lr, mu)
        first = outer.pieces[0].own
        for step in range(1, 8):
            before = flat.data.copy()
            for p in flat.parameters:
                p.grad = np.full(p.shape, float(comm.rank + step))
            outer.step()
            if step == 3:
                gradient = np.mean([1 + 2 + 2 * r for r in range(comm.size)])  # of steps 1 and 2, over the ranks
                common = start[first] - lr * (gradient + mu * gradient)
                assert np.allclose(outer.common[first], common, rtol=0, atol=1e-13)
                own = before[first] - (comm.rank + 3)
                assert np.allclose(flat.data[first], alpha * own + (1 - alpha) * common, rtol=0, atol=1e-13)
            if step in (1, 2):
                assert np.array_equal(outer.common, start)
        outer.wait()

    SimWorld(2).run(program)


def test_fragments_are_whole_parameters_of_about_equal_size_and_take_turns():
    flat = FlatParameters(MLP([8, 8, 8, 8, 8]).parameters())
    parts = fragments_of(flat.offsets, 4)
    assert parts[0].start == 0
    assert parts[-1].stop == flat.numel
    assert all(part.stop in flat.offsets for part in parts)
    assert max(part.stop - part.start for part in parts) <= flat.numel // 4 + 64
    assert [turn_of(i, 4, 10) for i in range(4)] == [2, 5, 7, 10]
    assert sum(part.stop - part.start for part in fragments_of(flat.offsets, 40)) == flat.numel  # some are empty


@pytest.mark.parametrize(("steps", "sends"), [(2, (1, 1, 0)), (8, (3, 3, 2))])
def test_the_bytes_are_the_closed_form(steps, sends, tmp_path):
    made = config(**STREAM, dp=3, steps=steps)
    summary = run_training(made, None, 60.0, tmp_path / "t.jsonl")
    assert summary.volumes_hold()
    assert "gradient_reduce" not in summary.bytes_by_purpose
    world = SimWorld(3)
    sizes = world.run(train, made)[0].sizes[0].more["fragments"]
    sent = sum(m.nbytes for trace in world.traces for m in trace.sent("parameter_gather"))
    assert sent == 2 * 2 * 4 * sum(times * size for times, size in zip(sends, sizes, strict=True))
    assert summary.bytes_by_purpose["parameter_gather"]["measured"] == sent


@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_job_has_the_bits_of_the_undisturbed_one(every, tmp_path):
    """With a fragment on its way, and others not merged yet: at any step."""
    made = {**STREAM, "optimizer": "adamw", "dropout": 0.1}
    whole = SimWorld(2).run(train, config(**made, steps=8))
    SimWorld(2).run(train, config(**made, steps=6, save=str(tmp_path), every=every))
    for step in (2, 4, 6):
        resumed = SimWorld(2).run(train, config(**made, steps=8, save=str(tmp_path), resume=True, from_step=step))
        has_the_bits_of(resumed, whole)
        (tmp_path / "latest").write_text("step-00000006")


def test_the_checkpoint_holds_the_common_weights(tmp_path):
    from minidist.job.checkpoint import Checkpoint

    last = weights(2, **STREAM, save=str(tmp_path))[0, 7]
    saved = Checkpoint(tmp_path)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not np.array_equal(saved.tensor(f"weights/{name}"), last[name])
    own = saved.tensor(f"replica/00000/optimizer/{name}/own")
    assert np.array_equal(own.reshape(-1), last[name].reshape(-1))


def test_wrong_arguments():
    def program(comm):
        flat = FlatParameters(MLP([2, 2]).parameters())
        StreamingOuterOptimizer(SGD(flat, 1.0), flat, comm, Turns(4, 5))

    with pytest.raises(UsageError, match=r"fragments=5, .* at most `every` fragments, a delay below `every`"):
        SimWorld(1).run(program)
