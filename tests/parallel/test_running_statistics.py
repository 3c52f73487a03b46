"""Batch norm with several ranks: all evaluate one model, that of one device with the same micro-batches."""

import copy

import numpy as np
import pytest

from minidist.base.coordinates import batch_coordinates
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base.errors import UsageError
from minidist.core.collectives import all_reduce
from minidist.core.comm import init_device_mesh
from minidist.core.nn import Linear, Module, Sequential
from minidist.core.parallel.fsdp import fully_shard, sharded_parameters, shards_of
from minidist.core.pipeline.runtime import PipelineStage, Reduction
from minidist.nn import BatchNorm
from minidist.nn.buffers import named_buffers
from minidist.optim import SGD
from minidist.parallel import gather_tensors
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.tensor import full_state_dict, load_full_state_dict
from minidist.parallel.zero import ZeroOptimizer
from minidist.pipeline.runtime.pipedream import WeightVersions
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.runtime.versioned import VersionedPipeline
from minidist.pipeline.schedules import get_schedule
from tests.cases import each

STEPS, ROWS = 3, 5


class Net(Module):
    def __init__(self):
        self.first, self.norm = Linear(4, 6, dtype=np.float64), BatchNorm(6, dtype=np.float64)
        self.last = Linear(6, 3, dtype=np.float64)
        self.initialize(2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def batch(step, number):
    """Micro-batches of unequal size: statistics are weighted by rows."""
    rng, rows = np.random.default_rng([step, number]), ROWS + number
    return rng.standard_normal((rows, 4)), rng.integers(0, 3, rows)


def loss_of(model, step, number, count):
    x, targets = batch(step, number)
    with batch_coordinates(step, 100 * number):
        return cross_entropy(model(Tensor(x)), targets, float(sum(ROWS + i for i in range(count))))


def evaluate(model):
    model.eval()
    y = model(Tensor(np.random.default_rng(9).standard_normal((7, 4)))).data.copy()
    model.train()
    return y


def one_device(count):
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        model.zero_grad()
        for number in range(count):
            loss_of(model, step, number, count).backward()
        optimizer.step()
    return evaluate(model), {name: array.copy() for name, array in model.state_dict().items()}


def data_parallel(comm, local):
    model = Net()
    wrapped = DistributedDataParallel(model, comm, reduction="sum")
    optimizer = SGD(wrapped.flat, lr=0.5)
    for step in range(STEPS):
        wrapped.zero_grad()
        for i in range(local):
            loss_of(wrapped, step, comm.rank * local + i, comm.size * local).backward()
        optimizer.step()
    # Through the wrapper and without it, on one rank alone as well.
    result = evaluate(wrapped) if comm.rank == 0 else evaluate(model)
    return result, copy.deepcopy(model).state_dict()


def zero(comm, local):
    model = Net()
    optimizer = ZeroOptimizer(model, SGD, comm=comm, stage=2, reduction="sum", lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(local):
            loss_of(model, step, comm.rank * local + i, comm.size * local).backward()
        optimizer.step()
    return evaluate(model), model.state_dict()


def sharded(comm, local, hybrid=False):
    model = Net()
    mesh = init_device_mesh(comm, (2, comm.size // 2), ("replicate", "shard")) if hybrid else comm
    fully_shard(model.first, mesh=mesh, reduction="sum")
    fully_shard(model, mesh=mesh, reduction="sum")
    optimizer = SGD(sharded_parameters(model), lr=0.5)
    for step in range(STEPS):
        model.zero_grad()
        for i in range(local):
            loss_of(model, step, comm.rank * local + i, comm.size * local).backward()
        optimizer.step()
    state = {**gather_tensors(shards_of(model), optimizer)["weights"], **dict(named_buffers(model))}
    return evaluate(model), state


@each("local", [1, 2])
@each("train", [data_parallel, zero, sharded, lambda c, k: sharded(c, k, hybrid=True)])
def test_every_rank_evaluates_the_model_of_one_device(train, local):
    y, state = one_device(4 * local)
    results = SimWorld(4).run(train, local)
    for mine, values in results:
        assert values.keys() == state.keys() >= {"norm.running_mean", "norm.running_var"}
        for name in state:
            np.testing.assert_allclose(values[name], state[name], rtol=1e-10, atol=1e-12, err_msg=name)
            assert np.array_equal(values[name], results[0][1][name])
        np.testing.assert_allclose(mine, y, rtol=1e-9)


def pipelined(comm, plan, replicas):
    """The stages of this rank's pipeline of `plan.ranks` ranks; the pipelines see other rows."""
    mesh = init_device_mesh(comm, (replicas, plan.ranks), ("dp", "pp"))
    model, m = Net(), plan.microbatches
    parts = [[model.first, model.norm], [model.last]] + [[] for _ in range(plan.stages - 2)]
    stages = [PipelineStage(Sequential(*parts[n]), n) for n in plan.stages_of(mesh["pp"].rank)]
    count, step = replicas * m, 0
    first = mesh["dp"].rank * m
    pipe = Pipeline(
        mesh["pp"],
        plan,
        stages,
        lambda y, t: cross_entropy(y, t, float(sum(ROWS + i for i in range(count)))),
        reduce=Reduction(mesh["dp"]),
        coordinates=lambda i: batch_coordinates(step, 100 * (first + i)),
    )
    optimizers = [SGD(flat, lr=0.5) for flat in pipe.flats if len(flat)]
    for step in range(STEPS):
        pipe.zero_grad()
        batches = [batch(step, first + i) for i in range(m)]
        pipe.step([x for x, _ in batches], [t for _, t in batches])
        for optimizer in optimizers:
            optimizer.step()
    held = {id(module) for stage in stages for module in stage.module.layers}
    return {n: a for n, a in model.state_dict().items() if id(getattr(model, n.split(".")[0])) in held}


@pytest.mark.parametrize(("name", "replicas"), [("1f1b", 2), ("gpipe", 3), ("dualpipe", 1), ("dualpipe", 2)])
def test_the_replicas_of_a_pipelines_stage_have_the_statistics_of_one_device(name, replicas):
    plan = get_schedule(name).plan(2, 4)
    _, state = one_device(4 * replicas)
    results = SimWorld(2 * replicas).run(pipelined, plan, replicas)
    seen = set()
    for mine in results:
        for key, array in mine.items():
            np.testing.assert_allclose(array, state[key], rtol=1e-10, atol=1e-12, err_msg=key)
            assert all(np.array_equal(array, other[key]) for other in results if key in other)
        seen |= mine.keys()
    assert seen == state.keys()


def test_an_asynchronous_pipeline_refuses_replicas_of_batch_norm_and_a_data_axis():
    def program(comm):
        plan = get_schedule("pipedream").plan(3, 4, replicas="2,1")
        ranks = comm.split(comm.rank // plan.ranks)
        stages = [PipelineStage(Sequential(Net().norm), n) for n in plan.stages_of(ranks.rank)]
        versions = WeightVersions(ranks, plan, stages, lambda flat: SGD(flat, lr=0.5))
        VersionedPipeline(ranks, plan, stages, lambda y, t: y.sum(), versions=versions)

    with pytest.raises(UsageError, match=r"updates a stage with batch normalisation on several ranks .*such as 1f1b"):
        SimWorld(3).run(program)
    # A reduction over a data axis is an argument of `Pipeline` alone.
    plan = get_schedule("pipedream").plan(1, 4)
    with pytest.raises(UsageError, match=r"updates its weights on the way; .*such as 1f1b"):
        SimWorld(1).run(lambda comm: Pipeline(comm, plan, [], None, reduce=Reduction(comm)))


def test_running_statistics_are_saved_and_loaded():
    model, other = Net(), Net()
    loss_of(model, 0, 0, 1)
    loss_of(other, 1, 2, 1)  # of a step that comes again, and that it must not remember
    other.load_state_dict(model.state_dict())
    assert np.array_equal(evaluate(model), evaluate(other))
    # Training goes on from them, with a separate mini-batch, though its step has the same number.
    for one in (model, other):
        loss_of(one, 1, 1, 1)
    assert np.array_equal(evaluate(model), evaluate(other))
    with pytest.raises(Exception, match=r"'norm.running_mean' is missing"):
        other.load_state_dict({n: a for n, a in model.state_dict().items() if n != "norm.running_mean"})
    with pytest.raises(Exception, match=r"'norm.running_var' has shape \(2,\)"):
        other.load_state_dict({**model.state_dict(), "norm.running_var": np.ones(2)})


def test_running_statistics_are_in_the_state_dict_of_a_split_model():
    def program(comm):
        model, other = Net(), Net()
        with batch_coordinates(0):
            model(Tensor(batch(0, 0)[0]))
        mesh = init_device_mesh(comm, (2,), ("tp",))
        state = full_state_dict(model, mesh)
        load_full_state_dict(other, state, mesh)
        return state.keys() == model.state_dict().keys(), np.array_equal(evaluate(model), evaluate(other))

    assert SimWorld(2).run(program) == [(True, True)] * 2


def test_batch_norm_outside_batch_coordinates_says_what_it_needs():
    with pytest.raises(UsageError, match=r"batch normalisation in training needs .*batch_coordinates\(step=...\)"):
        Net()(Tensor(np.ones((2, 4))))
    assert Net().eval()(Tensor(np.ones((2, 4)))).shape == (2, 3)


def test_statistics_cost_nothing_without_batch_norm():
    def program(comm):
        model = DistributedDataParallel(Linear(3, 2), comm)
        model(Tensor(np.ones((2, 3), np.float32))).sum().backward()
        all_reduce(comm, np.ones(1))
        return comm.trace.bytes_by_purpose().get("metrics", 0)

    assert SimWorld(2).run(program) == [0, 0]
