"""The plan that a config asks for."""

from minidist.base.errors import UsageError
from minidist.pipeline.passes import recompute
from minidist.pipeline.plan import Plan, load_plan
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
