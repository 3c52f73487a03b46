"""Every rank sends to the right and receives from the left, in four ways; two of them hang. Lesson 03 explains which.

    python mpi_examples/1_messages/ring_exchange.py --ranks 4 --way even_odd
    mpiexec -n 4 python mpi_examples/1_messages/ring_exchange.py --way both_at_once
    mpiexec -n 4 python mpi_examples/1_messages/ring_exchange.py --way send_then_receive --synchronous --timeout 5

With `--trace t.jsonl` the run is recorded, up to the deadlock if there is one: `minidist report t.jsonl`.
"""

import argparse

import numpy as np

from minidist import launch


def send_then_receive(comm, outgoing, incoming, right, left):
    comm.send(outgoing, right)
    comm.recv(incoming, left)


def receive_then_send(comm, outgoing, incoming, right, left):
    comm.recv(incoming, left)
    comm.send(outgoing, right)


def even_odd(comm, outgoing, incoming, right, left):
    way = send_then_receive if comm.rank % 2 == 0 else receive_then_send
    way(comm, outgoing, incoming, right, left)


def both_at_once(comm, outgoing, incoming, right, left):
    comm.sendrecv(outgoing, right, incoming, left)


WAYS = {way.__name__: way for way in (send_then_receive, receive_then_send, even_odd, both_at_once)}


def main(comm, way):
    outgoing, incoming = np.full(3, float(comm.rank)), np.empty(3)
    WAYS[way](comm, outgoing, incoming, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
    print(f"rank {comm.rank} got {incoming[0]:g} after {comm.time() * 1e6:.4f} µs", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="both_at_once")
    flags, _ = parser.parse_known_args()
    launch(main, flags.way)
