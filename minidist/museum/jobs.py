"""The small jobs of the exhibits: the training loop of `minidist train`, and a few programs as users write them.

A bug of a user's program (a divisor, a seed, a wait left out) has its place here too: the functions above the programs
are what an exhibit replaces.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from minidist.autograd import Tensor, cross_entropy, relu
from minidist.base.arrays import Array
from minidist.base.random import batch_coordinates
from minidist.base.trace import purpose
from minidist.collectives import all_reduce
from minidist.comm import Comm, SimWorld, init_device_mesh
from minidist.config.train_config import TrainConfig
from minidist.museum.exhibit import Recording
from minidist.nn import GPT, MLP, GPTConfig, Module
from minidist.nn.flat import FlatParameters
from minidist.optim import SGD
from minidist.parallel import DistributedDataParallel
from minidist.train.trainer import train

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
    """Are messages and buffers checked? A run of an exhibit turns that off when the checks say what the bug is: one sees what it
    does.
    """
    return True


def seed_of(rank: int) -> int:
    """The seed of a replica's initial weights; rank 0's values are sent to everybody."""
    return rank


def divisor_of(comm: Comm, mine: int) -> float:
    """What a rank with `mine` counted rows or tokens divides the sum of its losses by: the count of all ranks."""
    count = np.array([float(mine)])
    with purpose("loss_divisor"):
        all_reduce(comm, count)
    return float(count[0])


def divisor_of_micro_batch(counts: Sequence[int], number: int) -> float:
    """What the sum of the losses of micro-batch `number` is divided by; counts: tokens of each. They are known up
    front.
    """
    return float(sum(counts))


def after_micro_batch(flat: FlatParameters, micro_batches: int) -> None:
    """Between two micro-batches: nothing is to be done to the gradient."""


def waits_for(sent: Any, received: Any) -> Sequence[Any]:
    """The requests that an exchange waits for: both."""
    return (received, sent)


def partner_of(rank: int, ranks: int) -> int:
    """Who is sent this rank's number: the next one."""
    return (rank + 1) % ranks


def takes_part(rank: int, step: int) -> bool:
    """Does a rank take part in the sum of a step? Every rank does, in every step."""
    return True


def scaled(array: Array) -> Array:
    """Half of a float32 array, as float32."""
    return array * np.float32(0.5)


# --- the loop of `minidist train` -------------------------------------------------------------------------------------


def train_job(ranks: int, steps: int = STEPS, peak: str | None = None, **settings: Any) -> Callable[[], Recording]:
    """The job of a TrainConfig on simulated ranks. peak: also record the most bytes of this purpose on any rank."""

    def job() -> Recording:
        config = TrainConfig.make(**{**SMALL, "steps": steps, **settings})

        def main(comm: Comm) -> Any:
            seen: Tensors = {}

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
    """Plain SGD on one rank. whole(parameter, tile): the global array. total: the loss of all ranks."""
    optimizer = SGD(flat, lr=lr)
    losses: list[float] = []
    seen: Tensors = {}
    gather = whole or (lambda parameter, array: array)

    def copies(what: str) -> dict[str, Array]:
        arrays = {p.name: np.zeros(p.shape) if getattr(p, what) is None else getattr(p, what) for p in flat.parameters}
        return {p.name: np.array(gather(p, np.array(arrays[p.name]))) for p in flat.parameters}

    for step in range(steps):
        flat.zero_grad()
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


def summed(comm: Comm) -> Callable[[float], float]:
    """The sum of a number over all ranks."""

    def total(value: float) -> float:
        number = np.array([value])
        with purpose("metrics"):
            all_reduce(comm, number)
        return float(number[0])

    return total


