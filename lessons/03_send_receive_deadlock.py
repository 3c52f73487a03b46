# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 Send, receive, deadlock
#
# *25 minutes. Before it: 00.*
#
# ## 1 The case
#
# Four ranks form a circle, and each has 24 bytes for its right neighbour. The program is
# short: send to the right, then receive from the left. It passes every test on your laptop. A year
# later the messages have grown, and the job hangs, at night, without an error.
#
# The program does not say whether a send waits for its receive. An MPI library may copy a short
# message into a buffer and return at once (a *buffered* send), and wait for the receiver of a longer
# one (a *synchronous* send). Here are four programs for the same exchange:
#
# 1. every rank sends, then receives;
# 2. every rank receives, then sends;
# 3. ranks 0 and 2 send first, ranks 1 and 3 receive first;
# 4. every rank gives both to the library in one call (`sendrecv`).
#
# How many of the four hang?

# %%
import numpy as np

from minidist import BufferReuseError, DeadlockError, SimWorld
from minidist.course.lesson import check, expect, picture, predict, reveal, solution
from minidist.course.story import story
from minidist.report import show, step

# %% [markdown]
# ## 2 Predict
#
# A program *hangs* when some rank waits for ever. A message has 24 B here.

# %%
synchronous = predict("programs that hang when every send waits for its receive", example=4)
buffered = predict("programs that hang when up to 1,000 B are buffered", example=0)

# %% [markdown]
# ## 3 The idea and its picture
#
# **Do not assume that a send returns before its receive.** The length up to which a message is
# buffered differs between libraries, and is a setting of each (part 10). A program that relies on buffers
# works until its messages grow. A correct program has an order of sends and receives that was chosen on
# purpose, and does not hang when a message becomes longer. That order can cost one more round of messages.
#
# The picture shows program 1 when sends wait. The red bars are ranks that wait, and the arrows from
# them form a circle: each waits for the next one. The length of the bars means nothing: no time passes on this clock.


