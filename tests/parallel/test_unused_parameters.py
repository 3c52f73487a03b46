"""A branch that is used late is stepped from then on, by its own count of steps: every strategy equals one device."""

from functools import partial

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.autograd import Tensor
from minidist.core.comm import init_device_mesh
from minidist.core.nn import Linear, Module
from minidist.core.optim import AdamW
from minidist.core.parallel.fsdp import fully_shard, sharded_parameters, shards_of
from minidist.core.parallel.model_parallel import parallelize_module
from minidist.core.pipeline.runtime import PipelineStage, Reduction
from minidist.optim import LAMB, Muon, clip_by_norm_
from minidist.optim.adam import Adam
from minidist.parallel import CPUOffloadPolicy, HostPool, LayerSums, WholeMatrices, gather_tensors
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.tensor.full_state import local_tensor
from minidist.parallel.tensor.gathering import ColumnParallelLinear
from minidist.parallel.zero import ZeroOptimizer
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.schedules import load_plan
from minidist.techniques.offload.optimizer import OffloadedOptimizer
from tests.cases import each

ROWS, WIDTH = 8, 6
# Step by step: the ranks that use the branches. First none, then a step without any backward, one rank alone, none.
USERS = [(), None, (), (0, 1), (1,), (), (0, 1)]
SETTINGS = {Adam: {}, AdamW: {"weight_decay": 0.5}, LAMB: {}, Muon: {}}
OPTIONS = {"reduction": "sum", "find_unused_parameters": True}
SMALL = {"alignment": 8}  # elements: a parameter lies on several ranks


class Block(Module):
    def __init__(self):
        self.main, self.branch = (Linear(WIDTH, WIDTH, dtype=np.float64) for _ in range(2))
        self.uses = False

    def forward(self, x):
        return self.main(x) + self.branch(x) if self.uses else self.main(x)


class TwoBlocks(Module):
    def __init__(self):
        self.first, self.second = Block(), Block()
        self.initialize(3)

    def forward(self, x):
        return self.second(self.first(x))


def loss_of(y, *_):
    return (y * y).sum() * (1 / ROWS)


def rows(step):
    return np.split(np.random.default_rng(step).standard_normal((ROWS, WIDTH)), 2)


def use(model, uses):
    model.first.uses = model.second.uses = uses


def train(optimizer, zero_grad, backward, clip=lambda: None):
    for step, users in enumerate(USERS):
        if users is not None:
            backward(step, users)
        clip()
        optimizer.step()
        zero_grad()


def one_device(kind, together=False):
    """Both ranks' halves of the rows, one after the other. together: both use the branches when one does."""
    model = TwoBlocks()
    optimizer = kind(model.parameters(), lr=0.1, **SETTINGS[kind])

    def backward(step, users):
        for rank, x in enumerate(rows(step)):
            use(model, bool(users) if together else rank in users)
            loss_of(model(Tensor(x))).backward()

    train(optimizer, model.zero_grad, backward)
    return values(model), optimizer.counts


def values(model):
    return {p.name: np.array(p.data) for p in model.parameters()}


def own_half(comm, model, forward=None, together=False):
    def backward(step, users):
        use(model, bool(users) if together else comm.rank in users)
        loss_of((forward or model)(Tensor(rows(step)[comm.rank]))).backward()

    return backward


def data_parallel(comm, kind):
    """The optimizer has the flat array, and clipping reads the array's whole gradient, without gaps."""
    model = TwoBlocks()
    ddp = DistributedDataParallel(model, comm, **OPTIONS)
    optimizer = kind(ddp.flat, lr=0.1, **SETTINGS[kind])
    train(optimizer, ddp.flat.zero_grad, own_half(comm, model, ddp), lambda: clip_by_norm_(ddp.flat, 1.0, 1e9))
    return values(model), optimizer.counts


def by_parameter(comm, kind):
    """The optimizer has the parameters, and each bucket has one."""
    model = TwoBlocks()
    ddp = DistributedDataParallel(model, comm, bucket_cap_mb=1e-5, **OPTIONS)
    optimizer = kind(model.parameters(), lr=0.1, **SETTINGS[kind])
    train(optimizer, model.zero_grad, own_half(comm, model, ddp), lambda: ddp.flat.grad)
    return values(model), optimizer.counts


def offloaded(comm, kind):
    model = TwoBlocks()
    ddp = DistributedDataParallel(model, comm, **OPTIONS)
    optimizer = OffloadedOptimizer(ddp.flat, kind, HostPool(comm), lr=0.1, **SETTINGS[kind])
    train(optimizer, ddp.flat.zero_grad, own_half(comm, model, ddp))
    return values(model), optimizer.counts


