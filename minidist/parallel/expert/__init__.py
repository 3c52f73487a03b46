"""Expert parallelism: a mixture's experts are sharded over ranks, and all-to-alls bring the tokens to them."""

from minidist.parallel.expert.dispatch import ExpertDataParallel, ExpertParallel, exchange
from minidist.parallel.expert.tensor_parallel import ExpertTensorParallel, expert_gpt_plan, expert_llama_plan

__all__ = [
    "ExpertDataParallel",
    "ExpertParallel",
    "ExpertTensorParallel",
    "exchange",
    "expert_gpt_plan",
    "expert_llama_plan",
]
