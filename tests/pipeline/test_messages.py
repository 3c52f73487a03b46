"""Connections that skip stages, sums over several steps, and how long a sent array stays alive."""

from functools import partial

import numpy as np
import pytest

from minidist.base.memory import account_memory
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.core.nn import MLP, Linear
from minidist.core.pipeline.plan import Action, actions_of
from minidist.core.pipeline.runtime import PipelineStage, Reduction, split_model
from minidist.core.pipeline.runtime.messages import MESSAGE
from minidist.pipeline.passes import additions, recompute
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.runtime.skips import SkipConnection, SkipPipeline
from tests.cases import each
from tests.pipeline.cases import fold, gpt, gpt_batches, gpt_loss, mlp_loss, plan_of

WIDTH, ROWS = 4, 3


class UNet:
    """Stages 0..S-1 of a U: stage s sends its output to stage S-1-s too, which multiplies it in; stage 0 also to the
    last but one.
    """

    def __init__(self, number, stages):
        self.number, self.stages = number, stages
        self.layer = Linear(WIDTH, WIDTH, seed=None, dtype=np.float64)
        self.layer.initialize(7, f"layers.{number}")

    def parameters(self):
        return self.layer.parameters()

    def __call__(self, x, *skipped):
        y = self.layer(x)
        for other in skipped:
            y = y * other
        result = [y]
        opposite = self.stages - 1 - self.number
        if opposite > self.number + 1:
            result.append(SkipConnection(opposite, y))
        if self.number == 0 and self.stages > 3:
            result.append(SkipConnection(self.stages - 2, y * 0.5))
        return tuple(result) if len(result) > 1 else y


def unet_skips(stages):
    """(from, to) of each skip connection of a U."""
    pairs = [(s, stages - 1 - s) for s in range(stages) if stages - 1 - s > s + 1]
    return pairs + [(0, stages - 2)] * (stages > 3)


def batches(m):
    values = [np.random.default_rng(i).standard_normal((ROWS if i else 1, WIDTH)) for i in range(m)]
    return values, [np.ones_like(value) for value in values]


def one_device(stages, m):
    """Each stage's gradient, micro-batches added in order; the skips are plain uses of one tensor."""
    layers = [UNet(n, stages) for n in range(stages)]
    parts = [[] for _ in layers]
    for x, y in zip(*batches(m), strict=True):
        for one in layers:
            one.layer.zero_grad()
        waiting = {0: [Tensor(x)]}
        for number, one in enumerate(layers):
            result = one(*waiting.pop(number))
            result = result if isinstance(result, tuple) else (result,)
            waiting.setdefault(number + 1, []).insert(0, result[0])
            for skip in result[1:]:
                waiting.setdefault(skip.stage, [])
                waiting[skip.stage].append(skip.tensor)
        mlp_loss(waiting[stages][0], y).backward()
        for one, part in zip(layers, parts, strict=True):
            part.append(np.concatenate([p.grad.reshape(-1) for p in one.parameters()]))
    return parts


def run_unet(comm, plan):
    stages = [PipelineStage(UNet(n, plan.stages), n) for n in plan.stages_of(comm.rank)]
    pipe = SkipPipeline(comm, plan, stages, mlp_loss, skips=unet_skips(plan.stages))
    pipe.step(*batches(plan.microbatches))
    return {s.number: s.flat.grad.copy() for s in stages}, comm.trace.bytes_by_purpose()


