"""Buffers in every form in which mpi4py takes them, and derived datatypes against NumPy's indexing."""

import array

import numpy as np
import pytest

from minidist.debug.mpi_ranks.buffers import each, one, vector
from minidist.debug.mpi_ranks.datatype import Datatype
from minidist.debug.mpi_ranks.module import from_numpy_dtype, to_numpy_dtype
from minidist.debug.mpi_ranks.op import OPS, Op
from tests.mpi_ranks.on_ranks import on_ranks

DOUBLE, INT, BYTE = (Datatype.names[name] for name in ("DOUBLE", "INT", "BYTE"))


def test_a_message_in_every_form():
    data = np.arange(6.0)
    for message, expected in (
        (data, data),
        ([data, DOUBLE], data),
        ([data, "d"], data),
        ([data, 2], data[:2]),
        ([data, (2, 3)], data[3:5]),
        ([data, 2, DOUBLE], data[:2]),
        ([data, (2, 3), "d"], data[3:5]),
        ([data, 2, 3, DOUBLE], data[3:5]),
        (data.reshape(2, 3).T, data),  # as it lies in memory
        (array.array("d", data), data),
        (memoryview(data), data),
        ([bytearray(data.tobytes()), DOUBLE], data),
        ([None, 0, INT], []),
    ):
        assert one(message, False).get().tolist() == list(expected), message
    assert one(bytearray(b"ab"), True).datatype == BYTE
    assert one(data, False).get().base is not None  # no copy


def test_blocks_for_each_rank():
    data = np.arange(7.0)
    assert vector(data, False, 3).counts == [3, 2, 2]
    for message, blocks in (
        ([data, [1, 2]], [[0], [1, 2]]),
        ([data, ([1, 2], [4, 1])], [[4], [1, 2]]),
        ([data, [1, 2], [4, 1], DOUBLE], [[4], [1, 2]]),
        ([data, 2, 3, "d"], [[0, 1], [3, 4]]),
    ):
        buffer = vector(message, True, 2)
        assert [block.get().tolist() for block in buffer.blocks()] == blocks
        assert buffer.get().tolist() == [*blocks[0], *blocks[1]]
        buffer.put(buffer.get() * 1)
        assert (data == np.arange(7)).all()
    assert [b.get().tolist() for b in each([data, [1, 2], [8, 16], [DOUBLE] * 2], False, 2)] == [[1], [2, 3]]


def test_what_is_wrong_with_a_message():
    data = np.arange(4.0)
    frozen = data.copy()
    frozen.flags.writeable = False
    for message, error in (
        (3, TypeError),
        ([data], ValueError),
        ([data, 5], ValueError),  # MPI would write behind the array
        ([data, -1], ValueError),
        ([data, (1, -1)], ValueError),
        ([data, (1, 9)], ValueError),
        ([None, 1, DOUBLE], ValueError),
        ([bytearray(7), DOUBLE], ValueError),
        (data[::2], BufferError),
        ([data, "no such type"], KeyError),
        (frozen, BufferError),
    ):
        with pytest.raises(error):
            one(message, True)
    with pytest.raises(ValueError, match="required number of blocks 3"):
        one(data, True, blocks=3)
    with pytest.raises(ValueError, match="expecting 2 items"):
        vector([data, [1, 2, 3]], True, 2)


