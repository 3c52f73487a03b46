"""A ring of folded ranks that is one event has the times, bytes, peaks and operations of its messages."""

import ml_dtypes
import numpy as np
import pytest

from minidist.base.flop_counter import FlopCounter
from minidist.base.memory import account_memory
from minidist.base.meta import MetaArray, creating_meta
from minidist.comm.sim.folded import FoldedWorld, _FoldedMatching
from minidist.comm.sim.links import LinkModel
from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose
from minidist.core.parallel.context_parallel import RingAttention
from minidist.parallel.context.ring_event import RingAttentionEvent
from tests.cases import each

FAST, SLOW = LinkModel(overhead=3e-7), LinkModel(alpha=1e-4, beta=1e-8, free_startup=True)


def outcome(kind, ranks, links, heads, dtype, why):
    """Return what forward and backward passes of two shapes leave behind on the rank that stands for all."""

    def main(comm):
        stream, after_forward = comm.world.state.running, []
        attention = kind(comm, 8 * ranks)
        with (
            creating_meta(),
            account_memory() as account,
            FlopCounter() as counter,
            purpose(why, whole=why == "startup"),
        ):
            for batch in (2, 2, 3):
                # What was computed before and is not on the clock yet; and a port that is busy already.
                counter.add("forward", 12_345, 678)
                stream.out_free = stream.time + 5e-6
                shapes = [(batch, 8, n, 4) for n in (heads, 2, 2)]
                q, k, v = (Tensor(np.zeros(shape, dtype), requires_grad=True) for shape in shapes)
                q, k, v = (x * 1 for x in map(on_no_device, (q, k, v)))
                y = attention(q, k, v)
                after_forward.append((stream.time, account.peak_by_purpose.copy()))
                y.backward(on_no_device(Tensor(np.zeros(y.shape, dtype))).data)
        ports = stream.time, stream.out_free, stream.in_free
        peaks = account.peak, account.at_peak, account.peak_by_purpose
        return ports, after_forward, peaks, counter.totals, counter.take()

    world = FoldedWorld(ranks, [range(ranks)], links=links)
    result, trace = world.run(main)[0], world.traces[0]
    return result, trace.bytes_by_purpose(), trace.messages_by_purpose(), trace.busy


def on_no_device(tensor):
    return Tensor(MetaArray(tensor.shape, tensor.dtype), requires_grad=tensor.requires_grad)


@each("ranks", [2, 3, 8], sampled=6)
@each("links", [FAST, SLOW], ids=["fast", "slow"])
@each("heads", [2, 6])
@each("dtype", [np.float32, ml_dtypes.bfloat16])
@each("why", ["metrics", "startup"])
def test_the_event_has_the_times_bytes_and_peaks_of_the_messages(ranks, links, heads, dtype, why):
    expected = outcome(RingAttention, ranks, links, heads, dtype, why)
    assert outcome(RingAttentionEvent, ranks, links, heads, dtype, why) == expected
    assert expected[1]


def test_a_second_call_posts_nothing_and_unequal_parts_are_refused_as_before(monkeypatch):
    posted, post = [], _FoldedMatching.post
    monkeypatch.setattr(_FoldedMatching, "post", lambda *message: posted.append(message) or post(*message))

    def main(comm, length, kind=RingAttentionEvent):
        attention = kind(comm, length)
        rows = attention.rows[0]
        for _ in range(2):
            attention(*(on_no_device(Tensor(np.zeros((1, rows, 2, 4)))) for _ in range(3)))

    FoldedWorld(4, [range(4)]).run(main, 16)
    assert posted == []
    FoldedWorld(4, [range(4)]).run(main, 16, RingAttention)
    assert len(posted) > 0
    with pytest.raises(UsageError, match="cannot stand for the ranks"):
        FoldedWorld(4, [range(4)]).run(main, 15)