@each(
    ("name", "p", "m"),
    [
        ("gpipe", 4, 3),
        ("1f1b", 3, 4),
        ("1f1b", 5, 5),
        ("zb-h1", 4, 5),
        ("interleaved", 2, 4),
        ("zb-v", 2, 4),
        ("dualpipe", 4, 8),
    ],
)
def test_skips_go_straight_to_the_stage_that_needs_them(name, p, m):
    plan = plan_of(name, p, m)
    parts, S = one_device(plan.stages, m), plan.stages
    results = SimWorld(p).run(run_unet, plan)
    for stage, ranks in plan.holders().items():
        total = fold(fold(parts[stage][i] for i in numbers) for numbers in additions(plan)[stage])
        for rank in ranks:  # two walks over one tensor add its gradients in another order than one walk
            np.testing.assert_allclose(results[rank][0][stage], total, rtol=1e-12, atol=1e-14)
    rank_of = plan.rank_of_stage()

    def crossing(ways):
        return [ROWS if i else 1 for a, b in ways for i in range(m) if rank_of[a, i] != rank_of[b, i]]

    rows, skips = crossing([(s, s + 1) for s in range(S - 1)]), crossing(unet_skips(S))
    for key in ("pipeline_activation", "pipeline_gradient"):
        expected = sum(rows + skips) * WIDTH * 8 + len(skips) * MESSAGE
        assert sum(sent.get(key, 0) for _, sent in results) == expected


def releases_by_hand(plan, me):
    """Item of this rank's order -> the (stage, micro-batch) whose gradients have arrived when it is done.

    Of each gradient that is sent: the receiver uses it in its backward; of what it sends back after that, the item here
    that needs the first one.
    """
    orders = [[action for item in order for action in actions_of(item)] for order in plan.orders]
    rank_of, mine = plan.rank_of_stage(), {action: at for at, action in enumerate(orders[me])}
    result = {}
    for sent in (action for action in orders[me] if action.kind == "SEND_B"):
        stage, i = sent.stage - 1, sent.microbatch
        order = orders[rank_of[stage, i]]
        used = next(at for at, a in enumerate(order) if a.kind in "BI" and (a.stage, a.microbatch) == (stage, i))
        waiting = []
        for back in order[used + 1 :]:
            if back.kind in ("SEND_F", "SEND_B"):
                there = back.stage + (1 if back.kind == "SEND_F" else -1)
                if rank_of[there, back.microbatch] == me:
                    kinds = "F" if back.kind == "SEND_F" else "BI"
                    needing = [Action.of(kind, there, back.microbatch) for kind in kinds]
                    waiting += [mine[action] for action in needing if action in mine]
        if waiting:
            result.setdefault(min(waiting), set()).add((sent.stage, i))
    return result


@pytest.mark.parametrize(("name", "p", "m"), [("1f1b", 3, 6), ("zb-h1", 3, 5), ("interleaved", 2, 4), ("gpipe", 2, 3)])
def test_a_gradients_send_is_waited_for_when_its_receiver_has_said_that_it_arrived(name, p, m):
    """Not before: the rank would wait although it has work. (And not at the end: memory would grow.)"""

    def main(comm, plan):
        stages = [PipelineStage(UNet(n, plan.stages), n) for n in plan.stages_of(comm.rank)]
        pipe = SkipPipeline(comm, plan, stages, mlp_loss, skips=unet_skips(plan.stages))
        pipe.step(*batches(plan.microbatches))
        return pipe.plan, {at: item.arrived for at, item in enumerate(pipe.items) if item.arrived}

    for rank, (plan, released) in enumerate(SimWorld(p).run(main, plan_of(name, p, m))):
        found = {item: {(stage + 1, i) for _, stage, i in messages} for item, messages in released.items()}
        assert found == releases_by_hand(plan, rank)


class Straight:
    """Four stages that pass on; with `skip`, the first one's output also goes to the last."""

    def __init__(self, number, skip):
        self.number, self.skip = number, skip

    def parameters(self):
        return []

    def __call__(self, x, skipped=None):
        y = x * 2.0
        if skipped is not None:
            y = y + skipped
        return (y, SkipConnection(3, y)) if self.skip and self.number == 0 else y


