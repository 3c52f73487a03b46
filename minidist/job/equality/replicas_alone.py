"""The reference of replicas that train alone: on one device, one after the other.

Each trains on its own rows with its own optimizer; where it is several ranks (ZeRO), with the rows of them all, added
in the order of these ranks. How they meet is the technique's (`techniques/meeting.py`),
whose `Replay` adds in rank order what the ranks add.

Proved by: tests/techniques/test_local_steps.py, tests/techniques/test_streaming_diloco.py,
tests/techniques/test_sharded_replicas.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.core.train.task import ordered_sum
from minidist.job.config.train_config import Batches, TrainConfig
from minidist.job.equality.gradient_order import fold, order_of
from minidist.job.equality.one_device import OneDevice, evaluate_devices
from minidist.job.equality.snapshot import Snapshot, snapshot
from minidist.job.train.job import build
from minidist.job.train.state import Observer, StepState
from minidist.job.train.update import finish_step
from minidist.techniques.meeting import replicas_of


def replicas_reference(
    config: TrainConfig, batches: Batches, observers: Sequence[Observer] = ()
) -> list[list[Snapshot]]:
    """Return the snapshots of every replica after every step, replica by replica, on one device.

    observers: are called once per step, with the first replica.
    """
    rows = _rows_of_replicas(config, batches)
    devices = _devices(config, batches, rows)
    shares = None if batches.shares.is_even else [own / sum(rows) for own in rows]
    technique = next(each for each in devices[0].job.extensions if each.trains_alone)
    replay = technique.replay(devices, lambda arrays: _mean(arrays, shares))
    result: list[list[Snapshot]] = [[] for _ in devices]
    for step in range(config.steps):
        # The replicas one after the other; the loss of the step is that of all.
        loss = ordered_sum([value for device in devices for value in device.forward_backward(step)])

        # Each updates its own weights, and then they may meet.
        for device in devices:
            finish_step(device.job, device, step, loss)
        replay.after_step(step + 1)

        held_out = evaluate_devices(devices, step + 1)
        for number, device in enumerate(devices):
            found = snapshot(StepState(number, step, loss, device.job, device, held_out))
            # The ranks' optimizers may hold more than those of the devices.
            result[number].append({**found, "optimizer": {**found["optimizer"], **replay.held(device)}})
        for observer in observers:
            observer(StepState(0, step, loss, devices[0].job, devices[0], held_out))
    return result


def _rows_of_replicas(config: TrainConfig, batches: Batches) -> list[int]:
    """Return how many rows of a step each replica has, which is one rank or several neighbours."""
    ranks = batches.dp // replicas_of(config, batches.dp)
    rows = [sum(of_rank) for of_rank in batches.shares.rows]
    return [sum(rows[first : first + ranks]) for first in range(0, batches.dp, ranks)]


def _devices(config: TrainConfig, batches: Batches, rows: Sequence[int]) -> list[OneDevice]:
    """Return one device for each replica, which runs the micro-batches of its ranks.

    The loss is divided by the rows of all replicas, the gradient is of one's own rows alone: hence the factors, the
    number of replicas where all have as many rows.
    """
    ranks = batches.dp // len(rows)
    count = ranks * batches.accumulation
    jobs = [build(config, batches) for _ in rows]
    return [
        OneDevice(job, order_of(job, ranks).add, range(n * count, (n + 1) * count), sum(rows) / rows[n])
        for n, job in enumerate(jobs)
    ]


def _mean(arrays: Sequence[np.ndarray], shares: Sequence[float] | None) -> np.ndarray:
    """Return the mean, added in rank order as the ranks' all-reduce adds."""
    kind = arrays[0].dtype.type
    parts = arrays if shares is None else [array * kind(share) for array, share in zip(arrays, shares, strict=True)]
    total: Any = fold(parts)
    return total / kind(len(parts)) if shares is None else total  # type: ignore[no-any-return]
