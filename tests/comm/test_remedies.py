"""What a user of PyTorch or mpi4py writes first is answered by one sentence with what to write here."""

import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.comm.remedies import NAMES
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base.errors import DeadlockError, MismatchError, UsageError
from minidist.core.collectives import all_reduce
from minidist.core.nn import MLP, Module
from minidist.core.optim import SGD
from minidist.core.parallel.fsdp import fully_shard, sharded_parameters
from minidist.parallel.data_parallel import DistributedDataParallel
from tests.mpi_runner import mpiexec


class NoForward(Module):
    pass


def a_loss():
    return cross_entropy(MLP([4, 3])(np.ones((2, 4), np.float32)), np.arange(2))


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (
            lambda comm: SGD(MLP([4, 3]).parameters(), lr=0.1).zero_grad(),
            r"SGD has no zero_grad: .*model.zero_grad\(\)",
        ),
        (lambda comm: comm.Get_rank(), r"has no Get_rank: write comm.rank$"),
        (lambda comm: comm.Get_size(), r"has no Get_size: write comm.size$"),
        (lambda comm: comm.allreduce(1.0), r"has no allreduce: write all_reduce\(comm, array\)"),
        (lambda comm: comm.Allreduce(np.ones(2)), r"has no Allreduce: write all_reduce\(comm, array\)"),
        (lambda comm: comm.Send(np.ones(2), 1), r"has no Send: write comm.send\(array, dest\)$"),
        (lambda comm: comm.Recv(np.ones(2), 1), r"has no Recv: write comm.recv\(array, source\)$"),
        (lambda comm: comm.Bcast(np.ones(2)), r"has no Bcast: write broadcast\(comm, array, root\)"),
        (lambda comm: a_loss().numpy(), r"Tensor has no numpy: write x.data$"),
        (lambda comm: f"{a_loss():.3f}", r"loss.item\(\)"),
        (lambda comm: a_loss() > 3, r"compared.*loss.item\(\)"),
        (lambda comm: a_loss() <= 3, r"compared.*loss.item\(\)"),
        (lambda comm: np.tanh(a_loss()), r"x.tanh\(\)"),
        (lambda comm: np.tanh(next(MLP([4, 3]).parameters())), r"x.tanh\(\)"),
        (lambda comm: MLP([4, 3]).cuda(), r'MLP has no cuda: write model.to\("cuda"\)$'),
        (lambda comm: NoForward()(1), r"^NoForward has no forward: define forward\(self, x\)"),
        (
            lambda comm: SGD(fully_shard(MLP([4, 3]), mesh=comm).parameters(), lr=0.1),
            r"^parameter 'layers.0.weight' of shape \(3, 4\) is released: make the optimizer of sharded_param",
        ),
        (lambda comm: fully_shard(MLP([4, 3])), r"write fully_shard\(model, mesh=comm\)$"),
        (lambda comm: fully_shard(MLP([4, 3]), comm), r"write fully_shard\(model, mesh=comm\)$"),
        (lambda comm: DistributedDataParallel(MLP([4, 3])), r"write DistributedDataParallel\(model, comm\)$"),
    ],
)
def test_a_name_of_another_library_is_answered_by_the_one_here(program, sentence):
    with pytest.raises(UsageError, match=f"(?m){sentence}") as caught:
        SimWorld(1).run(program)
    assert "\n" not in str(caught.value)


def test_other_exceptions_and_attributes_stay():
    def fails(comm):
        assert not hasattr(Tensor(np.ones(2)), "numpy")
        comm.nothing()

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        SimWorld(1).run(fails)
    with pytest.raises(NotImplementedError, match="todo"):
        SimWorld(1).run(lambda comm: (_ for _ in ()).throw(NotImplementedError("todo")))


def test_what_the_sentences_name_exists():
    def program(comm):
        for text in NAMES["PointToPoint"].values():
            name, _, place = text.removeprefix("write ").partition(", from ")
            owner = import_module(place) if place else comm
            assert hasattr(owner, name.partition("(")[0].removeprefix("comm.")), text

    SimWorld(1).run(program)


def test_a_program_without_a_parameter_is_refused_before_the_run():
    def main():
        raise AssertionError

    with pytest.raises(UsageError, match=r"^main\(\) has no parameter, .*: write def main\(comm\)"):
        SimWorld(2).run(main)
    assert SimWorld(1).run(lambda *all: len(all)) == [1]


@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec")
@pytest.mark.parametrize(
    ("head", "sentence"), [("comm", "comm has no Get_rank: write comm.rank"), ("", "write def main")]
)
def test_under_mpiexec_the_sentence_is_the_same(tmp_path, head, sentence):
    program = tmp_path / "program.py"
    program.write_text(f"from minidist.comm import launch\ndef main({head}):\n    comm.Get_rank()\nlaunch(main)\n")
    answer = subprocess.run(
        [mpiexec(), "-n", "2", sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.returncode
    assert sentence in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_deadlock_of_calls_on_two_communicators_names_both():
    def program(comm):
        part = comm.split(comm.rank % 2)
        all_reduce(comm if comm.rank else part, np.zeros(4))

    with pytest.raises(DeadlockError) as caught:
        SimWorld(4).run(program)
    said = "all_reduce/ring is called by rank 0 on world.1color0 (ranks 0, 2), and by ranks 1, 2, 3 on world (ranks 0, "
    assert said in str(caught.value)


def test_a_deadlock_names_no_checksum():
    """Ranks compare the weights by them; where none has found a difference, they explain nothing."""

    def program(comm):
        model = DistributedDataParallel(MLP([2, 2]), comm)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(2 - comm.rank):
            model(Tensor(np.ones((1, 2), np.float32))).sum().backward()
            optimizer.step()

    with pytest.raises(
        DeadlockError, match=r"all_reduce/ring avg model \d+ after 1 update with lr 0.1: receive"
    ) as caught:
        SimWorld(2).run(program)
    assert "checksum" not in str(caught.value)


def test_a_rank_that_forgets_backward_is_told_so():
    def program(comm):
        model = MLP([8, 8, 4])
        fully_shard(model, mesh=comm)
        optimizer = SGD(sharded_parameters(model), lr=0.1)
        for _ in range(2):
            loss = cross_entropy(model(np.ones((4, 8), np.float32)), np.arange(4))
            if comm.rank == 1:
                loss.backward()
            optimizer.step()

    here = r"\(\S+test_remedies\.py:\d+\)"
    sentence = rf"rank 1 is in the backward pass {here} and rank 0 in a forward pass {here}: every rank must call back"
    with pytest.raises(MismatchError, match=sentence):
        SimWorld(2).run(program)