def test_stages_between_hold_nothing_of_a_skip_and_send_nothing_of_it():
    def main(comm, skip):
        with account_memory() as account:
            stages, skips = [PipelineStage(Straight(comm.rank, skip), comm.rank)], [(0, 3)] * skip
            pipe = SkipPipeline(comm, plan_of("1f1b", 4, 6), stages, lambda y, t: y.sum(), skips=skips)
            pipe.step([np.ones((8, 64))] * 6, [None] * 6)
        return dict(account.peak_by_purpose), comm.trace.bytes_by_purpose()

    without, with_ = SimWorld(4).run(main, False), SimWorld(4).run(main, True)
    size = 8 * 64 * 8
    for rank in (1, 2):
        assert with_[rank][0] == without[rank][0]
        assert with_[rank][1]["pipeline_activation"] == without[rank][1]["pipeline_activation"] == 6 * size
    assert with_[0][1]["pipeline_activation"] == 6 * (2 * size + MESSAGE)
    assert with_[3][1]["pipeline_gradient"] == 6 * (2 * size + MESSAGE)


@pytest.mark.exhaustive
@pytest.mark.mpi(3)
def test_skips_under_mpi(comm):
    expected = SimWorld(3).run(run_unet, plan_of("1f1b", 3, 4))[comm.rank]
    gradients, sent = run_unet(comm, plan_of("1f1b", 3, 4))
    assert all(np.array_equal(gradients[n], expected[0][n]) for n in gradients)
    assert sent == expected[1]


