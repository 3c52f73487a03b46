"""A sharded checkpoint that is saved, saved again asynchronously, and loaded by a model with other weights."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

kind = "cpu" if "--cpu" in sys.argv else "cuda"
dist.init_process_group("gloo" if "--cpu" in sys.argv else "cpu:gloo,cuda:nccl")
rank, size = dist.get_rank(), dist.get_world_size()
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder, 0)


def model_of(seed):
    torch.manual_seed(seed)
    model = nn.Linear(6, 4).to(kind)
    fully_shard(model, mesh=init_device_mesh(kind, (size,)))
    return model


model = model_of(1)
dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=os.path.join(folder[0], "one"))
future = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=os.path.join(folder[0], "two"))
future.result()
for name in ("one", "two"):
    other = model_of(2)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=os.path.join(folder[0], name))
    set_model_state_dict(other, state["model"])
    local = other.weight.to_local().double().sum().item()
    files = sorted(file for file in os.listdir(os.path.join(folder[0], name)) if file.endswith("distcp"))
    assert len(files) == size, files
    print("rank", rank, name, local, other.bias.full_tensor().double().sum().item(), *files)
dist.destroy_process_group()
