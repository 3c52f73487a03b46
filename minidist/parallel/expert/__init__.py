"""Expert parallelism in addition to the core's: data parallelism, capacities that differ, matrices that are split."""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.parallel.expert.data_parallel import ExpertDataParallel
    from minidist.parallel.expert.ragged import RaggedExpertParallel
    from minidist.parallel.expert.tensor_parallel import ExpertTensorParallel, expert_gpt_plan, expert_llama_plan
__getattr__, __dir__ = lazy_imports(__name__, __file__)
