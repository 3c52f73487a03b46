"""How often a pipeline plan sends an activation from one rank to another.

Proved by: tests/train/test_volumes.py, tests/train/test_pipelines.py
"""

from itertools import pairwise

from minidist.pipeline.plan import Plan, parts, unpack


def _homes(plan: Plan) -> dict[tuple[int, int], int]:
    """(stage, micro-batch) -> the rank that runs it."""
    home = {}
    for rank, order in enumerate(plan.orders):
        for action in (unpack(part) for item in order for part in parts(item)):
            if action.kind == "F":
                home[action.stage, action.microbatch] = rank
    return home


def crossings_into(plan: Plan, stage: int) -> int:
    """Activations of a step that come to `stage` from another rank."""
    home = _homes(plan)
    return sum(home[stage - 1, i] != home[stage, i] for i in range(plan.microbatches))


def crossings_of(plan: Plan) -> tuple[int, int, int]:
    """Activations of a step that go from rank to rank; borders between ranks on all distinct ways of micro-batches
    through the ranks; and these ways.
    """
    home = _homes(plan)
    ways = [tuple(home[stage, i] for stage in range(plan.stages)) for i in range(plan.microbatches)]

    def borders(way: tuple[int, ...]) -> int:
        return sum(a != b for a, b in pairwise(way))

    return sum(map(borders, ways)), sum(map(borders, set(ways))), len(set(ways))
