"""Who writes or reads a tensor of an operation that has not been waited for, and who does nothing wrong."""

import re

import pytest

from minidist.comm.errors import BufferReuseError
from minidist.core.base.errors import MinidistError
from tests.torch_ranks.programs import HEAD, run_source

torch = pytest.importorskip("torch")
Settings = pytest.importorskip("minidist.debug.torch_ranks.program").Settings
pytestmark = pytest.mark.peers


def said(tmp_path, source, **options):
    """The races of a program on 2 ranks; "" for none."""
    try:
        run_source(tmp_path, HEAD + source, 2, "race.py", **options)
    except BufferReuseError as error:
        return re.sub(r"\S*/race", "race", str(error))
    return ""


SENT = "rank 0: the tensor of its isend of float32[4] to rank 1 at race.py:6 has changed between then and its wait() at"
RECEIVED = "rank 1: the tensor of its irecv of float32[4] from rank 0 at race.py:10 is"
# The lines 5 to 8 are rank 0's, then follow rank 1's.
PAIR = "if r == 0:\n    w = dist.isend(t, 1)\n    {}\n    w.wait()\n" + (
    "else:\n    w = dist.irecv(t, 0)\n    {}\n    w.wait()\n"
)
RACES = {
    "a write": (PAIR.format("t.fill_(9)", ""), [f"{SENT} race.py:8"]),
    "a write by NumPy": (PAIR.format("t.numpy()[1] = 9", ""), [f"{SENT} race.py:8"]),
    "a read": (PAIR.format("", "t.clone()"), [f"{RECEIVED} read by clone at race.py:11"]),
    "a read of an element": (PAIR.format("", "t[1].item()"), [f"{RECEIVED} read by item at race.py:11"]),
    "a read of a view": (PAIR.format("", "v = t.view(2, 2)[0]; v + 1"), [f"{RECEIVED} read by add at race.py:11"]),
    "another layout": (PAIR.format("", "t.to_sparse()"), [f"{RECEIVED} read by to_sparse at race.py:11"]),
    "a print": (PAIR.format("", "print(t)"), [f"{RECEIVED} read by __repr__ at race.py:11"]),
    "a layer": (PAIR.format("", "torch.nn.Linear(4, 4)(t)"), [f"{RECEIVED} read by linear at race.py:11"]),
    "a write into what is received": (PAIR.format("", "t.zero_()"), [f"{RECEIVED} changed by zero_ at race.py:11"]),
    "both sides": (PAIR.format("t[0] = 9", "t * 2"), [f"{SENT} race.py:8", f"{RECEIVED} read by mul at race.py:11"]),
    "a copy into another tensor": (
        PAIR.format("", "torch.zeros(4).copy_(t)"),
        [f"{RECEIVED} read by copy_ at race.py:11"],
    ),
    "a gradient": (
        "w = dist.all_reduce(t, async_op=True)\ntotal = t / n\nw.wait()\n",
        [
            f"rank {r}: the tensor of its all_reduce of float32[4] at race.py:5 is read by div at race.py:6"
            for r in (0, 1)
        ],
    ),
    "an input": (
        "out = torch.empty(8)\nw = dist.all_gather_into_tensor(out, t, async_op=True)\nt.add_(1)\nw.wait()\n",
        ["rank 1: the tensor of its all_gather of float32[4] at race.py:6 has changed between then and its wait() at"],
    ),
    "another operation": (
        "w = dist.all_reduce(t, async_op=True)\nv = dist.broadcast(t, 0, async_op=True)\nw.wait()\nv.wait()\n",
        ["rank 1: the tensor of its all_reduce of float32[4] at race.py:5 is read by broadcast of float32[4] at race"],
    ),
    "a loop": (
        "for step in range(10**9):\n    w = dist.all_reduce(t, async_op=True)\n    t.mean()\n    w.wait()\n",
        ["read by mean at race.py:7"],
    ),
    "no wait": (
        "if r == 0:\n    dist.isend(t, 1)\n    t.fill_(9)\nelse:\n    dist.recv(t, 0)\n",
        ["has changed between then and the end of the program, which does not wait for it"],
    ),
}


def test_every_race_has_both_lines(tmp_path):
    for name, (source, parts) in RACES.items():
        text = said(tmp_path, source)
        for part in parts:
            assert part in text, (name, text)
        assert len(text.split("\n")) == len(set(text.split("\n"))), (name, text)
        if name not in ("a loop", "no wait"):
            assert said(tmp_path, source, checks="headers") == "", name


RIGHT = {
    "its form": PAIR.format(
        "t.sum()", "t.shape, t.dtype, len(t), t.numel(), t.is_contiguous(), t.device, t.data_ptr(), t.requires_grad_()"
    ),
    "a view that is used after the wait": PAIR.format("", "v = t[:2]") + "if r:\n    v += 1\n",
    "reads after the wait": PAIR.format("", "")
    + "assert type(t) is torch.Tensor and '_minidist_operation' not in vars(t)\n",
    "blocking calls": "dist.all_reduce(t)\nt += 1\ndist.broadcast(t, 0)\nprint(t)\n",
    "what is computed meanwhile": "w = dist.all_reduce(t, async_op=True)\nu = torch.ones(4) * 2\nw.wait()\nt *= u\n",
    "functional collectives": (
        "import torch.distributed._functional_collectives as f\nx = f.all_reduce(t, 'sum', list(range(n)))\n"
        "assert (x + 1).tolist() == [n + 1.0] * 4\n"
    ),
    "memory that is given back": (
        "o = torch.empty(2)\nw = dist.reduce_scatter_tensor(o, t, async_op=True)\nt.untyped_storage().resize_(0)\n"
        "w.wait()\n"
    ),
}


def test_what_is_no_race(tmp_path):
    for name, source in RIGHT.items():
        assert said(tmp_path, source) == "", name


def test_a_race_is_a_note_of_the_error_that_it_leads_to(tmp_path):
    with pytest.raises(MinidistError, match="deadlock") as raised:
        run_source(tmp_path, HEAD + PAIR.format("t.fill_(9)", "") + "if r:\n    dist.recv(t, 0)\n", 2)
    assert [("isend" in note, raised.value.__notes__.count(note)) for note in raised.value.__notes__] == [(True, 1)]


def test_processes_and_synchronized_devices_are_watched_and_waited_for(tmp_path):
    """The error of a process is that of the program that has started it, too: a race stands in it once."""
    source = (
        "import os, torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def main(r, n):\n    dist.init_process_group('gloo', rank=r, world_size=n)\n    t = torch.ones(4)\n"
        "    w = dist.all_reduce(t, async_op=True)\n    t.sum()\n    w.wait()\n    dist.all_reduce(torch.ones(4 + r))\n"
        "if __name__ == '__main__':\n    os.environ.update(MASTER_ADDR='localhost', MASTER_PORT='29577')\n"
        "    mp.spawn(main, (2,), 2)\n"
    )
    with pytest.raises(MinidistError, match=r"all_reduce of float32\[4\] on rank 0 and of float32\[5\]") as raised:
        run_source(tmp_path, source, 2)
    races = [note for note in raised.value.__notes__ if "is read by sum" in note]
    assert [note[:6] for note in races] == ["rank 0", "rank 1"]

    source = "t = t.cuda()\ndist.all_reduce(t, async_op=True)\ntorch.cuda.synchronize()\nassert t[0] == n\n"
    run_source(tmp_path, HEAD + source, 2, settings=Settings(cuda="cpu"))
