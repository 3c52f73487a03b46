"""An algorithm of a program's own, registered there or in a file, runs wherever an algorithm's name is taken."""

import inspect
import textwrap

import numpy as np
import pytest

from minidist import collectives
from minidist.collectives import algorithm, load_algorithm
from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.auto import cheapest
from minidist.comm import SimWorld
from minidist.core.base.errors import MismatchError, UsageError
from minidist.core.nn import MLP
from minidist.parallel.data_parallel import DistributedDataParallel
from tests.cases import each

STAR = textwrap.dedent(
    '''
    import numpy as np
    from minidist.collectives import algorithm

    @algorithm("all_reduce", "star")
    def star(comm, array, op):
        """Everything to everybody; rank 0 tells two messages apart by their tags."""
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        got = {rank: np.empty_like(array) for rank in others}
        sends = [comm.isend(array.copy(), rank, tag=1) for rank in others]
        comm.waitall([comm.irecv(got[rank], rank, tag=1) for rank in others])
        comm.waitall(sends)
        total = sum((got.get(rank, array) for rank in range(comm.size)), np.zeros_like(array))
        array[...] = total / comm.size if op == "avg" else total

    def all_gather(comm, shard, sizes, out):
        start = np.cumsum([0, *sizes])
        for rank in range(comm.size):
            piece = out[start[rank] : start[rank + 1]]
            if rank == comm.rank:
                piece[...] = shard.reshape(-1)
                comm.waitall([comm.isend(piece, other) for other in range(comm.size) if other != rank])
            else:
                comm.recv(piece, rank)
    '''
)


