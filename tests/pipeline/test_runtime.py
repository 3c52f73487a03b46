"""The runtime against one device, bit for bit: every synchronous schedule, ragged micro-batches, tied embeddings, both
worlds.
"""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.base.coordinates import batch_coordinates
from minidist.base.flop_counter import FlopCounter
from minidist.base.memory import account_memory
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base.errors import MismatchError, UsageError
from minidist.core.nn import MLP, Linear
from minidist.core.pipeline import runtime as core
from minidist.core.pipeline.plan import Plan, actions_of, lower
from minidist.core.pipeline.runtime import PipelineStage, Reduction, split_model
from minidist.optim import clip_grad_norm_
from minidist.pipeline.passes import recompute
from minidist.pipeline.runtime.clip import clip_grad_norm_ as clip_pipeline_
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.schedules import from_csv, get_schedule, load_plan
from minidist.pipeline.times import GivenTimes, uniform
from minidist.pipeline.timing import time_plan
from minidist.pipeline.validate import PlanError
from tests.cases import each
from tests.pipeline.cases import (
    assert_equal,
    fold,
    gpt,
    gpt_batches,
    gpt_loss,
    mlp,
    mlp_batches,
    mlp_loss,
    pipeline_main,
    plan_of,
    reference,
    stage_names,
)
from tests.pipeline.test_plans import random_plans, takes

SYNCHRONOUS = [
    "naive",
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "dualpipe",
    "dualpipev",
]
V_SHAPED = ["v-min", "v-half"]  # the same sizes and models as the others in test_exhaustive.py


def equal_mlp(plan, optimizer="sgd", **options):
    make, m = partial(mlp, plan.stages), plan.microbatches
    names, tied = stage_names(make, plan)
    expected = reference(make(), mlp_loss, lambda s: mlp_batches(m, s), plan, names, optimizer, 1, tied)
    assert_equal(
        SimWorld(plan.ranks).run(
            pipeline_main, make, mlp_loss, lambda s: mlp_batches(m, s), plan, optimizer, 1, **options
        ),
        expected,
    )
    return expected


def equal_gpt(plan, optimizer="adam", steps=2, dropout=0.0, layers=None, cuts=None, **options):
    make, m = partial(gpt, layers or plan.stages, dropout), plan.microbatches
    names, tied = stage_names(make, plan, cuts)
    batches = partial(gpt_batches, m)
    expected = reference(make(), gpt_loss(96.0), batches, plan, names, optimizer, steps, tied)
    assert_equal(
        SimWorld(plan.ranks).run(pipeline_main, make, gpt_loss(96.0), batches, plan, optimizer, steps, cuts, **options),
        expected,
    )


@pytest.mark.sampled(16)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_mlp_in_the_exact_tier(name, optimizer):
    """Integer values: the gradient is also that of the plain sum in any order, which shows each contribution exactly
    once.
    """
    ran = 0
    for p, m in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 3, 5, 8)):
        if takes(name, p, m) and (optimizer == "sgd" or (p + m) % 3 == 1):
            plan = plan_of(name, p, m)
            ((_, gradients, _, _),) = equal_mlp(plan, optimizer)
            model = mlp(plan.stages)
            for x, y in zip(*mlp_batches(m), strict=True):
                mlp_loss(model(Tensor(x)), y).backward()
            assert all(np.array_equal(gradients[q.name], q.grad) for q in model.parameters())
            assert max(np.abs(g).max() for g in gradients.values()) < 2**53
            ran += 1
    assert ran >= 1  # of the sizes, those that the schedule takes


RANKS = (1, 2, 3, 4, 5, 8)


def empty_stages(plan):
    """How many blocks each stage gets when one has none: the embedding's, and in between one without any parameter."""
    return [0 if stage % 3 == 0 else 1 for stage in range(plan.stages)]


