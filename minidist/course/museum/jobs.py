"""The small jobs of the exhibits: the training loop of `minidist train`, and a few programs as users write them.

A bug of a user's program (a divisor, a seed, a missing wait) is injected here too: exhibits replace the functions above
the programs.

Proved by: tests/museum/test_museum.py
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import numpy as np

from minidist.base.coordinates import batch_coordinates
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base.arrays import Array
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, init_device_mesh
from minidist.core.nn import GPT, MLP, GPTConfig, Module
from minidist.core.nn.flat import FlatParameters
from minidist.course.museum.exhibit import Recording
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from minidist.nn import relu
from minidist.optim import SGD
from minidist.parallel.data_parallel import DistributedDataParallel

STEPS = 12
SMALL = {
    "model": "gpt",
    "layers": 2,
    "width": 16,
    "heads": 2,
    "context": 8,
    "data": "pydoc",
    "lr": 1e-2,
    "micro_batch": 2,
}
WORDS, LENGTH, BATCH = 13, 8, 4
Tensors = dict[str, dict[str, Array]]


# --- what an exhibit may replace --------------------------------------------------------------------------------------


def checks() -> bool:
    """Return whether messages and buffers are checked. A run of an exhibit turns that off to show what the bug does
    when no check stops it."""
    return True


def reduction_of() -> str:
    """Return how the gradients of replicas are reduced: added, since the divisor of each loss counts all ranks."""
    return "sum"


def divisor_of(comm: Comm, mine: int) -> float | None:
    """Return the divisor of the losses of a rank with `mine` counted rows or tokens: the count of all ranks."""
    count = np.array([float(mine)])
    with purpose("loss_divisor"):
        all_reduce(comm, count)
    return float(count[0])


def divisor_of_micro_batch(counts: Sequence[int], number: int) -> float:
    """Return the divisor of the losses of micro-batch `number`; counts: the tokens of each, known up front."""
    return float(sum(counts))


def after_micro_batch(flat: FlatParameters, micro_batches: int) -> None:
    """Leave the gradient as it is between two micro-batches."""


def waits_for(sent: Any, received: Any) -> Sequence[Any]:
    """Return the requests that an exchange waits for: both."""
    return (received, sent)


def partner_of(rank: int, ranks: int) -> int:
    """Return the rank that this rank's number is sent to: the next one."""
    return (rank + 1) % ranks


def takes_part(rank: int, step: int) -> bool:
    """Return whether a rank takes part in the sum of a step; every rank does, in every step."""
    return True


def scaled(array: Array) -> Array:
    """Return half of a float32 array, as float32."""
    return array * np.float32(0.5)


# --- the loop of `minidist train` -------------------------------------------------------------------------------------


def train_job(ranks: int, steps: int = STEPS, peak: str | None = None, **settings: Any) -> Callable[[], Recording]:
    """Return the job of a TrainConfig on simulated ranks. peak: also record the peak bytes of this purpose."""

    def job() -> Recording:
        config = TrainConfig.make(**{**SMALL, "steps": steps, **settings})

        def main(comm: Comm) -> Any:
            seen: Tensors = {}

            # Called after each step, while the gradients still exist.
            def watch(state: Any) -> None:
                tensors = state.strategy.tensors()
                if state.step == 0:
                    seen["gradients"] = tensors["gradients"]
                if state.step == steps - 1:
                    seen["weights"] = tensors["weights"]

            return train(comm, config, [watch]), seen

        results = SimWorld(ranks, checks=checks()).run(main)
        measured = {f"peak bytes of {peak}": max(r.peak_by_purpose.get(peak, 0) for r, _ in results)} if peak else {}
        return Recording(results[0][0].losses, [seen for _, seen in results], measured)

    return job


# --- programs as users write them -------------------------------------------------------------------------------------


def loop(
    model: Module,
    loss_of: Callable[[int], Tensor],
    flat: Any,
    *,
    whole: Callable[[Any, Array], Array] | None = None,
    total: Callable[[float], float] = float,
    lr: float = 0.5,
    before_step: Callable[[], Any] = lambda: None,
    steps: int = STEPS,
) -> tuple[list[float], Tensors]:
    """Train with plain SGD on one rank. whole(parameter, tile): the global array. total: the loss of all ranks."""
    optimizer = SGD(flat, lr=lr)
    losses: list[float] = []
    seen: Tensors = {}
    gather = whole or (lambda parameter, array: array)

    def copies(what: str) -> dict[str, Array]:
        arrays = {p.name: np.zeros(p.shape) if getattr(p, what) is None else getattr(p, what) for p in flat.parameters}
        return {p.name: np.array(gather(p, np.array(arrays[p.name]))) for p in flat.parameters}

    for step in range(steps):
        flat.zero_grad()
        # Dropout draws depend on the step, so that both runs of an exhibit draw the same.
        with batch_coordinates(step, seed=5):
            loss = loss_of(step)
            if loss.requires_grad:
                loss.backward()
        losses.append(total(loss.item()))
        before_step()
        if step == 0:
            seen["gradients"] = copies("grad")
        optimizer.step()
    seen["weights"] = copies("data")
    return losses, seen


