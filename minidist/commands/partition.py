"""`minidist partition`: which layers make a stage.

Proved by: tests/pipeline/test_partition.py, tests/planning/test_profiler.py
"""

from typing import Annotated

from minidist.commands.command import Argument, Option, Result, json_or_table
from minidist.commands.flags import above_zero
from minidist.core.base.errors import UsageError


@json_or_table
def partition(
    profile: Annotated[
        str, Argument(help="a JSON list of layers (op, fwd_ms, bwd_ms, act_bytes, param_bytes), or FILE:NAME")
    ],
    machines: Annotated[int, Option(help="machines to use; stages, for the methods that replicate none")],
    bandwidth: Annotated[
        float | None, Option(help="pipedream: bytes per second of a link", callback=above_zero)
    ] = None,
    method: Annotated[
        str, Option(help="pipedream, gpipe (times differ least), time (fastest slowest stage), parameters or uniform")
    ] = "pipedream",
    objective: Annotated[
        str, Option(help="pipedream: released (compute + synchronisation) or paper (the larger of the two)")
    ] = "released",
    memory_limit: Annotated[float | None, Option(help="pipedream: bytes of a machine", callback=above_zero)] = None,
) -> Result:
    """Decide which layers make a stage; by PipeDream's optimizer also how many machines share it."""
    from minidist.pipeline.partition import METHODS, pipedream, read_profile
    from minidist.pipeline.partition import partition as cut

    # Only PipeDream's optimizer replicates stages, so only it looks at links and at the memory of machines.
    layers = read_profile(profile)
    if method == "pipedream":
        if bandwidth is None:
            raise UsageError(
                "--method pipedream needs --bandwidth, the bytes per second of a link; or take --method time"
            )
        result = pipedream(layers, machines, bandwidth, objective, memory_limit)
    elif bandwidth is not None or memory_limit is not None:
        raise UsageError(
            f"--method {method} looks at no link and no memory; leave --bandwidth and --memory-limit out, or take"
            f" --method {METHODS[0]}"
        )
    else:
        result = cut(layers, method, machines)

    def show() -> None:
        print(f"slowest stage {result.slowest_stage_seconds:.6g} s")
        for number, stage in enumerate(result.stages):
            machines_of = f"{stage.replicas} machine{'s' if stage.replicas > 1 else ''}"
            print(f"stage {number}: layers {stage.first} to {stage.last} on {machines_of}")

    return Result(result.as_dict(), show)