def test_derived_datatypes_are_numpy_s_indices():
    table = np.arange(24.0).reshape(4, 6)
    column = DOUBLE.Create_vector(4, 1, 6)
    for datatype, count, expected in (
        (DOUBLE.Create_contiguous(3), 2, table.flat[:6]),
        (column, 1, table[:, 0]),
        (column.Create_resized(0, 8).Commit(), 2, table[:, :2].T),
        (DOUBLE.Create_hvector(2, 2, 48), 1, table[:2, :2]),
        (DOUBLE.Create_indexed([1, 2], [5, 0]), 1, [5, 0, 1]),
        (DOUBLE.Create_hindexed([1, 1], [8, 40]), 1, [1, 5]),
        (DOUBLE.Create_indexed_block(2, [4, 0]), 1, [4, 5, 0, 1]),
        (DOUBLE.Create_subarray([4, 6], [2, 3], [1, 2]), 1, table[1:3, 2:5]),
        (DOUBLE.Create_subarray([6, 4], [3, 2], [2, 1], order=57), 1, table.T[2:5, 1:3].T),
        (Datatype.Create_struct([1, 2], [0, 16], [DOUBLE, DOUBLE]), 1, [0, 2, 3]),
        (column.Create_contiguous(1).Dup(), 1, table[:, 0]),
    ):
        buffer = one([table, count, datatype], True)
        assert buffer.get().tolist() == np.ravel(expected).tolist()
        copy = table.copy()
        one([copy, count, datatype], True).put(-buffer.get())
        assert (copy == np.where(np.isin(table, expected), -table, table)).all()
        assert datatype.Get_size() == len(np.ravel(expected)) * 8 // count
    with pytest.raises(NotImplementedError, match="more than 16,777,216 elements"):
        BYTE.Create_contiguous(2**31 - 1)
    with pytest.raises(ValueError, match="buffer too small"):
        one([np.zeros(5), 1, column], True)


def test_structs_become_dtypes_and_back():
    dtype = np.dtype([("a", "i4"), ("b", "f8", (2,)), ("c", "u1")], align=True)
    rows = np.zeros(3, dtype)
    rows["a"], rows["b"], rows["c"] = [1, 2, 3], [[4, 5]] * 3, 6
    struct = from_numpy_dtype(dtype)
    assert (struct.size, struct.extent) == (4 + 16 + 1, dtype.itemsize)
    copy = np.zeros_like(rows)
    one([copy, struct], True).put(one([rows, struct], False).get())
    assert (copy == rows).all()
    assert to_numpy_dtype(from_numpy_dtype("f4")) == np.float32


class Foreign:
    """An array that says by DLPack alone where it lies."""

    def __init__(self, values):
        self.values = values
        self.__dlpack__, self.__dlpack_device__ = values.__dlpack__, values.__dlpack_device__


def test_memory_that_is_named_by_dlpack():
    values = np.arange(6.0).reshape(2, 3)
    assert one(Foreign(values), False).get().tolist() == values.ravel().tolist()
    one(Foreign(values), True).put(np.ones(6))
    assert values.sum() == 6
    assert one(Foreign(values.T), False).get().size == 6
    with pytest.raises(BufferError, match="not contiguous"):
        one(Foreign(values[:, ::2]), False)
    values.flags.writeable = False
    with pytest.raises(BufferError, match="readonly"):
        one(Foreign(values), True)


def test_derived_datatypes_travel():
    """A column of one rank becomes a row of the other, and datatypes with absolute addresses need no buffer."""

    def main(comm, MPI):
        table = np.arange(12.0).reshape(3, 4)
        column = MPI.DOUBLE.Create_vector(3, 1, 4).Commit()
        if comm.rank == 0:
            comm.Send([table, 1, column], 1)
            comm.Send([table.ravel()[1:], 1, column], 1)
        else:
            comm.Recv(row := np.empty(3))
            assert row.tolist() == [0, 4, 8]
            there = MPI.DOUBLE.Create_hindexed([3], [MPI.Get_address(row)])
            comm.Recv([MPI.BOTTOM, 1, there])
            assert row.tolist() == [1, 5, 9]
            there.Free()
            assert there == MPI.DATATYPE_NULL

    on_ranks(2, main)


def test_operations_of_objects_and_their_errors():
    assert OPS["MAXLOC"]((1, 5), (1, 3)) == (1, 3)
    assert (OPS["REPLACE"](1, 2), OPS["NO_OP"](1, 2), OPS["LXOR"](2, 0)) == (2, 1, True)
    with pytest.raises(ValueError, match="OP_NULL"):
        Op()(1, 2)
    with pytest.raises(RuntimeError, match="predefined"):
        OPS["SUM"].Free()
