"""A snapshot: copies of all that a training step produces, by name, to be compared with another run's.

Proved by: tests/equality/test_equality.py
"""

import numpy as np

from minidist.base.arrays import to_host
from minidist.job.train.state import StepState
from minidist.job.train.strategies.data_axis import Tensors

KINDS = ("loss", "gradients", "weights", "optimizer")
Snapshot = Tensors  # kind -> tensor name -> values


def snapshot(state: StepState) -> Snapshot:
    """Copy loss, gradients, weights and optimizer state, by name. All ranks call it."""
    assert state.strategy is not None
    tensors = state.strategy.tensors()
    tensors["optimizer"]["step_count"] = np.array(state.strategy.step_count)
    losses = {name: np.array(loss) for name, loss in {"loss": state.loss, **state.held_out_losses}.items()}
    values = {kind: {name: to_host(array) for name, array in arrays.items()} for kind, arrays in tensors.items()}
    return {"loss": losses, **values}
