"""What sums the gradients of a pipeline's stages over its replicas, where no wrapper of the stages does.

Proved by: tests/pipeline/test_runtime.py
"""

from collections.abc import Mapping, Sequence

from minidist.core.comm import Comm
from minidist.core.parallel.data_parallel import GradientReducer
from minidist.core.pipeline.runtime.stages import PipelineStage
from minidist.parallel.unused import ZerosReducer


def replica_reducers(
    stages: Mapping[int, PipelineStage], data: Comm, algorithm: str
) -> Mapping[int, Sequence[GradientReducer]]:
    """Return what sums the gradients of each stage over `data`. Every rank calls it for the same stages.

    A parameter that a rank has no gradient of takes part as zeros. algorithm: of the all-reduce.
    """
    made: dict[int, list[GradientReducer]] = {}
    for n, stage in sorted(stages.items()):
        for flat in stage.flats:
            if len(flat):
                made.setdefault(n, []).append(ZerosReducer(flat, data.dup(), algorithm=algorithm))
    return made
