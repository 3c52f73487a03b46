"""The experts of a mixture sharded over ranks: `ExpertParallel` is the style, `ExpertDataParallel` sums gradients."""

from minidist.parallel.expert.dispatch import ExpertDataParallel, ExpertParallel, exchange
from minidist.parallel.expert.tensor_parallel import ExpertTensorParallel, expert_gpt_plan

__all__ = ["ExpertDataParallel", "ExpertParallel", "ExpertTensorParallel", "exchange", "expert_gpt_plan"]
