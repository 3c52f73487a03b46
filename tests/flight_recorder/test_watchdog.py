"""`flight_recorder.watch` writes the dump of a rank that makes no progress, once, and of no other."""

import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from minidist import flight_recorder
from minidist.core.base.errors import UsageError
from minidist.debug.flight_recorder import watchdog
from minidist.debug.flight_recorder.log_diagnosis import diagnose_files

PROGRAM = """
import datetime, sys
import torch, torch.distributed as dist
from minidist import flight_recorder

flight_recorder.watch(0.3, sys.argv[1])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
values = torch.ones(8)
dist.all_reduce(values)
try:
    if dist.get_rank() == 0:
        dist.broadcast(values, 0)
    else:
        dist.all_gather([torch.empty(8), torch.empty(8)], values)
except RuntimeError:
    pass
"""


def test_two_processes_of_gloo_that_hang(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "dumps")]
    processes = [subprocess.Popen(words, env={**common, "RANK": str(r), "WORLD_SIZE": "2"}) for r in range(2)]
    try:
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    found = diagnose_files(tmp_path / "dumps")
    assert found.circle == (0, 1)
    text = "\n".join(found.lines())
    assert "rank 0 waits in broadcast number 2 of Float [8], group 0 (default_pg)" in text


class Stop(BaseException):
    """Ends the loop that never returns."""


def written(statuses, monkeypatch, folder, seconds=2.0):
    """The times in tenths of a second at which a recorder with these statuses, one for each look, is dumped."""
    looks, times = iter(statuses), []
    clock = SimpleNamespace(now=0)

    def status(includeCollectives):
        assert includeCollectives is False
        found = next(looks, None)
        if found is None:
            raise Stop
        return found

    def dump(includeStackTraces):
        if includeStackTraces:
            assert not (folder / "fr_trace_rank_3").exists() or (folder / "fr_trace_rank_3").read_bytes() == b"first"
            times.append(clock.now)
        return b"dump" if includeStackTraces else b"first"

    monkeypatch.setattr(watchdog.time, "sleep", lambda s: setattr(clock, "now", clock.now + round(s * 10)))
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock.now / 10)
    recorder = SimpleNamespace(_dump_fr_trace_json=status, _dump_fr_trace=dump)
    distributed = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 3)
    with pytest.raises(Stop):
        watchdog.write_when_idle(recorder, distributed, seconds, folder)
    return times


def test_a_dump_is_written_once_when_the_numbers_stand_still(monkeypatch, tmp_path, capsys):
    assert written([b"1"] * 60, monkeypatch, tmp_path) == [22]
    assert (tmp_path / "fr_trace_rank_3").read_bytes() == b"dump"
    assert written([b"%d" % (n // 5) for n in range(60)], monkeypatch, tmp_path) == []
    assert len(written([b"1"] * 20 + [b"2"] * 20, monkeypatch, tmp_path)) == 2
    # A folder that has gone ends neither the thread nor the job.
    assert written([b"1"] * 20 + [b"2"] * 20, monkeypatch, tmp_path / "gone") == []
    assert capsys.readouterr().err.count("minidist: the dump cannot be written to") == 2


def test_what_is_missing_is_one_sentence(monkeypatch, tmp_path):
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = threading.active_count()
    with pytest.raises(UsageError, match="set TORCH_FR_BUFFER_SIZE=2000 before the program starts"):
        flight_recorder.watch(1, tmp_path)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    with pytest.raises(UsageError, match="Flight Recorder is off"):
        flight_recorder.watch(1, tmp_path)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20")
    for seconds in (0, -1, float("nan")):
        with pytest.raises(UsageError, match="above 0"):
            flight_recorder.watch(seconds, tmp_path)
    old = SimpleNamespace(__version__="2.4.0", distributed=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", old)
    with pytest.raises(UsageError, match=r"torch 2\.4\.0 has no torch"):
        flight_recorder.watch(1, tmp_path)
    assert threading.active_count() == threads