def sample(name):
    """(p, m, optimizer, empty stages?): every p with fewer and with more micro-batches than ranks, where the schedule
    takes them, and every pair of optimizer and model with either of them. The whole product is in test_exhaustive.py.
    """
    for number, p in enumerate(RANKS):
        few = [m for m in range(1, p) if takes(name, p, m)]
        many = [m for m in range(p, 10) if takes(name, p, m)]
        for turn, sizes in enumerate((few, many)):
            if sizes:
                draw = number + turn + SYNCHRONOUS.index(name)
                yield (
                    p,
                    sizes[(2 * draw) % len(sizes)],
                    ("sgd", "adam")[(number + turn) % 2],
                    p > 1 and (number // 2 + turn) % 2 == 1,
                )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_gpt_with_tied_embeddings_in_the_ordered_tier(name):
    for p, m, optimizer, empty in sample(name):
        plan = plan_of(name, p, m)
        cuts = empty_stages(plan) if empty and plan.stages > 1 else None
        equal_gpt(
            plan, optimizer, steps=2, dropout=0.1 if p == 2 else 0.0, layers=sum(cuts) if cuts else None, cuts=cuts
        )


@pytest.mark.parametrize("name", V_SHAPED)
def test_v_shaped_schedules_in_both_tiers(name):
    """Fewer and more micro-batches than ranks; p of each remainder by 2 and 3, on which the building blocks depend."""
    for p, m, optimizer in ((3, 2, "adam"), (4, 6, "sgd"), (5, 7, "adam"), (6, 1, "sgd")):
        equal_mlp(plan_of(name, p, m), optimizer)
    equal_gpt(plan_of(name, 3, 4), "adam", steps=1, dropout=0.1)
    equal_gpt(plan_of(name, 2, 3), "sgd", steps=1, layers=2, cuts=empty_stages(plan_of(name, 2, 3)))


def test_the_sample_is_stratified():
    """Each schedule meets each number of ranks that it can; both optimizers meet both models, with few and many
    micro-batches.
    """
    drawn = {(name, *case) for name in SYNCHRONOUS for case in sample(name)}
    for name in SYNCHRONOUS:
        assert {p for n, p, *_ in drawn if n == name} == {
            p for p in RANKS if any(takes(name, p, m) for m in range(1, 10))
        }
    assert {(m < p, optimizer, empty) for _, p, m, optimizer, empty in drawn} == set(
        itertools.product((False, True), ("sgd", "adam"), (False, True))
    )
    assert {m for _, _, m, *_ in drawn} == set(range(1, 10))


@settings(max_examples=12)
@given(random_plans())
def test_random_valid_plans_are_equal_too(plan):
    equal_mlp(lower(plan))


@settings(max_examples=8)
@given(st.data())
def test_drawn_configurations(data):
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    name = data.draw(st.sampled_from([n for n in SYNCHRONOUS if takes(n, p, m)]))
    plan = plan_of(name, p, m)
    layers = data.draw(st.integers(plan.stages, plan.stages + 2))
    equal_gpt(plan, data.draw(st.sampled_from(["sgd", "adam"])), 1, data.draw(st.sampled_from([0.0, 0.2])), layers)


def test_a_users_own_schedules(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def f(p, m):\n    return [[f'{s}{k}{i}' for k in 'FB' for i in range(m)] for s in range(p)]\n"
    )
    (tmp_path / "mine.csv").write_text(plan_of("zb-v", 2, 3).to_csv())
    equal_mlp(load_plan(f"{tmp_path}/mine.py:f", 3, 4))
    equal_mlp(load_plan(f"{tmp_path}/mine.csv"))


def test_forward_only_gives_the_losses_everywhere_and_keeps_nothing():
    def main(comm):
        plan = plan_of("forward-only", 3, 4, chunks=1)
        stages, _ = split_model(mlp(3), 3, [comm.rank])
        pipe = Pipeline(comm, plan, stages, mlp_loss)
        losses = pipe.step(*mlp_batches(4))
        assert not pipe.alive
        assert all(p.grad is None for p in stages[0].flat.parameters)
        return losses

    model = mlp(3)
    expected = [mlp_loss(model(Tensor(x)), y).item() for x, y in zip(*mlp_batches(4), strict=True)]
    assert SimWorld(3).run(main) == [expected] * 3


class Skip:
    """Three stages; stage 0's output travels past stage 1 to stage 2, which also gets an integer tensor."""

    def __init__(self, number):
        self.number = number
        self.layer = Linear(4, 4, seed=None)
        self.layer.initialize(7, f"layers.{number}")

    def parameters(self):
        return self.layer.parameters()

    def __call__(self, x, skipped=None, labels=None):
        y = self.layer(x)
        if self.number == 0:
            return y, y * 2.0, Tensor(np.arange(3))
        return (y, skipped, labels) if self.number == 1 else y * skipped * float(labels.data.sum())


def test_a_connection_that_skips_a_stage():
    def main(comm, name):
        plan = plan_of(name, 3, 4)
        stage = PipelineStage(Skip(comm.rank), comm.rank)
        pipe = Pipeline(comm, plan, [stage], mlp_loss)
        inputs = [np.random.default_rng(i).standard_normal((2, 4)).astype(np.float32) for i in range(4)]
        pipe.step(inputs, [np.ones((2, 4), np.float32)] * 4)
        return stage.flat.grad.copy()

    stages = [Skip(n) for n in range(3)]
    parts = [[] for _ in stages]
    for i in range(4):
        for stage in stages:
            stage.layer.zero_grad()
        out = (Tensor(np.random.default_rng(i).standard_normal((2, 4)).astype(np.float32)),)
        for stage in stages:
            out = stage(*out)
            out = out if isinstance(out, tuple) else (out,)
        mlp_loss(out[0], np.ones((2, 4), np.float32)).backward()
        for stage, part in zip(stages, parts, strict=True):
            part.append(np.concatenate([p.grad.reshape(-1) for p in stage.parameters()]))
    for name in ("1f1b", "zb-h1"):
        for got, part in zip(SimWorld(3).run(main, name), parts, strict=True):
            assert np.array_equal(got, fold(part))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "dualpipe"])