@lru_cache(maxsize=64)
def _points(step: int, rows: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(1000 + step)
    labels = rng.integers(0, 5, rows)
    return (3 * np.eye(5, 8)[labels] + 0.7 * rng.standard_normal((rows, 8))).astype(np.float32), labels


def points(step: int, rows: int = 12) -> tuple[Array, Array]:
    """Inputs and labels of a step: five classes of noisy points."""
    inputs, labels = _points(step, rows)
    return inputs, labels.copy()


def tokens(step: int, batch: int = BATCH) -> tuple[Array, Array]:
    """Tokens and targets of a step, (batch, LENGTH): each word follows the one before by a rule, most of the time."""
    rng = np.random.default_rng(2000 + step)
    words = np.empty((batch, LENGTH + 1), np.int64)
    words[:, 0] = rng.integers(0, WORDS, batch)
    for i in range(LENGTH):
        words[:, i + 1] = np.where(
            rng.random(batch) < 0.8, (3 * words[:, i] + 1) % WORDS, rng.integers(0, WORDS, batch)
        )
    return words[:, :-1], words[:, 1:]


def mlp(seed: int = 3) -> MLP:
    """Two hidden layers."""
    return MLP([8, 16, 16, 5], dtype=np.float32, seed=seed)


def replicas(ranks: int = 3, masked: float = 0.0, ragged: bool = True, reduction: str = "sum") -> Recording:
    """Data parallelism by hand: a rank's rows, its share of the loss, DistributedDataParallel.

    masked: part of the labels that count for nothing. ragged: 11 rows, so that shards differ. reduction="mean": each
    rank takes the mean over its rows, and the ranks' gradients are averaged.
    """
    rows = 11 if ragged else 12

    def main(comm: Comm) -> tuple[list[float], Tensors]:
        model = DistributedDataParallel(mlp(seed_of(comm.rank)), comm, reduction=reduction)

        def loss_of(step: int) -> Tensor:
            inputs, labels = points(step, rows)
            if masked:  # towards the end more: ranks differ
                labels[np.arange(rows) % 4 < np.linspace(0, 4 * masked, rows)] = -100
            mine = np.array_split(np.arange(rows), comm.size)[comm.rank]
            divisor = len(mine) if reduction == "mean" else divisor_of(comm, int((labels[mine] != -100).sum()))
            return cross_entropy(model(Tensor(inputs[mine])), labels[mine], divisor=divisor)

        total = summed(comm)
        return loop(
            model, loss_of, model.flat, total=(lambda v: total(v) / comm.size) if reduction == "mean" else total
        )

    return recorded(ranks, main)


def grid() -> Recording:
    """A mesh of dp 2 x tp 2: rows are dealt out by the coordinate on dp, and gradients summed over mesh["dp"]."""

    def main(comm: Comm) -> tuple[list[float], Tensors]:
        mesh = init_device_mesh(comm, (2, 2), ("dp", "tp"))
        model = DistributedDataParallel(mlp(), mesh["dp"], reduction="sum")
        mine = np.array_split(np.arange(12), 2)[mesh.get_local_rank("dp")]

        def loss_of(step: int) -> Tensor:
            inputs, labels = points(step)
            return cross_entropy(model(Tensor(inputs[mine])), labels[mine], divisor=12)

        return loop(model, loss_of, model.flat, total=summed(mesh["dp"]))

    return recorded(4, main)


def accumulating() -> Recording:
    """Four micro-batches of texts of different lengths in a step, on one rank: a mean over all tokens."""
    counts = (8, 2, 5, 1)

    def main(comm: Comm) -> tuple[list[float], Tensors]:
        model = GPT(GPTConfig(WORDS, LENGTH, 16, 1, 2), dtype=np.float32, seed=3)
        flat = FlatParameters(model.parameters())

        def loss_of(step: int) -> Tensor:
            inputs, targets = tokens(step, len(counts))
            total = 0.0
            for number, count in enumerate(counts):
                row = slice(number, number + 1)
                loss = model(inputs[row, :count], targets[row, :count], divisor_of_micro_batch(counts, number))
                loss.backward()
                total += loss.item()
                after_micro_batch(flat, len(counts))
            return Tensor(np.float32(total))

        return loop(model, loss_of, flat, lr=0.1)

    return recorded(1, main)


class Branch(Module):
    """An MLP with a branch that no row takes, today."""

    def __init__(self) -> None:
        self.trunk, self.branch, self.head = MLP([8, 16, 16], seed=0), MLP([16, 16], seed=0), MLP([16, 5], seed=0)
        self.initialize(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))  # type: ignore[no-any-return]


