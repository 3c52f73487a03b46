"""Expert parallelism: a mixture's experts are sharded over ranks, and all-to-alls bring the tokens to them."""

from typing import TYPE_CHECKING

from minidist.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.parallel.expert.dispatch import ExpertDataParallel, ExpertParallel, exchange
    from minidist.parallel.expert.ragged import RaggedExpertParallel
    from minidist.parallel.expert.tensor_parallel import ExpertTensorParallel, expert_gpt_plan, expert_llama_plan

__all__ = [
    "ExpertDataParallel",
    "ExpertParallel",
    "ExpertTensorParallel",
    "RaggedExpertParallel",
    "exchange",
    "expert_gpt_plan",
    "expert_llama_plan",
]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