def test_with_a_data_axis(name):
    """2 replicas of a pipeline: tied copies are added over the stages first, then everything over the replicas."""
    m, p = 4, 2
    plan = plan_of(name, p, m)
    make = partial(gpt, plan.stages)
    names, tied = stage_names(make, plan)

    def batches(replica, step):
        inputs, targets = gpt_batches(2 * m, step, ragged=False)
        return inputs[replica * m : (replica + 1) * m], targets[replica * m : (replica + 1) * m]

    def main(comm):
        data = comm.split(comm.rank % p, comm.rank)
        pipe = comm.split(comm.rank // p, comm.rank)
        return pipeline_main(
            pipe, make, gpt_loss(96.0), partial(batches, comm.rank // p), plan, reduce=Reduction(data, "ordered")
        )

    halves = [reference(make(), gpt_loss(96.0), partial(batches, r), plan, names, tied=tied)[0][1] for r in range(2)]
    expected = {name_: halves[0][name_] + halves[1][name_] for name_ in halves[0]}
    for history in SimWorld(2 * p).run(main):
        for name_, gradient in history[0][1]:
            assert np.array_equal(gradient, expected[name_]), name_


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_the_clip_norm_is_that_of_the_whole_model(name):
    plan = plan_of(name, 2, 4)
    make = partial(gpt, plan.stages)
    names, tied = stage_names(make, plan)

    def main(comm):
        stages, tied = split_model(make(), plan.stages, plan.stages_of(comm.rank))
        pipe = Pipeline(
            comm, plan, stages, gpt_loss(96.0), tied=tied, coordinates=lambda i: batch_coordinates(0, 2 * i, 9)
        )
        pipe.step(*gpt_batches(4))
        norm = clip_pipeline_(pipe, 0.01)
        return norm, [(p.name, np.array(p.grad)) for s in stages for p in s.flat.parameters]

    clipped = {}

    def after(flat):
        clipped["norm"] = clip_grad_norm_(flat, 0.01)
        clipped.update({p.name: np.array(p.grad) for p in flat.parameters})

    reference(make(), gpt_loss(96.0), partial(gpt_batches, 4), plan, names, tied=tied, after=after)
    results = SimWorld(2).run(main)
    assert len({norm for norm, _ in results}) == 1
    for norm, gradients in results:
        assert norm == pytest.approx(clipped["norm"], rel=1e-14)
        for name_, gradient in gradients:
            np.testing.assert_allclose(gradient, clipped[name_], rtol=1e-13, atol=1e-18)


# --- time, order and volume -------------------------------------------------------------------------------------------


def timed(comm, plan, times):
    stages, _ = split_model(mlp(plan.stages), plan.stages, plan.stages_of(comm.rank))
    pipe = Pipeline(comm, plan, stages, mlp_loss, observers=[GivenTimes(comm, times)])
    begin = comm.time()
    pipe.step(*mlp_batches(plan.microbatches))
    return [(s.name, s.start - begin, s.end - begin) for s in comm.trace.spans if s.name[:1].isdigit()]


@each("name", [*SYNCHRONOUS, *V_SHAPED, "forward-only"], sampled=6)
@each("cost", [(1, 1, 1), (2, 1.5, 0.5)])
def test_the_measured_bubble_is_the_timing_tools(name, cost):
    for p, m in [(2, 4), (4, 8)]:
        plan = plan_of(name, p, m)
        times = uniform(plan.stages, *cost)
        expected = time_plan(plan, times, spans=True)
        measured = SimWorld(p, links=LinkModel(0.0, 0.0)).run(timed, plan, times)
        for rank, spans in enumerate(measured):
            order = [str(action) for action in plan.actions(rank)]
            assert [span[0] for span in spans] == order
            assert spans[0][1] == pytest.approx(expected.first_start[rank])
            assert spans[-1][2] == pytest.approx(expected.last_end[rank])
            assert sum(end - start for _, start, end in spans) == pytest.approx(expected.busy[rank])


@pytest.mark.exhaustive
@pytest.mark.mpi(2)
def test_under_mpi_every_rank_acts_in_the_order_of_the_timing_tool(comm):
    """With the test above: the simulated world, MPI and the timing tool have one order."""
    for name in ("gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe", "interleaved"):
        plan = plan_of(name, 2, 4)
        before = len(comm.trace.spans)
        timed(comm, plan, uniform(plan.stages))
        acted = [span.name for span in comm.trace.spans[before:] if span.name[:1].isdigit()]
        items = [item for item, _, _ in time_plan(plan, spans=True).spans[comm.rank]]
        assert acted == [str(action) for item in items for action in actions_of(item)]


def test_a_meter_advances_the_clock_by_what_was_computed():
    def main(comm):
        with FlopCounter():
            stages, _ = split_model(mlp(2), 2, [comm.rank])
            Pipeline(comm, plan_of("zb-h1", 2, 3), stages, mlp_loss).step(*mlp_batches(3))
        return {s.name: s.end - s.start for s in comm.trace.spans}

    first, last = SimWorld(2).run(main)
    assert {f"0{kind}{i}" for kind in "FW" for i in range(3)} <= set(first)  # nothing before stage 0 needs a gradient
    assert {f"1{kind}{i}" for kind in "FIW" for i in range(3)} <= set(last)
    assert last["1F0"] > last["1F2"] > 0  # the last micro-batch is smaller


# --- wrong input ------------------------------------------------------------------------------------------------------


def attempt(comm, **changes):
    plan = changes.get("plan", plan_of("1f1b", 2, 3))
    numbers = changes.get("numbers", [comm.rank])
    stages, _ = split_model(mlp(2), 2, numbers)
    pipe = Pipeline(comm, plan, stages, changes.get("loss", mlp_loss), **changes.get("options", {}))
    pipe.step(*mlp_batches(changes.get("m", 3)))


@each(
    ("changes", "error", "sentence"),
    [
        ({"plan": from_csv("0B0,0F0\n1F0,1B0")}, PlanError, "0B0 comes before 0F0"),
        ({"plan": from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")}, PlanError, "deadlock"),
        ({"plan": plan_of("1f1b", 3, 3)}, UsageError, "is for 3 ranks and there are 2"),
        ({"plan": plan_of("pipedream", 2, 3)}, UsageError, "updates its weights on the way"),
        ({"numbers": [0]}, UsageError, "was built with .0.; build the stages"),
        ({"m": 4}, UsageError, "is for 3 micro-batches and got 4"),
        ({"loss": None}, UsageError, "needs a loss"),
        (
            {"options": {"tied": ["layers.0.wight"]}},
            UsageError,
            "'layers.0.wight' is on no stage .did you mean 'layers.[01].weight'",
        ),
    ],
)
def test_wrong_input_is_one_sentence_and_never_a_hang(changes, error, sentence):
    with pytest.raises(error, match=sentence):
        SimWorld(2).run(lambda comm: attempt(comm, **changes))


def test_the_cores_pipeline_names_an_action_that_only_a_users_pipeline_runs():
    def main(comm):
        stages, tied = split_model(MLP([4, 6, 3]), 2, [comm.rank])
        plan = recompute(get_schedule("gpipe").plan(2, 2))
        pipe = core.Pipeline(comm, plan, stages, lambda y, t: cross_entropy(y, t, 10.0), tied=tied)
        pipe.step([np.ones((5, 4), np.float32)] * 2, [np.arange(5) % 3] * 2)

    with pytest.raises(UsageError, match=r"core's Pipeline does not run 0RECOMPUTE\d; use minidist.Pipeline"):
        SimWorld(2).run(main)


def test_ranks_with_different_plans_are_told():
    plans = [plan_of("1f1b", 2, 3), plan_of("gpipe", 2, 3)]
    with pytest.raises(MismatchError, match="its plan differs from rank 0's"):
        SimWorld(2).run(lambda comm: attempt(comm, plan=plans[comm.rank]))


def test_unequal_copies_of_a_tied_parameter_are_told():
    def main(comm):
        model = gpt(2)
        if comm.rank:
            model.transformer.wte.weight.data[0, 0] += 1
        stages, tied = split_model(model, 2, [comm.rank])
        Pipeline(comm, plan_of("1f1b", 2, 2), stages, gpt_loss(1.0), tied=tied)

    with pytest.raises(
        MismatchError,
        match=r"copies of parameter 'transformer.wte.weight' differ between stage 0 on rank 0 and stage 1 on rank 1",
    ):
        SimWorld(2).run(main)


def test_cutting_models():
    with pytest.raises(UsageError, match=r"cannot cut 2 layers into 3 stages: .* use --layers 3"):
        split_model(MLP([2, 2, 2]), 3, [0])
    with pytest.raises(UsageError, match=r"cannot cut 1 layer into 2 stages: .* or at most 1 stage \("):
        split_model(MLP([2, 2]), 2, [0])
    with pytest.raises(UsageError, match=r"cuts .1, 2. do not make 2 stages of 2 layers"):
        split_model(MLP([2, 2, 2]), 2, [0], [1, 2])
    with pytest.raises(UsageError, match="cannot cut a Linear"):
        split_model(Linear(2, 2), 1, [0])


def test_lowered_and_hand_written_plans_run():
    lowered = lower(plan_of("1f1b", 2, 3))
    again = from_csv(lowered.to_csv())
    assert isinstance(again, Plan)
    equal_mlp(again)


@pytest.mark.parametrize(("name", "p", "m"), [("gpipe", 4, 8), ("1f1b", 4, 8), ("1f1b", 3, 7), ("1f1b", 4, 2)])
def test_activations_alive_are_those_of_the_plan(name, p, m):
    """A sent activation must not outlive its backward, or 1F1B would need GPipe's memory."""
    width, rows = 16, 4
    plan = plan_of(name, p, m)

    def main(comm):
        with account_memory() as account:
            model = MLP([width] * (2 * p + 1), dtype=np.float64)
            stages, _ = split_model(model, p, plan.stages_of(comm.rank))
            batch = [np.ones((rows, width)) for _ in range(m)]
            Pipeline(comm, plan, stages, mlp_loss).step(batch, batch)
            return account.peak_by_purpose["activation"] / (2 * 8 * rows * width)  # two layers a stage

    assert SimWorld(p).run(main)[:-1] == time_plan(plan).peak[:-1]  # the last stage has the loss too
