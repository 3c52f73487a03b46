"""Three stages of torch.distributed.pipelining under the schedule 1F1B."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cpu") if "--cpu" in sys.argv else torch.device(f"cuda:{rank}")
dist.init_process_group()
layers = []
for number in range(size):
    torch.manual_seed(number)
    layers.append(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
stage = PipelineStage(layers[rank].to(device), rank, size, device)
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda output, target: (output - target).square().mean())
torch.manual_seed(9)
x, y, losses = torch.randn(8, 8).to(device), torch.randn(8, 8).to(device), []
if rank == 0:
    schedule.step(x)
elif rank == size - 1:
    schedule.step(target=y, losses=losses)
else:
    schedule.step()
print("rank", rank, "losses", *(loss.item() for loss in losses))
print("rank", rank, "gradient", layers[rank][0].weight.grad.double().sum().item())
dist.destroy_process_group()