def zero_1(comm, kind, stage=1):
    model = TwoBlocks()
    optimizer = ZeroOptimizer(model, kind, comm=comm, stage=stage, **SMALL, **OPTIONS, lr=0.1, **SETTINGS[kind])
    train(optimizer, optimizer.zero_grad, own_half(comm, model))
    return values(model), optimizer.counts


def zero_2(comm, kind):
    return zero_1(comm, kind, stage=2)


def sharded(comm, kind, policy=None, apart=False):
    """One unit; or one of each branch, which all ranks run or none."""
    model = TwoBlocks()
    parameters = list(model.parameters())
    for part in [*([model.first.branch, model.second.branch, model.first] if apart else []), model]:
        fully_shard(part, mesh=comm, offload_policy=policy, **SMALL, **OPTIONS)
    joins = {LAMB: {"layer_sums": LayerSums(parameters, comm)}, Muon: {"whole_matrices": WholeMatrices(parameters)}}
    optimizer = kind(sharded_parameters(model), lr=0.1, **SETTINGS[kind], **joins.get(kind, {}))
    train(optimizer, model.zero_grad, own_half(comm, model, together=apart))
    return gather_tensors(shards_of(model), optimizer)["weights"], optimizer.counts


def units(comm, kind):
    return sharded(comm, kind, apart=True)


def sharded_on_the_host(comm, kind):
    return sharded(comm, kind, CPUOffloadPolicy(HostPool(comm)))


def tensor_parallel(comm, kind):
    """Both ranks have all rows, and a half of the first block's branch."""
    model = TwoBlocks()
    expected, _ = one_device(kind)
    parallelize_module(model, comm, {"first.branch": partial(ColumnParallelLinear, gather_output=True)})
    axes = {"tp": comm}
    joins = {
        LAMB: {"layer_sums": LayerSums(model.parameters(), **axes)},
        Muon: {"whole_matrices": WholeMatrices(model.parameters(), **axes)},
    }
    optimizer = kind(model.parameters(), lr=0.1, **SETTINGS[kind], **joins.get(kind, {}))

    def backward(step, users):
        for rank, x in enumerate(rows(step)):
            use(model, rank in users)
            loss_of(model(Tensor(x))).backward()

    train(optimizer, model.zero_grad, backward)
    for p in model.parameters():  # this rank's part of each
        if p.layout is not None:
            np.testing.assert_allclose(p.data, local_tensor(expected[p.name], p.layout, axes), rtol=1e-12, atol=1e-13)
    return values(model) | {p.name: expected[p.name] for p in model.parameters() if p.layout}, optimizer.counts


def pipeline(comm, kind):
    """Two stages on the axis `pp`, each with two replicas on the axis `dp`, and two micro-batches each."""
    model = TwoBlocks()
    mesh = init_device_mesh(comm, (2, 2), ("dp", "pp"))
    pp, dp = mesh["pp"], mesh["dp"]
    stage = PipelineStage([model.first, model.second][pp.rank], pp.rank)
    pipe = Pipeline(pp, load_plan("1f1b", 2, 2), [stage], loss_of, reduce=Reduction(dp))
    optimizer = kind(stage.flat, lr=0.1, **SETTINGS[kind])

    def backward(step, users):
        use(model, dp.rank in users)
        half = rows(step)[dp.rank]
        pipe.step([half[:2], half[2:]], [half[:2], half[2:]])

    train(optimizer, pipe.zero_grad, backward)
    return values(stage.module), optimizer.counts


PROGRAMS = [data_parallel, by_parameter, zero_1, zero_2, sharded, units, tensor_parallel, pipeline]


@each("kind", SETTINGS)
@each("program", [*PROGRAMS, offloaded, sharded_on_the_host])
def test_a_branch_that_is_used_late_is_stepped_as_on_one_device(program, kind):
    if program is offloaded and kind in (LAMB, Muon):
        pytest.skip("they read each gradient twice, and are refused")
    expected, counts = one_device(kind, together=program is units)
    late = {name for name in expected if "branch" in name}
    assert counts == dict.fromkeys(late, 3)
    for weights, mine in SimWorld(4 if program is pipeline else 2).run(program, kind):
        for name, values in weights.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-11, atol=1e-13, err_msg=name)
        assert mine.items() <= counts.items()  # a rank has those of its part