# %%
def send_then_receive(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    outgoing, incoming = np.full(3, float(comm.rank)), np.full(3, np.nan)
    comm.send(outgoing, right)
    comm.recv(incoming, left)
    return incoming[0]


world = SimWorld(4)
with expect(DeadlockError):
    world.run(send_then_receive)
picture("space-time", world, "part 3 of lesson 03", name="send, then receive")

# %% [markdown]
# ## 4 The code
#
# The other three programs. The third one needs no new sends: its even ranks run the first program,
# and its odd ranks the second.


# %%
def receive_then_send(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    outgoing, incoming = np.full(3, float(comm.rank)), np.full(3, np.nan)
    comm.recv(incoming, left)
    comm.send(outgoing, right)
    return incoming[0]


def even_odd(comm):
    return send_then_receive(comm) if comm.rank % 2 == 0 else receive_then_send(comm)


def both_at_once(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    outgoing, incoming = np.full(3, float(comm.rank)), np.empty(3)
    comm.sendrecv(outgoing, right, incoming, left)
    return incoming[0]


# %% [markdown]
# The third program, message by message: the arrow keys go from one to the next. Ranks 0 and 2 send
# to ranks that receive, and then it is the other way round; no ranks wait in a circle.

# %%
show(step(even_odd, 4), "Even ranks send first, odd ranks receive first.")

# %% [markdown]
# ## 5 Check
#
# `SimWorld(4)` makes every send synchronous. `SimWorld(4, eager_bytes=1000)` buffers messages of up
# to 1,000 B, as an MPI library might. Each program runs with both:


# %%
def hangs(program, **options):
    try:
        SimWorld(4, **options).run(program)
    except DeadlockError:
        return True
    return False


programs = (send_then_receive, receive_then_send, even_odd, both_at_once)
answers = {}
print(f"{'':20} synchronous  buffered")
for program in programs:
    answers[program] = hangs(program), hangs(program, eager_bytes=1000)
    words = ["hangs" if hanging else "runs" for hanging in answers[program]]
    print(f"{program.__name__:20} {words[0]:12} {words[1]}")
synchronous.judge(sum(waits for waits, _ in answers.values()))
buffered.judge(sum(waits for _, waits in answers.values()))

# %% [markdown]
# The programs that run with both agree with each other, and differ in time. When all ranks send at once
# the exchange takes the time of one message; in two rounds it takes that of two. (Is it enough that rank 0
# alone receives first? Part 6 has the answer.)

# %%
expected = np.roll(np.arange(4.0), 1)
for program in (even_odd, both_at_once):
    world = SimWorld(4)
    received = np.array(world.run(program))
    off = np.abs(received - expected).max()
    print(f"{program.__name__}: max |received - expected| = {off:g}, {world.end_time * 1e6:.2f} µs")
    picture("space-time", world, "part 5 of lesson 03", name=program.__name__)


# %% [markdown]
# There is a fifth way. `isend` and `irecv` take the same arguments as `send` and `recv`, start the
# operation, and return a *request* at once. `request.wait()` returns when the operation has ended. A rank
# that starts both before it waits for either is in no circle. But until `wait` returns, the buffer belongs
# to the operation. A program that changes it earlier can send wrong numbers, and an MPI library reports
# *nothing*. The simulated world compares the buffer at the end with what it was at the start. First
# without its checks, then with them:


# %%
def reuse_too_early(comm):
    buffer = np.zeros(3)
    if comm.rank == 0:
        request = comm.isend(buffer, 1)
        buffer += 1  # the message may not have left yet
    else:
        request = comm.irecv(buffer, 0)
    request.wait()
    return buffer


_, arrived = SimWorld(2, checks=False).run(reuse_too_early)
print("rank 0 began to send [0. 0. 0.], and rank 1 received", arrived)
assert (arrived == 1).all()
with expect(BufferReuseError):
    SimWorld(2).run(reuse_too_early)


# %% [markdown]
# ## 6 Break it
#
# `send_then_receive` is the dangerous one: it runs as long as the message fits into a buffer. When
# the limit is below the length of the message, the same program hangs, without a changed line:

# %%
for eager_bytes in (0, 23, 24, 1000):
    hanging = hangs(send_then_receive, eager_bytes=eager_bytes)
    print(f"messages of 24 B, buffered up to {eager_bytes} B: {'hangs' if hanging else 'runs'}")

# %% [markdown]
# To let rank 0 alone receive first is enough: there is no circle any more. On this clock that takes two
# message times, too, because bytes leave when `send` is called. Where they leave only when the receiver is
# ready, the messages go round the circle one after another.


# %%
def only_rank_0_receives_first(comm):
    return receive_then_send(comm) if comm.rank == 0 else send_then_receive(comm)


for ranks in (4, 16):
    world = SimWorld(ranks)
    world.run(only_rank_0_receives_first)
    print(f"{ranks:2} ranks: {world.end_time * 1e6:.2f} µs")


# %% [markdown]
# ## 7 Exercise: fix the ring exchange, three ways
#
# Each function sends `outgoing` to the right neighbour and returns what came from the left one, for
# any number of ranks (one rank is its own neighbour). The first may use `send` and `recv` only, the
# second `sendrecv` only, the third `isend`, `irecv` and `wait` only. On this clock the first takes
# two message times, and the other two take one.
#
# Judged: what every rank returns; the methods that are used; time (par).


# %%
def by_order(comm, outgoing):
    incoming = np.empty_like(outgoing)
    comm.send(outgoing, (comm.rank + 1) % comm.size)
    comm.recv(incoming, (comm.rank - 1) % comm.size)
    return incoming


def by_sendrecv(comm, outgoing):
    raise NotImplementedError("yours")


def by_requests(comm, outgoing):
    raise NotImplementedError("yours")


for name, function in (
    ("by_order", by_order),
    ("by_sendrecv", by_sendrecv),
    ("by_requests", by_requests),
):
    check(f"03.{name}", function)

# %% [markdown]
# Our solutions, and what the check says to them:

# %%
for name in ("by_order", "by_sendrecv", "by_requests"):
    reveal(f"03.{name}")
    check(f"03.{name}", solution(f"03.{name}"))

# %% [markdown]
# ## 8 Takeaway
#
# - A program that runs with **every send synchronous** does not depend on buffers, if it receives from named
#   ranks. Test it that way; minidist's simulated world does so by default.
# - A deadlock is a **circle** of ranks that wait for each other, or a rank that waits for one that has ended.
#   Break a circle with an order, with `sendrecv`, or with `isend`, `irecv` and `wait`. On this clock an exchange
#   takes the time of one message when all ranks send at once, and with an order that of two.

# %% [markdown]
# The job so far:

# %%
story("03")

# %% [markdown]
# ## 9 The same code under mpiexec
#
# `--synchronous` makes every send of a real MPI run wait for its receive; the watchdog reports after `--timeout`
# seconds:
#
#     mpiexec -n 4 python mpi_examples/1_messages/ring_exchange.py --way send_then_receive --synchronous --timeout 5
#
# A program of mpi4py runs on simulated ranks as it is, and is reported in the same way. The ranks of `heat.py` exchange
# points of 8 B with their neighbours; with `--unsafe` all of them send first, which an MPI library buffers:
#
#     minidist mpi --ranks 4 mpi_examples/1_messages/heat.py --unsafe
#     minidist mpi --ranks 4 --eager-bytes 8 mpi_examples/1_messages/heat.py --unsafe

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `send` that waits | MPI `Ssend`; in NCCL a send may wait or return earlier; do not rely on either |
# | buffered up to `eager_bytes` | Open MPI `btl_sm_eager_limit` (`btl_vader_eager_limit` in version 4), `btl_tcp_eager_limit`; MPICH `MPIR_CVAR_CH4_OFI_EAGER_THRESHOLD` (by default -1: libfabric decides) |
# | `isend`, `irecv`, `wait` | MPI `Isend`, `Irecv`, `Wait`; PyTorch `dist.isend`, `dist.irecv`, `work.wait()` |
# | `sendrecv` | MPI `Sendrecv`; PyTorch `dist.batch_isend_irecv`; NCCL `ncclGroupStart` ... `ncclGroupEnd` |
# | the watchdog | PyTorch `TORCH_NCCL_ASYNC_ERROR_HANDLING`, `init_process_group(timeout=...)` |
#
# Next: [04 All-reduce without a root](04_all_reduce_without_a_boss.ipynb). All lessons are in the
# [index](README.md).
