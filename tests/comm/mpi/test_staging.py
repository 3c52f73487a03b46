"""Arrays on a device travel through host memory, and no message leaves before the copy is complete."""

import sys
import types

import numpy as np
import pytest

from minidist.comm.mpi import staging


class DeviceArray:
    """As much of a CuPy array as staging uses; logs what is done to it."""

    __cuda_array_interface__ = None

    def __init__(self, values, log):
        self.values, self.log = values, log
        self.shape, self.dtype = values.shape, values.dtype

    def get(self, out):
        self.log.append("get")
        out[...] = self.values

    def set(self, host):
        self.log.append("set")
        self.values[...] = host


@pytest.fixture
def log(monkeypatch):
    """Stand-ins for CuPy's modules; the calls in their order."""
    calls = []
    stream = types.SimpleNamespace(synchronize=lambda: calls.append("synchronize"))
    cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupyx", types.SimpleNamespace(empty_pinned=np.empty))
    return calls


def test_a_device_array_is_told_from_a_host_array():
    assert staging.is_device_array(DeviceArray(np.zeros(1), []))
    assert not staging.is_device_array(np.zeros(1))
    assert not staging.is_device_array([1.0])


def test_fetch_returns_when_the_bytes_are_on_the_host(log):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    host = staging.fetch(DeviceArray(values, log))
    np.testing.assert_array_equal(host, values)
    assert host.dtype == np.float32
    assert log == ["get", "synchronize"]


def test_put_returns_when_the_bytes_are_on_the_device(log):
    array = DeviceArray(np.zeros(3), log)
    staging.put(np.array([1.0, 2.0, 3.0]), array)
    np.testing.assert_array_equal(array.values, [1.0, 2.0, 3.0])
    assert log == ["set", "synchronize"]
