"""A parameter server learns a Markov chain: workers push gradients when they have them, servers send weights back.

    mpiexec -n 4 python mpi_examples/2_data_parallel/parameter_server.py
    python mpi_examples/2_data_parallel/parameter_server.py --ranks 5 --servers 2 --consistency asp --slow 3
    python mpi_examples/2_data_parallel/parameter_server.py --ranks 4 --kill 50

Under mpiexec a killed rank ends the job.

The model is a table of logits, one row per token: only the rows of the tokens that a batch contains are pushed. At the
end the run is replayed on one device in the order that the servers recorded, and must have the same bits.
"""

import argparse

import numpy as np

from minidist import SGD, Trace, launch
from minidist.comm.launching import under_mpiexec
from minidist.data.generated import markov
from minidist.techniques import parameter_server as ps

STEPS, BATCH, VOCABULARY = 150, 32, 64


def main(comm, servers, consistency, slow, kill):
    data = markov(20_000, VOCABULARY)
    tokens = np.asarray(data.tokens, np.int64)

    def batch(worker, clock):
        start = (worker * 7919 + clock * 104729) % (tokens.size - BATCH - 1)
        return tokens[start : start + BATCH], tokens[start + 1 : start + BATCH + 1]

    def gradient(worker, clock, weights):
        """Gradient of the cross-entropy of the next token; only rows that occur."""
        if kill == clock and comm.rank == comm.size - 1:
            comm.world.kill(comm.rank)  # does not return
        inputs, targets = batch(worker, clock)
        ids, place = np.unique(inputs, return_inverse=True)
        values = np.zeros((ids.size, data.vocab_size), np.float32)
        np.add.at(
            values, place, softmax(weights["logits"][inputs]) - np.eye(data.vocab_size, dtype=np.float32)[targets]
        )
        return {"logits": ps.Rows(ids, values / np.float32(BATCH)), "bias": np.zeros(1, np.float32)}

    # Train: the first ranks serve, the others work.
    config = ps.ServerConfig(servers, consistency, lambda slices: SGD(slices, lr=4.0), sparse=frozenset(["logits"]))
    initial = {"logits": np.zeros((data.vocab_size, data.vocab_size), np.float32), "bias": np.zeros(1, np.float32)}
    slow_one = comm.size - servers - 1
    result = ps.run(comm, config, initial, gradient, STEPS, lambda worker, clock: slow if worker == slow_one else 1.0)

    # Rank 0 reports, and replays the run from the traces.
    traces = gather_traces(comm)
    if comm.rank == 0:
        for rank in comm.world.dead:
            pushes = sum(m.peer == rank and m.wildcard for m in traces[0].messages)
            print(f"rank {rank} died after {pushes} pushes; the others went on", flush=True)
        probabilities = softmax(result.weights["logits"])
        loss = -np.log(probabilities[tokens[:-1], tokens[1:]]).mean()
        print(
            f"loss {loss:.4f}, the best possible is {data.entropy:.4f}, the start was {np.log(data.vocab_size):.4f}",
            flush=True,
        )
        records = ps.read_records(traces, config)
        replayed = ps.replay(records, config, initial, gradient)
        equal = all(np.array_equal(replayed[key], result.weights[key]) for key in initial)
        print(f"replay of the recorded order on one device: {'the same bits' if equal else 'DIFFERENT'}", flush=True)
        ahead = max((gap for record in records for gap in record.gaps), default=0)
        print(
            f"{consistency}: nobody was more than {ahead:g} clocks ahead; {len(records[0].updates)} updates on"
            " server 0",
            flush=True,
        )
        pushed = sum(m.nbytes for trace in traces for m in trace.sent("parameter_push"))
        dense = STEPS * (comm.size - servers) * sum(w.nbytes for w in initial.values())
        print(f"pushed {pushed:,} bytes; dense gradients would be {dense:,}", flush=True)


def softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def gather_traces(comm):
    """Every living rank's messages so far, on rank 0."""
    mine = Trace(comm.rank, comm.size, list(comm.trace.messages))
    if comm.rank:
        comm.send_object(mine, 0)
        return [mine]
    return [mine, *(Trace(r, comm.size) if r in comm.world.dead else comm.recv_object(r) for r in range(1, comm.size))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--consistency", default="ssp:2", help="bsp, delay:T, ssp:S or asp")
    parser.add_argument(
        "--slow", type=float, default=1.0, help="virtual seconds of the last worker's gradients; the others': 1"
    )
    parser.add_argument("--kill", type=int, help="the last worker dies before its push of this clock")
    flags, _ = parser.parse_known_args()
    survive = {} if under_mpiexec() else {"on_failure": "isolate"}
    launch(main, flags.servers, flags.consistency, flags.slow, flags.kill, **survive)
