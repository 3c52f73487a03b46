"""A DeepSpeed configuration file: what each of its lines means here, and a job that trains by it.

    mpiexec -n 2 python mpi_examples/7_more/deepspeed_file.py
    mpiexec -n 2 python mpi_examples/7_more/deepspeed_file.py --file my_ds_config.json
    python mpi_examples/7_more/deepspeed_file.py --ranks 2

A key becomes a setting, or is what minidist does anyway, or is listed as not honoured: none is skipped in silence. The
same by command: mpiexec -n 2 minidist train --deepspeed mpi_examples/ds_config.json
"""

import argparse
from pathlib import Path

from minidist import TrainConfig, launch
from minidist.job.config.deepspeed import read_deepspeed
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import resolve_batches
from minidist.job.train.trainer import train

MODEL = {"model": "gpt", "layers": 2, "width": 32, "heads": 2, "context": 16, "steps": 25}


def main(comm, file):
    translation = read_deepspeed(file)
    if comm.rank == 0:
        for key, value, flags in translation.applied:
            print(f"{key} = {value}  ->  {flags}", flush=True)
        for key, why in translation.ignored:
            print(f"{key}: not honoured, {why}", flush=True)

    # DeepSpeed's defaults first; what the file says goes before them.
    config = TrainConfig.make(**{**MODEL, **translation.defaults, **translation.settings})
    batches = resolve_batches(config, comm.size)
    check_rules(config, batches)
    result = train(comm, config)
    if comm.rank == 0:
        print(
            f"{batches.global_batch} rows = {batches.micro_batch} x {batches.accumulation} x {batches.dp} ranks;"
            f" every sixth loss {' '.join(f'{loss:.4f}' for loss in result.losses[::6])}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, default=Path(__file__).parents[1] / "ds_config.json")
    flags, _ = parser.parse_known_args()
    launch(main, flags.file)
