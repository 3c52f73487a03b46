"""What the tests of UCSD CSE 234's assignments 2 and 3 demand, in our words, of answers that are written here.

A program of mpi4py for 4 or 8 ranks: two collectives made of messages, the groups of a layout and their rows, what a
layer of tensor parallelism gathers and scatters, and experts that lie on different ranks. The names are the course's.
"""

import numpy as np
from mpi4py import MPI

# The answers ----------------------------------------------------------------------------------------------------------


def myAllreduce(comm, src_array, dest_array, op=MPI.SUM):
    rank, size = comm.Get_rank(), comm.Get_size()
    fold = next(f for o, f in ((MPI.SUM, np.add), (MPI.MIN, np.minimum), (MPI.MAX, np.maximum)) if o == op)
    dest_array[...] = src_array
    travelling = src_array.copy()
    for _ in range(size - 1):
        incoming = np.empty_like(travelling)
        comm.Sendrecv(travelling, (rank + 1) % size, recvbuf=incoming, source=(rank - 1) % size)
        fold(dest_array, incoming, out=dest_array)
        travelling = incoming


def myAlltoall(comm, src_array, dest_array):
    rank, size = comm.Get_rank(), comm.Get_size()
    mine, yours = np.split(src_array, size), np.split(dest_array, size)
    requests = [comm.Irecv(yours[other], other) for other in range(size) if other != rank]
    requests += [comm.Isend(mine[other], other) for other in range(size) if other != rank]
    yours[rank][...] = mine[rank]
    MPI.Request.Waitall(requests)


def get_info(comm, rank, mp_size, dp_size, fc_layer, in_dim, out_dim):
    mp_idx, dp_idx = rank % mp_size, rank // mp_size
    parts = (in_dim // mp_size, out_dim) if fc_layer == "fc_o" else (in_dim, out_dim // mp_size)
    return mp_idx, dp_idx, comm.Split(dp_idx, rank), comm.Split(mp_idx, rank), *parts


def split_data(x_train, y_train, mp_size, dp_size, rank):
    rows = len(x_train) // dp_size
    own = slice(rank // mp_size * rows, (rank // mp_size + 1) * rows)
    return x_train[own], y_train[own]


def gathered(x, comm):
    parts = np.empty((comm.Get_size(), *x.shape), x.dtype)
    comm.Allgather(np.ascontiguousarray(x), parts)
    return np.concatenate(parts, axis=-1)


def naive_collect_forward_input(x, mp_comm, mp_size):
    return gathered(x, mp_comm)


def naive_collect_forward_output(out, mp_comm, mp_size):
    return gathered(out, mp_comm)


def naive_collect_backward_output(output_grad, mp_group_idx, mp_size):
    return np.split(output_grad, mp_size, axis=-1)[mp_group_idx]


def naive_collect_backward_x(grad_x, mp_comm, mp_size):
    parts = np.stack(np.split(grad_x, mp_size, axis=-1))
    mine = np.empty_like(parts[0])
    mp_comm.Reduce_scatter_block(parts, mine)
    return mine


class MoE_EP:
    def __init__(self, router, expert, topk, comm):
        self.router, self.expert, self.topk, self.comm = router, expert, topk, comm

    def forward(self, x):
        indices, gates = self.router(x, self.topk)
        places = [np.nonzero(indices == other) for other in range(self.comm.Get_size())]
        arrived = self.comm.alltoall([x[rows] for rows, _ in places])
        ends = np.cumsum([len(rows) for rows in arrived])[:-1]
        back = self.comm.alltoall(np.split(self.expert(np.concatenate(arrived)), ends))
        outputs = np.zeros((len(x), back[0].shape[1]))
        for (rows, choices), results in zip(places, back, strict=True):
            outputs[rows] += gates[rows, choices][:, None] * results
        return outputs


# What is demanded of them ---------------------------------------------------------------------------------------------


def test_collectives(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    draw = np.random.default_rng(rank)
    for op in (MPI.SUM, MPI.MIN, MPI.MAX):
        source = draw.integers(0, 100, 64)
        mine, theirs = np.empty_like(source), np.empty_like(source)
        myAllreduce(comm, source, mine, op)
        comm.Allreduce(source, theirs, op)
        assert (mine == theirs).all()
    source = draw.integers(0, 100, 3 * size)
    mine, theirs = np.empty_like(source), np.empty_like(source)
    myAlltoall(comm, source, mine)
    comm.Alltoall(source, theirs)
    assert (mine == theirs).all()


def test_get_info_and_split_data(comm, mp_size, dp_size):
    rank = comm.Get_rank()
    x, y = np.arange(dp_size * 10.0).reshape(-1, 2), np.arange(dp_size * 5)
    for layer, parts in (("fc_q", (8, 16 // mp_size)), ("fc_o", (8 // mp_size, 16))):
        mp_idx, dp_idx, mp_comm, dp_comm, *dims = get_info(comm, rank, mp_size, dp_size, layer, 8, 16)
        assert (mp_idx, dp_idx) == (rank % mp_size, rank // mp_size)
        assert tuple(dims) == parts
        assert mp_comm.allgather(rank) == [mp_size * dp_idx + other for other in range(mp_size)]
        assert dp_comm.allgather(rank) == [mp_idx + mp_size * other for other in range(dp_size)]
    own_x, own_y = split_data(x, y, mp_size, dp_size, rank)
    assert (np.concatenate(dp_comm.allgather(own_x)) == x).all()
    assert (np.concatenate(dp_comm.allgather(own_y)) == y).all()
    assert all((other == own_y).all() for other in mp_comm.allgather(own_y))


def test_tensor_parallel(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    draw = np.random.default_rng(1)
    x, gradients = draw.normal(size=(2, 3, 2 * size)), draw.normal(size=(size, 2, 3, 2 * size))
    own = np.split(x, size, axis=-1)[rank]
    assert (naive_collect_forward_input(own, comm, size) == x).all()
    assert (naive_collect_forward_output(own, comm, size) == x).all()
    assert (naive_collect_backward_output(x, rank, size) == own).all()
    wanted = np.split(gradients.sum(axis=0), size, axis=-1)[rank]
    np.testing.assert_allclose(naive_collect_backward_x(gradients[rank], comm, size), wanted, rtol=1e-12)


def test_experts(comm, topk):
    rank, size = comm.Get_rank(), comm.Get_size()
    draw = np.random.default_rng(2)
    weights, x = draw.normal(size=(size, 4, 5)), draw.normal(size=(9, 4))
    logits = x @ draw.normal(size=(4, size))

    def router(rows, topk):
        scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        indices = np.argsort(-scores, axis=1)[:, :topk]
        gates = np.take_along_axis(scores, indices, axis=1)
        return indices, gates / gates.sum(axis=1, keepdims=True)

    indices, gates = router(x, topk)
    wanted = [
        sum(gate * row @ weights[number] for number, gate in zip(numbers, shares, strict=True))
        for row, numbers, shares in zip(x, indices, gates, strict=True)
    ]
    got = MoE_EP(router, lambda rows: rows @ weights[rank], topk, comm).forward(x)
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


def main():
    comm = MPI.COMM_WORLD
    test_collectives(comm)
    size = comm.Get_size()
    for mp_size in (1, 2, 4):
        test_get_info_and_split_data(comm, mp_size, size // mp_size)
    test_tensor_parallel(comm)
    for topk in (1, 2, size):
        test_experts(comm, topk)
    if comm.allreduce(1) == size and comm.Get_rank() == 0:
        print(size, "ranks passed")


main()