@pytest.fixture
def file(tmp_path):
    """Write a file; forget afterwards what it registered."""
    before = {operation: (dict(entries), dict(entries.aliases)) for operation, entries in ALGORITHMS.items()}

    def write(text, name="mine.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    yield write
    for operation, (entries, aliases) in before.items():
        ALGORITHMS[operation].clear()
        ALGORITHMS[operation].update(entries)
        ALGORITHMS[operation].aliases = aliases


def total(comm, name, async_op=False):
    result = collectives.all_reduce(comm, np.arange(3.0) + comm.rank, algorithm=name, async_op=async_op)
    return (result.wait() if async_op else result).tolist()


@pytest.mark.parametrize("async_op", [False, True])
def test_a_decorated_function_of_a_file_runs_by_its_path_and_by_its_name(file, async_op):
    path = file(STAR)
    world = SimWorld(3)
    assert world.run(total, f"{path}:star", async_op) == [[3, 6, 9]] * 3
    assert {message.operation for message in world.traces[0].messages} == {"all_reduce/star"}
    assert SimWorld(3).run(total, "star") == [[3, 6, 9]] * 3
    assert load_algorithm(f"{path}:star") == ("all_reduce", ALGORITHMS["all_reduce"]["star"])


def test_a_function_without_a_decorator_is_of_the_operation_that_calls_it(file):
    path = file(STAR)

    def program(comm):
        return collectives.all_gather(comm, np.full(2, comm.rank), algorithm=f"{path}:all_gather").tolist()

    world = SimWorld(3)
    assert world.run(program) == [[0, 0, 1, 1, 2, 2]] * 3
    assert {message.operation for message in world.traces[0].messages} == {"all_gather/my_all_gather"}


def test_data_parallelism_takes_it(file):
    path = file(STAR)

    def program(comm, name):
        from minidist.core.autograd import Tensor, cross_entropy

        model = DistributedDataParallel(MLP([4, 3]), comm, algorithm=name)
        rows = np.random.default_rng(comm.rank).standard_normal((5, 4)).astype(np.float32)
        cross_entropy(model(Tensor(rows)), np.arange(5) % 3).backward()
        return [parameter.grad.copy() for parameter in model.parameters()]

    world = SimWorld(3)
    for mine, theirs in zip(world.run(program, f"{path}:star"), SimWorld(3).run(program, "ordered"), strict=True):
        assert all(np.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(mine, theirs, strict=True))
    assert "all_reduce/star avg" in {message.operation for message in world.traces[0].messages}
    with pytest.raises(UsageError, match="unknown all_reduce algorithm 'rnig'"):
        SimWorld(1).run(lambda comm: DistributedDataParallel(MLP([4, 3]), comm, algorithm="rnig") and None)


def test_auto_takes_an_algorithm_from_the_moment_of_its_registration_if_it_has_a_formula(file):
    assert cheapest("all_reduce", 8, 4, 1e-6, 1e-10) == "recursive_doubling"
    algorithm("all_reduce", "slow")(lambda comm, array, op: array)
    assert cheapest("all_reduce", 8, 4, 1e-6, 1e-10) == "recursive_doubling"
    algorithm("all_reduce", "quick", seconds=lambda nbytes, ranks, alpha, beta: 0.0)(lambda comm, array, op: array)
    assert cheapest("all_reduce", 8, 4, 1e-6, 1e-10) == "quick"
    with pytest.raises(UsageError, match="all_reduce/slow was registered without `seconds`; pass it to @algorithm"):
        collectives.seconds("all_reduce", "slow", 8, 4, 1e-6, 1e-10)
    with pytest.raises(UsageError, match="without `sends`"):
        collectives.volume("all_reduce", "quick", 8, 4, 0)


def test_a_mismatch_in_it_names_its_own_line(file):
    program = """
        import numpy as np
        def all_reduce(comm, array, op):
            other = 1 - comm.rank
            comm.sendrecv(array, other, np.empty(array.size + comm.rank), other)
        """
    path = file(program)
    with pytest.raises(MismatchError) as caught:
        SimWorld(2).run(total, f"{path}:all_reduce")
    assert str(caught.value).count("mine.py:5") == 1
    assert "test_own_algorithms.py" not in str(caught.value)


def in_another_array(comm, array, op):
    return array.copy()


REFUSED = {
    "a sum in another array": (
        lambda: use("all_reduce", in_another_array),
        "rank 0: all_reduce/mine returned another array than the array that it is given; write the result into",
    ),
    "another array than out": (
        lambda: use("all_gather", lambda comm, shard, sizes, out: out.copy()),
        "rank 0: all_gather/mine returned another array than out",
    ),
    "no result": (
        lambda: use("reduce", lambda comm, array, root, op: None),
        "rank 0: reduce/mine returned nothing; it must return an array of 2 elements of float64",
    ),
    "a result of another size": (
        lambda: use("all_to_all", lambda comm, array, sends, receives: array[:1]),
        "rank 0: all_to_all/mine returned a value of type ndarray; it must return an array of 2 elements",
    ),
    "too few parameters": (
        lambda: algorithm("all_reduce", "mine")(lambda comm, array: array),
        r"all_reduce/mine cannot be called with \(comm, array, op\): too many positional arguments",
    ),
    "an algorithm of minidist": (
        lambda: algorithm("all_reduce", "ring")(in_another_array),
        "all_reduce has an algorithm 'ring' in minidist; choose another name",
    ),
    "an unknown operation": (lambda: algorithm("allreduce", "mine"), "did you mean 'all_reduce'"),
    "a name that means something": (lambda: algorithm("all_reduce", "auto"), "must be a word, and not 'auto'"),
    "a name of two words": (lambda: algorithm("all_reduce", "my own"), "'my own'; it must be a word"),
    "no file": (lambda: load_algorithm("nowhere.py:f"), "file 'nowhere.py' does not exist; write FILE.py:FUNCTION"),
}


def use(operation, function):
    algorithm(operation, "mine")(function)

    def program(comm):
        return getattr(collectives, operation)(comm, np.ones(2), algorithm="mine")

    return SimWorld(1).run(program)


@each("what", REFUSED)
@pytest.mark.usefixtures("file")
def test_what_cannot_work_is_refused_with_the_remedy(what):
    call, words = REFUSED[what]
    with pytest.raises(UsageError, match=words):
        call()


def test_a_function_that_may_be_registered_again(file):
    """A notebook's cell runs twice."""
    for _ in range(2):
        algorithm("all_reduce", "mine")(in_another_array)
    assert inspect.unwrap(ALGORITHMS["all_reduce"]["mine"].run) is in_another_array


def test_a_function_of_no_operation(file):
    path = file("def f(comm, array, op):\n    return array\n")
    with pytest.raises(UsageError, match="says no operation; decorate it with @algorithm"):
        load_algorithm(f"{path}:f")
    assert load_algorithm(f"{path}:f", "all_reduce")[0] == "all_reduce"
