"""A pipeline on ranks of different speeds: its stages are cut anew while it trains, by what the layers take.

    mpiexec -n 2 python mpi_examples/6_pipeline/repartition.py
    python mpi_examples/6_pipeline/repartition.py --ranks 2

With each of its layers the last rank also multiplies matrices that belong to no layer, as if another program shared its
machine: it really is about three times as slow. With as many layers on each rank, the others wait. With
`repartition_every` the ranks exchange the times of their layers and move layers to where the slowest stage is fastest;
weights and optimizer state go with them, so both jobs end with the same bits.

Jobs with and without it alternate. Steps that warm up do not count, medians are compared, and what is printed is what
was measured. On ranks as they are:

    mpiexec -n 2 minidist train --pp 2 --layers 8 --repartition-every 5 --steps 20
"""

from statistics import median

import numpy as np

from minidist import TrainConfig, current_flop_counter, launch
from minidist.job.train.trainer import train
from minidist.pipeline.runtime.layer_profile import LayerProfile
from minidist.techniques.repartition.extension import profiled_by

LAYERS, WIDTH, ROWS = 8, 128, 64
STEPS, EVERY, WARM_UP, ROUNDS = 12, 4, 2, 2
TIMES = 3  # that a layer takes on the slow rank


class SharedMachine(LayerProfile):
    """Measures the layers of a rank; the last rank has other work to do as well."""

    def watch(self, comm, stages, layers, last):
        super().watch(comm, stages, layers, last)
        if comm.rank == comm.size - 1:
            for layer in (layer for own in stages.values() for layer in own.values()):
                layer.register_forward_pre_hook(other_work)


def other_work(layer, arguments):
    """Compute what a layer does in forward and backward, three products of matrices, TIMES - 1 times, for nothing."""
    if current_flop_counter() is None or not arguments[0].size:
        return
    x = arguments[0].data
    for _ in range(3 * (TIMES - 1)):
        x @ layer.weight.data.T
        current_flop_counter().add("other", 2 * x.shape[0] * layer.weight.size, x.nbytes)  # for the virtual clock


def main(comm):
    common = {"model": "mlp", "layers": LAYERS, "width": WIDTH, "optimizer": "adam", "lr": 1e-3, "steps": STEPS}
    job = TrainConfig.make(**common, pp=comm.size, microbatches=8, micro_batch=ROWS)
    configs = {"equal": STEPS, "by time": EVERY}  # after the last step no cut is chosen

    # [1] Both jobs in turn; a step lasts until its losses are known everywhere.
    seconds, losses, cuts = {name: [] for name in configs}, {}, []
    for _ in range(ROUNDS):
        for name, every in configs.items():
            ends = []
            config = job.model_copy(update={"repartition_every": every})
            observe = [lambda state, ends=ends: ends.append(state.comm.time())]
            with profiled_by(SharedMachine):
                result = train(comm, config, observe)
            losses[name], cuts = result.losses, result.measured["partitions"]

            # [2] What comes before the last cut, and the steps that warm up, do not count.
            first = STEPS - cuts[-1][1] + WARM_UP
            seconds[name] += np.diff(ends)[first:].tolist()

    # [3] Where a pipeline is cut changes no bit.
    assert losses["equal"] == losses["by time"]
    if comm.rank == 0:
        sizes = ", then ".join(f"{partition} for {steps} steps" for partition, steps in cuts)
        print(f"layers of the stages: {sizes}; the same losses as with equal stages, bit for bit")
        equal, by_time = (median(seconds[name]) * 1e3 for name in configs)
        print(
            f"a step takes {equal:.4f} ms with equal stages, {by_time:.4f} ms with stages cut by time:"
            f" {by_time / equal:.2f} times as long",
            flush=True,
        )


if __name__ == "__main__":
    launch(main)
