"""Which all-reduce is best where: virtual microseconds of every algorithm, and what "auto" takes. Phantom buffers: no memory.

python -m minidist.train.bench_virtual_collectives --ranks 16 --alpha 1e-6 --beta 1e-10
"""

import argparse
from typing import Any, cast

import numpy as np

from minidist.base.phantom import Phantom
from minidist.collectives import all_reduce
from minidist.collectives.auto import cheapest
from minidist.collectives.registry import algorithms
from minidist.comm import LinkModel, SimWorld


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=1e-6, help="seconds a message")
    parser.add_argument("--beta", type=float, default=1e-10, help="seconds a byte")
    flags = parser.parse_args()
    names = [*sorted(algorithms()["all_reduce"]), "auto"]
    print(f"{'bytes':>10s} " + " ".join(f"{name:>18s}" for name in names) + "  auto / best")
    for exponent in range(0, 27, 2):
        times = []
        for name in names:
            world = SimWorld(
                flags.ranks, checks=False, record=False, timeout=0, links=LinkModel(flags.alpha, flags.beta)
            )
            world.run(lambda comm, name=name, n=2**exponent: all_reduce(comm, cast(Any, Phantom(n, np.uint8)), algorithm=name))
            times.append(world.end_time)
        taken = cheapest("all_reduce", 2**exponent, flags.ranks, flags.alpha, flags.beta)
        row = " ".join(f"{1e6 * seconds:18.1f}" for seconds in times)
        print(f"{2**exponent:10,d} {row}  {times[-1] / min(times[:-1]):.3f} {taken}")


if __name__ == "__main__":
    main()
