"""`--check-replicas`: every layout keeps its replicas equal bit for bit, and one that drifts is named."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.autograd import Parameter
from minidist.core.base.errors import MismatchError
from minidist.core.base.layout import Layout
from minidist.core.pipeline.runtime.reduction import SharedGradients
from minidist.job.checkpoint.held import LocalShard
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from minidist.parallel.replica_check import check_shard_replicas
from tests.cases import each
from tests.planning.test_volumes import SMALL, table

LAYOUTS = [
    (4, {"tp": 2, "zero": 3}),
    (8, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    (6, {"pp": 2, "microbatches": 3}),
    (6, {"pp": 2, "microbatches": 3, "zero": 2}),
    (4, {"tp": 4, "model": "llama", "kv_heads": 2}),
    (4, {"experts": 4, "ep": 2, "dp": 4}),
    (4, {"cp": 2, "zero": 1}),
]


@each(("ranks", "values"), LAYOUTS, sampled=6)
def test_copies_stay_equal_after_every_step_also_in_the_order_of_a_ring(ranks, values, tmp_path):
    with_check = table(tmp_path, ranks, **values, check_replicas=True)
    without = table(tmp_path, ranks, **values)
    assert with_check["metrics"] > without.get("metrics", 0)


def drifts(ranks, name, **values):
    config = TrainConfig.make(**{**SMALL, **values, "check_replicas": True})
    with pytest.raises(MismatchError, match=rf"after step 0 parameter '{name}.*not the same on rank \d as on rank \d"):
        SimWorld(ranks).run(train, config)


def test_a_tied_weight_whose_gradients_do_not_meet(monkeypatch):
    monkeypatch.setattr(SharedGradients, "add", lambda self: None)
    monkeypatch.setattr(SharedGradients, "mark_added", lambda self: None)
    drifts(2, r"transformer\.wte\.weight", pp=2)


def test_a_norm_whose_gradient_is_not_summed_over_tensor_parallel_ranks(monkeypatch):
    monkeypatch.setattr("minidist.parallel.tensor.sequence_parallel.copy_to_tensor_parallel_region", lambda x, comm: x)
    drifts(2, r"transformer\.(wpe|ln_f|h\.0)", tp=2, sequence_parallel=True)


def test_a_data_axis_that_sums_nothing(monkeypatch):
    monkeypatch.setattr("minidist.core.parallel.data_parallel.all_reduce", lambda comm, array, *a, **k: _Done())
    drifts(2, "transformer", dp=2)


class _Done:
    def wait(self):
        return None


@pytest.mark.parametrize(("values", "drifts"), [((1, 1, 2, 2), False), ((1, 3, 2, 2), True)])
def test_ranks_that_share_a_key_value_head_are_compared_with_each_other_alone(values, drifts):
    """Four tensor-parallel ranks and two key-value heads: ranks 0 and 1 hold the first one, 2 and 3 the second."""

    def program(comm):
        weight = Parameter(np.full((2, 4), values[comm.rank], np.float32), name="k_proj.weight")
        weight.layout = Layout((4, 4), ("tp",), (0,), copies=2)
        check_shard_replicas(comm, {"tp": comm}, [LocalShard(weight, weight.data.reshape(-1), 0, 8)], 0)

    if not drifts:
        SimWorld(4).run(program)
        return
    with pytest.raises(MismatchError, match=r"is not the same on rank 1 as on rank 0"):
        SimWorld(4).run(program)
