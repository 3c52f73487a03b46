"""One training loop for one device and for split models, and the comparison of everything that it leaves behind."""

import numpy as np

from minidist.base.coordinates import batch_coordinates
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.nn.flat import FlatParameters
from minidist.optim import SGD
from minidist.optim.adam import Adam
from minidist.parallel.tensor import full_tensor

STEPS, BOUND = 5, 1e-12
OPTIMIZERS = {
    "sgd": lambda flat: SGD(flat, lr=0.1, momentum=0.9, weight_decay=0.01),
    # The true gradient of attention's key bias is 0: what is there is rounding, 1e-17, which Adam divides by eps =
    # 1e-8.
    "adam": lambda flat: Adam(flat, lr=1e-4, eps=1e-8),
}


def text(step, batch, length, vocabulary):
    """(tokens, targets) of a step, with the first and the last word in them."""
    words = np.random.default_rng(1000 + step).integers(0, vocabulary, (batch, length + 1))
    words[0, :2] = 0, vocabulary - 1
    return words[:, :-1], words[:, 1:]


def train(model, loss_of, optimizer, mesh=None, steps=STEPS, synchronize=None, flat=None, **place):
    """Snapshots {kind: {name: whole array}} of every step. loss_of(model, step): the loss tensor. mesh: where tiles are
    gathered. synchronize(flat, loss): the loss of all ranks. flat: of the model, when it has one. place: of a part of
    the sequence, for `batch_coordinates`.
    """
    flat = flat or FlatParameters(model.parameters())
    optimizer = OPTIMIZERS[optimizer](flat)
    layouts = {p.name: (p.layout, p.shape) for p in flat.parameters}

    def whole(name, array):
        layout, shape = layouts[name]
        return np.array(full_tensor(np.array(array).reshape(shape), layout, mesh))

    history = []
    for step in range(steps):
        flat.zero_grad()
        with batch_coordinates(step, seed=5, **place):
            loss = loss_of(model, step)
            loss.backward()
        value = loss.item() if synchronize is None else synchronize(flat, loss)
        gradients = {p.name: whole(p.name, p.grad) for p in flat.parameters}
        optimizer.step()
        history.append(
            {
                "loss": {"loss": np.array(value)},
                "gradients": gradients,
                "weights": {p.name: whole(p.name, p.data) for p in flat.parameters},
                "optimizer": {
                    f"{name}.{key}": whole(name, array)
                    for name, state in optimizer.state.items()
                    for key, array in state.items()
                },
            }
        )
    return history


def summed_loss(comm):
    """Return a `synchronize` of `train` that sums the loss over the ranks of a communicator."""

    def total(_, loss):
        value = np.array([loss.item()])
        with purpose("metrics"):
            all_reduce(comm, value)
        return value[0]

    return total


def assert_equal(actual, expected, bound=BOUND):
    """The float tier: loss and weights to bound x max(1, largest), the rest to bound x the largest of its kind."""
    assert len(actual) == len(expected)
    for step, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        for kind in theirs:
            assert set(mine[kind]) == set(theirs[kind]), kind
            largest = max(float(np.abs(b).max()) for b in theirs[kind].values())
            scale = max(1.0, largest) if kind in ("loss", "weights") else largest
            for name, b in theirs[kind].items():
                a = mine[kind][name]
                assert a.shape == b.shape, (kind, name, a.shape, b.shape)
                difference = float(np.abs(a - b).max())
                assert difference <= bound * scale, (
                    f"step {step}: {kind} {name} differs by {difference:.3g} of {scale:.3g}"
                )


def replicated(model):
    """The bytes of the parameters that must be equal on every rank."""
    return b"".join(p.data.tobytes() for p in model.parameters() if not p.layout.axes)
