"""A module whose global variable holds the place of the process in a grid."""

import torch.distributed as dist

grid = None


class Grid:
    def __init__(self, tp, dp):
        rank = dist.get_rank()
        self.tp_rank, self.dp_rank = rank % tp, rank // tp
        for start in range(dp):
            members = list(range(start * tp, start * tp + tp))
            group = dist.new_group(members)
            if rank in members:
                self.tp_group = group
        for start in range(tp):
            members = list(range(start, tp * dp, tp))
            group = dist.new_group(members)
            if rank in members:
                self.dp_group = group


def make(tp, dp):
    global grid
    grid = Grid(tp, dp)
