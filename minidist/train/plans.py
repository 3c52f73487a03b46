"""The plan that a config asks for, and how often it sends."""

from itertools import pairwise

from minidist.base.errors import UsageError
from minidist.pipeline.passes import recompute
from minidist.pipeline.plan import Plan, load_plan, parts, unpack
from minidist.pipeline.validate import validate
from minidist.train.config import TrainConfig


def make_plan(config: TrainConfig, microbatches: int) -> Plan:
    """The validated plan of one pipeline. UsageError when the schedule cannot be made, judged or used for training."""
    plan = load_plan(config.schedule, config.pp, microbatches, config.chunks)
    if plan.updates != "flush":
        trains = "trains nothing" if plan.updates == "none" else "updates its weights on the way"
        raise UsageError(f"--schedule {config.schedule} {trains}; train with a synchronous one, such as 1f1b or zb-h1")
    validate(plan)
    again = config.recompute == "full" and config.offload != "activations"  # blocks on the host recompute themselves
    return recompute(plan) if again else plan


def crossings_of(plan: Plan) -> tuple[int, int, int]:
    """Activations of a step that go from rank to rank; borders between ranks on all distinct ways of micro-batches through the
    ranks; and these ways."""
    home = {}
    for rank, order in enumerate(plan.orders):
        for action in (unpack(part) for item in order for part in parts(item)):
            if action.kind == "F":
                home[action.stage, action.microbatch] = rank
    ways = [tuple(home[stage, i] for stage in range(plan.stages)) for i in range(plan.microbatches)]

    def borders(way: tuple[int, ...]) -> int:
        return sum(a != b for a, b in pairwise(way))

    return sum(map(borders, ways)), sum(map(borders, set(ways))), len(set(ways))