def recorded(ranks: int, main: Callable[[Comm], tuple[list[float], Tensors]], **world: Any) -> Recording:
    """Run on simulated ranks; the losses are rank 0's."""
    results = SimWorld(ranks, checks=checks(), **world).run(main)
    return Recording(results[0][0], [seen for _, seen in results])


def on_ranks(ranks: int, **world: Any) -> Callable[[Callable[..., Any]], Callable[..., Recording]]:
    """Turn a program of one rank into a job, which runs it on simulated ranks with the arguments that follow comm."""

    def job_of(program: Callable[..., tuple[list[float], Tensors]]) -> Callable[..., Recording]:
        @wraps(program)
        def job(*arguments: Any, **settings: Any) -> Recording:
            return recorded(ranks, lambda comm: program(comm, *arguments, **settings), **world)

        return job

    return job_of


def summed(comm: Comm) -> Callable[[float], float]:
    """Return a function that sums a number over all ranks."""

    def total(value: float) -> float:
        number = np.array([value])
        with purpose("metrics"):
            all_reduce(comm, number)
        return float(number[0])

    return total


class EveryFlat:
    """The flat parameters of a model that has several, as `loop` takes them."""

    def __init__(self, flats: Sequence[FlatParameters]) -> None:
        self.flats, self.parameters = flats, [p for flat in flats for p in flat.parameters]

    def __iter__(self) -> Any:
        return iter(self.flats)

    def zero_grad(self) -> None:
        for flat in self.flats:
            flat.zero_grad()


@lru_cache(maxsize=64)
def _points(step: int, rows: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(1000 + step)
    labels = rng.integers(0, 5, rows)
    return (3 * np.eye(5, 8)[labels] + 0.7 * rng.standard_normal((rows, 8))).astype(np.float32), labels


def points(step: int, rows: int = 12) -> tuple[Array, Array]:
    """Return inputs and labels of a step: five classes of noisy points."""
    inputs, labels = _points(step, rows)
    return inputs, labels.copy()


def tokens(step: int, batch: int = BATCH) -> tuple[Array, Array]:
    """Return tokens and targets of a step, (batch, LENGTH): most words follow the one before by a rule."""
    rng = np.random.default_rng(2000 + step)
    words = np.empty((batch, LENGTH + 1), np.int64)
    words[:, 0] = rng.integers(0, WORDS, batch)
    for i in range(LENGTH):
        words[:, i + 1] = np.where(
            rng.random(batch) < 0.8, (3 * words[:, i] + 1) % WORDS, rng.integers(0, WORDS, batch)
        )
    return words[:, :-1], words[:, 1:]


def loss_on_points(model: Any, rows: Any = slice(None)) -> Callable[[int], Tensor]:
    """Return the loss of some rows of a step's 12 points; its divisor counts all of them."""

    def loss_of(step: int) -> Tensor:
        inputs, labels = points(step)
        return cross_entropy(model(Tensor(inputs[rows])), labels[rows], divisor=12)

    return loss_of


def mlp(seed: int = 3) -> MLP:
    """Return a network with two hidden layers."""
    return MLP([8, 16, 16, 5], dtype=np.float32, seed=seed)


def replicas(ranks: int = 3, masked: float = 0.0, ragged: bool = True, averaged: bool = False) -> Recording:
    """Train with data parallelism: a rank's rows, its share of the loss, DistributedDataParallel.

    masked: part of the labels that count for nothing. ragged: 11 rows, so that shards differ. averaged: each rank
    divides by its rows, and the ranks' gradients are averaged.
    """
    rows = 11 if ragged else 12

    def main(comm: Comm) -> tuple[list[float], Tensors]:
        reduction = "mean" if averaged else reduction_of()
        # A seed for each replica: rank 0's values are sent to every rank.
        model = DistributedDataParallel(mlp(comm.rank), comm, reduction=reduction)

        def loss_of(step: int) -> Tensor:
            inputs, labels = points(step, rows)
            if masked:  # more of them towards the end, so that ranks differ
                labels[np.arange(rows) % 4 < np.linspace(0, 4 * masked, rows)] = -100
            mine = np.array_split(np.arange(rows), comm.size)[comm.rank]
            divisor = len(mine) if averaged else divisor_of(comm, int((labels[mine] != -100).sum()))
            return cross_entropy(model(Tensor(inputs[mine])), labels[mine], divisor=divisor)

        total = summed(comm)
        return loop(
            model, loss_of, model.flat, total=(lambda v: total(v) / comm.size) if reduction == "mean" else total
        )

    return recorded(ranks, main)


@on_ranks(4)
def grid(comm: Comm) -> tuple[list[float], Tensors]:
    """Train on a mesh of dp 2 x tp 2: the coordinate on dp selects the rows, and mesh["dp"] sums the gradients."""
    mesh = init_device_mesh(comm, (2, 2), ("dp", "tp"))
    model = DistributedDataParallel(mlp(), mesh["dp"], reduction="sum")
    mine = np.array_split(np.arange(12), 2)[mesh.coordinate[0]]
    return loop(model, loss_on_points(model, mine), model.flat, total=summed(mesh["dp"]))


@on_ranks(1)
def accumulating(comm: Comm) -> tuple[list[float], Tensors]:
    """Train one rank with four micro-batches of texts of different lengths per step: a mean over all tokens."""
    counts = (8, 2, 5, 1)
    model = GPT(GPTConfig(WORDS, LENGTH, 16, 1, 2), dtype=np.float32, seed=3)
    flat = FlatParameters(model.parameters())

    def loss_of(step: int) -> Tensor:
        inputs, targets = tokens(step, len(counts))
        total = 0.0
        # Each text is backpropagated alone; gradients add up in `flat`.
        for number, count in enumerate(counts):
            row = slice(number, number + 1)
            loss = model(inputs[row, :count], targets[row, :count], divisor_of_micro_batch(counts, number))
            loss.backward()
            total += loss.item()
            after_micro_batch(flat, len(counts))
        return Tensor(np.float32(total))

    return loop(model, loss_of, flat, lr=0.1)


class Branch(Module):
    """An MLP with a branch that no row takes."""

    def __init__(self) -> None:
        self.trunk, self.branch, self.head = MLP([8, 16, 16], seed=0), MLP([16, 16], seed=0), MLP([16, 5], seed=0)
        self.initialize(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))  # type: ignore[no-any-return]


