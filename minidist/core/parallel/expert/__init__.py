"""Expert parallelism: a mixture's experts are sharded over ranks, and all-to-alls bring the tokens to them."""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.core.parallel.expert.dispatch import ExpertParallel as ExpertParallel
    from minidist.core.parallel.expert.dispatch import exchange as exchange
__getattr__, __dir__ = lazy_imports(__name__, __file__)
