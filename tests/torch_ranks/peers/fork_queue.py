"""Processes that are forked: they know what the program has set before, and answer in a queue."""

import multiprocessing
import os
import sys

import torch
import torch.distributed as dist

SCALE = 1


def ring(rank, size):
    tensor = torch.full((3,), float(SCALE * rank))
    for _ in range(size - 1):
        request = dist.isend(tensor, (rank + 1) % size)
        received = torch.empty(3)
        dist.recv(received, (rank - 1) % size)
        request.wait()
        tensor = received + 1
    return tensor


def start(rank, size, function, answers):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29619"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    tensor = function(rank, size)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    answers.put((rank, tensor.tolist(), sys.argv[2:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    SCALE = 10
    context = multiprocessing.get_context("fork")
    answers, processes = context.Queue(), []
    for rank in range(3):
        process = context.Process(target=start, args=(rank, 3, ring, answers))
        process.start()
        processes.append(process)
    for answer in sorted(answers.get() for _ in processes):
        print("rank", *answer)
    for process in processes:
        process.join()
    print("exit codes", [process.exitcode for process in processes])