@on_ranks(2)
def branches(comm: Comm) -> tuple[list[float], Tensors]:
    """Train two replicas; parameters that are not used take part in the sum as zeros."""
    model = DistributedDataParallel(Branch(), comm, reduction="sum", find_unused_parameters=True)
    mine = np.array_split(np.arange(12), 2)[comm.rank]
    return loop(model, loss_on_points(model, mine), model.flat, total=summed(comm))


class Twice(Module):
    """A network with one hidden layer that is used twice."""

    def __init__(self) -> None:
        self.entry, self.tied, self.head = MLP([8, 16], seed=0), MLP([16, 16], seed=0), MLP([16, 5], seed=0)
        self.initialize(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = relu(self.entry(x))
        return self.head(relu(self.tied(relu(self.tied(hidden)))))  # type: ignore[no-any-return]


@on_ranks(1)
def deferred_weight_gradients(comm: Comm) -> tuple[list[float], Tensors]:
    """Train with weight gradients computed after the whole backward pass, as in zero-bubble schedules."""
    model = Twice()
    flat = FlatParameters(model.parameters())

    def loss_of(step: int) -> Tensor:
        loss = loss_on_points(model)(step)
        later = loss.backward(weight_gradients="deferred")
        assert later is not None
        later.run()
        return loss.detach()

    return loop(model, loss_of, flat)


@on_ranks(1)
def twice_used(comm: Comm) -> tuple[list[float], Tensors]:
    """Train the same model with the ordinary backward pass."""
    model = Twice()
    return loop(model, loss_on_points(model), FlatParameters(model.parameters()))


@on_ranks(3, eager_bytes=64)
def exchange(comm: Comm) -> tuple[list[float], Tensors]:
    """Send every rank's number to the next rank."""
    number, got = np.array([float(comm.rank)]), np.empty(1)
    received = comm.irecv(got, (comm.rank - 1) % comm.size)
    sent = comm.isend(number, partner_of(comm.rank, comm.size))
    for request in waits_for(sent, received):
        comm.wait(request)
    return [], {"numbers": {"from the left": got}}


@on_ranks(1)
def half_of_the_loss(comm: Comm) -> tuple[list[float], Tensors]:
    """Train a float32 MLP whose loss is multiplied by a NumPy scalar."""
    model = mlp()
    whole = loss_on_points(model)
    return loop(model, lambda step: whole(step) * np.float64(0.5), FlatParameters(model.parameters()))


@on_ranks(2)
def half_of_the_gradient(comm: Comm) -> tuple[list[float], Tensors]:
    """Halve a gradient on rank 0 and send it to rank 1, which has a float32 buffer for it."""
    buffer = np.zeros(4, np.float32)
    if comm.rank == 0:
        comm.send(scaled(np.arange(4, dtype=np.float32)), 1)
    else:
        comm.recv(buffer, 0)
    return [], {"numbers": {"gradient": buffer}}


@on_ranks(4)
def sums(comm: Comm) -> tuple[list[float], Tensors]:
    """Run three steps with a sum over four ranks in each."""
    losses = []
    for step in range(3):
        loss = np.array([comm.rank + 10.0 * step])
        if takes_part(comm.rank, step):
            all_reduce(comm, loss)
        losses.append(float(loss[0]))
    return losses, {}
