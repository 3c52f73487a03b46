"""What waiting for a slow worker costs, and what not waiting costs: one task under several consistencies.

A model of the next token (a row of logits for each token) learns a Markov chain whose entropy is known, on virtual
ranks, for a given virtual time. Counted are gradients per second, the age of the weights under each gradient, and the
loss over time: bsp makes few steps with fresh weights, asp many with old ones.

The model is a table, so its loss on the chain itself, not on a sample, is a sum over pairs of tokens.

Proved by: tests/bench/test_staleness.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from minidist.base.coordinates import Key, uniform
from minidist.base.errors import UsageError, quoted
from minidist.base.limits import MAX_SWEPT_RANKS, check_count, check_ranks, check_size
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.comm import Comm
from minidist.data.generated import markov
from minidist.optim import SGD
from minidist.techniques import parameter_server as ps

VOCABULARY, BATCH, TOKENS = 16, 16, 20_000
GRADIENT_SECONDS = 1e-3  # of a worker that is not slow
MAX_GRADIENTS = 1_000_000  # each is computed, so more would take hours


@dataclass
class StalenessRun:
    """The result of one consistency.

    staleness: for each gradient, the number of updates that its weights lacked. curve: (seconds, loss).
    """

    consistency: str
    gradients_per_second: float
    pushes: list[int]
    staleness: list[int]
    curve: list[tuple[float, float]] = field(default_factory=list)
    entropy: float = 0.0


def staleness_runs(
    consistencies: Sequence[str] = ("bsp", "ssp:2", "asp"),
    workers: int = 3,
    slow: float = 3.0,
    seconds: float = 0.3,
    lr: float = 2.0,
    who: str = "last",
) -> list[StalenessRun]:
    """Return one run per consistency, on one server and `workers` workers, for `seconds` seconds of virtual time.

    slow: how many times as long a slow gradient takes. who: "last", the last worker is always slow; "anyone", each
    worker is slow in one of `workers` gradients, by chance. lr: learning rate of one gradient; it has the same effect
    everywhere, because bsp sums the workers' gradients. Raises UsageError for numbers out of range.
    """
    check_count(workers, "--workers", 1)
    check_size(slow, "--slow", zero=False)
    check_size(seconds, "--seconds", zero=False)
    check_ranks(1 + workers, "a server and --workers:", MAX_SWEPT_RANKS)
    gradients = workers * seconds / GRADIENT_SECONDS
    if gradients > MAX_GRADIENTS:
        raise UsageError(
            f"--workers {workers} compute {gradients:,.0f} gradients in --seconds {seconds:g}; give them at most"
            f" {MAX_GRADIENTS * GRADIENT_SECONDS / workers:g} seconds"
        )
    if who not in ("last", "anyone"):
        raise UsageError(f"slow is {quoted(who)}; it must be 'last' (worker) or 'anyone'")

    def pace(worker: int, clock: int) -> float:
        late = worker == workers - 1 if who == "last" else uniform(Key(0, "pace", clock), worker, 1)[0] < 1 / workers
        return GRADIENT_SECONDS * (slow if late else 1.0)

    return [_run(consistency, workers, pace, seconds, lr) for consistency in consistencies]


def _run(consistency: str, workers: int, pace: Callable[[int, int], float], seconds: float, lr: float) -> StalenessRun:
    data = markov(TOKENS, VOCABULARY)
    tokens = np.asarray(data.tokens, np.int64)
    # pairs[a, b]: the share of transitions from a to b in the chain, with which its whole loss is a sum.
    pairs = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1 / (tokens.size - 1))
    initial = {"logits": np.zeros((VOCABULARY, VOCABULARY))}

    # A gradient is the mean over a batch in which a token occurs about once, hence the large rates.
    config = ps.ServerConfig(1, consistency, lambda slices: SGD(slices, lr=lr))

    def gradient(worker: int, clock: int, weights: ps.Weights) -> ps.Weights:
        # A window of the chain by (worker, clock), so that a replay takes the same one.
        start = (worker * 7919 + clock * 104_729) % (tokens.size - BATCH - 1)
        inputs, targets = tokens[start : start + BATCH], tokens[start + 1 : start + BATCH + 1]
        result = np.zeros_like(initial["logits"])

        # Gradient of the cross-entropy: softmax minus one-hot, added up for each row of the table.
        np.add.at(result, inputs, softmax(weights["logits"][inputs]) - np.eye(VOCABULARY)[targets])
        return {"logits": result / BATCH}

    def last(comm: Comm, clock: int) -> bool:
        return comm.time() >= seconds

    # [1] The run, on the virtual clock.
    world = SimWorld(1 + workers, links=LinkModel(alpha=2e-5, beta=1e-9))
    results = world.run(ps.run, config, initial, gradient, last, pace)
    (record,) = ps.read_records(world.traces, config)

    # [2] A replay of the recorded updates, with the loss of the weights after each one.
    curve = [(0.0, float(np.log(VOCABULARY)))]

    def observe(server: int, updates: ps.Updates) -> None:
        loss = -float((pairs * np.log(softmax(updates.shard.weights["logits"]))).sum())
        curve.append((record.times[updates.version - 1], loss))

    ps.replay([record], config, initial, gradient, observe)

    # [3] Staleness: the updates between the version that a gradient was computed with and its own.
    pushes = [result.pushes for result in results[1:]]
    staleness = [
        version_at - record.versions[part] for version_at, update in enumerate(record.updates) for part in update
    ]
    return StalenessRun(consistency, sum(pushes) / world.end_time, pushes, staleness, curve, float(data.entropy or 0))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return probabilities along the last axis."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def table(runs: Sequence[StalenessRun]) -> str:
    """Format the runs for people."""
    lines = [
        f"{'consistency':12}{'gradients/s':>12}{'mean staleness':>16}{'largest':>9}{'last loss':>11}   of each worker"
    ]
    for run in runs:
        mean = float(np.mean(run.staleness)) if run.staleness else 0.0
        lines.append(
            f"{run.consistency:12}{run.gradients_per_second:12.0f}{mean:16.2f}{max(run.staleness, default=0):9}"
            f"{run.curve[-1][1]:11.4f}   {', '.join(map(str, run.pushes))}"
        )
    return "\n".join(lines)