def test_a_skip_backwards_and_too_many_tensors_are_one_sentence():
    class Wrong:
        def __init__(self, outputs):
            self.outputs = outputs

        def __call__(self, x, *rest):
            return self.outputs(x)

    def main(comm, outputs, skips):
        stage = PipelineStage(Wrong(outputs), comm.rank)
        pipe = SkipPipeline(comm, plan_of("1f1b", 3, 2), [stage], mlp_loss, skips=skips)
        pipe.step(*batches(2))

    for outputs, skips, sentence in [
        (lambda x: x, [(2, 0)], "a connection from stage 2 to stage 0 skips none of 3 stages; give pairs"),
        (lambda x: x, [(0, 1)], "a connection from stage 0 to stage 1 skips none of 3 stages; give pairs"),
        (lambda x: (x, SkipConnection(0, x)), [], r"stage 0 skips to stages \[0\], and skips= has \[\]"),
        (lambda x: x, [(0, 2)], r"stage 0 skips to stages \[\], and skips= has \[2\]; give all of them"),
        (lambda x: (x,) * 9, [], "at most 8 tensors of at most 8 dims can cross a boundary"),
        (lambda x: x.reshape(1, 1, 1, 1, 1, 1, 1, -1, 1), [], "at most 8 dims"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            SimWorld(3).run(main, outputs, skips)
    with pytest.raises(UsageError, match="with 3 skip connections at most 5461 micro-batches fit, not 5462"):
        SimWorld(5).run(run_unet, plan_of("gpipe", 5, 5462))


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_step_of_other_shapes_tells_them_again(name):
    plan = plan_of(name, 2, 4)

    def main(comm, steps):
        stages, tied = split_model(gpt(plan.stages), plan.stages, plan.stages_of(comm.rank))
        pipe = Pipeline(comm, plan, stages, gpt_loss(96.0), tied=tied)
        for step in steps:
            pipe.zero_grad()
            inputs, targets = gpt_batches(4, step, ragged=False)
            rows = slice(None) if step else slice(1)  # the first step's micro-batches have fewer rows
            losses = pipe.step([x[rows] for x in inputs], [t[rows] for t in targets])
        return losses, {p.name: np.array(p.grad) for s in stages for p in s.flat.parameters}

    for (losses, gradients), (expected_losses, expected) in zip(
        SimWorld(2).run(main, [0, 1]), SimWorld(2).run(main, [1]), strict=True
    ):
        assert losses == expected_losses
        for key, value in gradients.items():
            np.testing.assert_array_equal(value, expected[key], err_msg=key)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_second_step_without_zero_grad_adds_each_contribution_once(name, replicas):
    plan = plan_of(name, 2, 4)

    def main(comm, steps):
        data = comm.split(comm.rank % 2, comm.rank)
        stages, tied = split_model(gpt(plan.stages), plan.stages, plan.stages_of(comm.rank % 2))
        pipe = Pipeline(
            comm.split(comm.rank // 2, comm.rank),
            plan,
            stages,
            gpt_loss(96.0),
            tied=tied,
            reduce=Reduction(data, "ordered"),
        )
        for step in steps:
            pipe.step(*gpt_batches(4, step))
        return {p.name: np.array(p.grad) for s in stages for p in s.flat.parameters}

    first, second, both = (SimWorld(2 * replicas).run(main, steps) for steps in ([0], [1], [0, 1]))
    for rank, gradients in enumerate(both):
        for key, value in gradients.items():
            np.testing.assert_allclose(value, first[rank][key] + second[rank][key], rtol=1e-13, atol=1e-15, err_msg=key)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
def test_a_sent_gradient_is_let_go_when_it_must_have_arrived(name):
    """The account of gradients of activations does not grow with the number of micro-batches."""

    def main(comm, m):
        plan = plan_of(name, 4, m)
        with account_memory() as account:
            model = MLP([16] * (plan.stages + 1), dtype=np.float64)
            stages, _ = split_model(model, plan.stages, plan.stages_of(comm.rank))
            batch = [np.ones((ROWS, 16)) for _ in range(m)]
            Pipeline(comm, plan, stages, mlp_loss).step(batch, batch)
        return account.peak_by_purpose.get("activation_gradient", 0)

    few, many = SimWorld(4).run(main, 8), SimWorld(4).run(main, 32)
    assert many == few


def test_an_evaluation_keeps_two_sent_activations():
    def main(comm, m):
        with account_memory() as account:
            stages, _ = split_model(MLP([16] * 4, dtype=np.float64), 3, [comm.rank])
            batch = [np.ones((ROWS, 16)) for _ in range(m)]
            Pipeline(comm, plan_of("forward-only", 3, m, chunks=1), stages, mlp_loss).step(batch, batch)
        return account.peak_by_purpose["activation"]

    assert SimWorld(3).run(main, 6) == SimWorld(3).run(main, 24)


@pytest.mark.parametrize(("p", "m", "layers"), [(2, 6, 3), (2, 1, 1), (3, 2, 4), (4, 9, 2), (5, 3, 8)])
def test_gpipe_with_recomputation_keeps_the_borders_and_one_stage(p, m, layers):
    """GPipe: m tensors of the border and the activations of one micro-batch; without recomputation m times the
    activations. That holds on every stage; the last one keeps the loss too.
    """
    width = 16

    def main(comm, plan):
        with account_memory() as account:
            model = MLP([width] * (p * layers + 1), dtype=np.float64)
            stages, _ = split_model(model, p, [comm.rank])
            batch = [np.ones((ROWS, width)) for _ in range(m)]
            Pipeline(comm, plan, stages, mlp_loss).step(batch, batch)
        return account.peak_by_purpose

    plan = plan_of("gpipe", p, m)
    full, short = SimWorld(p).run(main, plan), SimWorld(p).run(main, recompute(plan))
    one = layers * ROWS * width * 8
    assert [peaks["activation"] for peaks in full[:-1]] == [m * one] * (p - 1)
    assert [peaks["activation"] for peaks in short[:-1]] == [one + m * ROWS * width * 8] * (p - 1)
    assert full[-1]["activation"] - short[-1]["activation"] >= (m - 1) * (one - ROWS * width * 8)


def test_recomputation_inside_stages_is_bitwise():
    from tests.pipeline.test_runtime import equal_gpt

    for name in ("1f1b", "zb-v", "looped-bfs"):
        equal_gpt(recompute(plan_of(name, 3, 4)), dropout=0.2, steps=1)
    partial(equal_gpt, recompute(plan_of("gpipe", 2, 3), [1]))(steps=1)
