"""--sparsity, --sparsity-pattern: weights of linear layers that become zero while the job trains."""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.techniques.pruning.layouts import exchange_masks, leave_out, parts, prunable_units, shard_comm
    from minidist.techniques.pruning.pruner import Pruner, check_prunable, prunable
    from minidist.techniques.pruning.schedule import SparsitySchedule, parse_pattern, parse_schedule, pattern_sparsity
    from minidist.techniques.pruning.selection import selection_bytes
__getattr__, __dir__ = lazy_imports(__name__, __file__)
