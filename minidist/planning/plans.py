"""How often a pipeline plan sends an activation from one rank to another.

Proved by: tests/train/test_volumes.py, tests/train/test_pipelines.py
"""

from itertools import pairwise

from minidist.pipeline.plan import Plan


def crossings_into(plan: Plan, stage: int) -> int:
    """Activations of a step that come to `stage` from another rank."""
    rank_of = plan.rank_of_stage()
    return sum(rank_of[stage - 1, i] != rank_of[stage, i] for i in range(plan.microbatches))


def crossings_of(plan: Plan) -> tuple[int, int, int]:
    """Activations of a step that go from rank to rank; borders between ranks on all distinct ways of micro-batches
    through the ranks; and these ways.
    """
    rank_of = plan.rank_of_stage()
    ways = [tuple(rank_of[stage, i] for stage in range(plan.stages)) for i in range(plan.microbatches)]

    def borders(way: tuple[int, ...]) -> int:
        return sum(a != b for a, b in pairwise(way))

    return sum(map(borders, ways)), sum(map(borders, set(ways))), len(set(ways))