def branches() -> Recording:
    """Two replicas; parameters that are not used take part in the sum as zeros."""

    def main(comm: Comm) -> tuple[list[float], Tensors]:
        model = DistributedDataParallel(Branch(), comm, reduction="sum", find_unused_parameters=True)
        mine = np.array_split(np.arange(12), 2)[comm.rank]

        def loss_of(step: int) -> Tensor:
            inputs, labels = points(step)
            return cross_entropy(model(Tensor(inputs[mine])), labels[mine], divisor=12)

        return loop(model, loss_of, model.flat, total=summed(comm))

    return recorded(2, main)


class Twice(Module):
    """One hidden layer that is used two times."""

    def __init__(self) -> None:
        self.entry, self.tied, self.head = MLP([8, 16], seed=0), MLP([16, 16], seed=0), MLP([16, 5], seed=0)
        self.initialize(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = relu(self.entry(x))
        return self.head(relu(self.tied(relu(self.tied(hidden)))))  # type: ignore[no-any-return]


def put_off() -> Recording:
    """Weight gradients computed after the whole backward pass, as zero-bubble schedules do."""

    def main(comm: Comm) -> tuple[list[float], Tensors]:
        model = Twice()
        flat = FlatParameters(model.parameters())

        def loss_of(step: int) -> Tensor:
            inputs, labels = points(step)
            loss = cross_entropy(model(Tensor(inputs)), labels, divisor=12)
            later = loss.backward(weight_gradients="deferred")
            assert later is not None
            later.run()
            return loss.detach()

        return loop(model, loss_of, flat)

    return recorded(1, main)


def twice_used() -> Recording:
    """The same model with the ordinary backward pass."""

    def main(comm: Comm) -> tuple[list[float], Tensors]:
        model = Twice()

        def loss_of(step: int) -> Tensor:
            inputs, labels = points(step)
            return cross_entropy(model(Tensor(inputs)), labels, divisor=12)

        return loop(model, loss_of, FlatParameters(model.parameters()))

    return recorded(1, main)


def exchange() -> Recording:
    """Every rank sends its number to the next one."""

    def main(comm: Comm) -> tuple[list[float], Tensors]:
        number, got = np.array([float(comm.rank)]), np.empty(1)
        received = comm.irecv(got, (comm.rank - 1) % comm.size)
        sent = comm.isend(number, partner_of(comm.rank, comm.size))
        for request in waits_for(sent, received):
            comm.wait(request)
        return [], {"numbers": {"from the left": got}}

    return recorded(3, main, eager_bytes=64)


def half_of_the_loss() -> Recording:
    """A float32 MLP whose loss is multiplied by a NumPy scalar."""

    def main(comm: Comm) -> tuple[list[float], Tensors]:
        model = mlp()

        def loss_of(step: int) -> Tensor:
            inputs, labels = points(step)
            return cross_entropy(model(Tensor(inputs)), labels, divisor=12) * np.float64(0.5)

        return loop(model, loss_of, FlatParameters(model.parameters()))

    return recorded(1, main)


def half_of_the_gradient() -> Recording:
    """Rank 0 halves a gradient and sends it to rank 1, who has float32 room for it."""

    def main(comm: Comm) -> tuple[list[float], Tensors]:
        room = np.zeros(4, np.float32)
        if comm.rank == 0:
            comm.send(scaled(np.arange(4, dtype=np.float32)), 1)
        else:
            comm.recv(room, 0)
        return [], {"numbers": {"gradient": room}}

    return recorded(2, main)


def sums() -> Recording:
    """Three steps, in each a sum over four ranks."""

    def main(comm: Comm) -> tuple[list[float], Tensors]:
        losses = []
        for step in range(3):
            loss = np.array([comm.rank + 10.0 * step])
            if takes_part(comm.rank, step):
                all_reduce(comm, loss)
            losses.append(float(loss[0]))
        return losses, {}

    return recorded(4, main)
