"""--distill-from CHECKPOINT: a student learns from labels and from the logits of a trained model, its teacher."""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.techniques.distillation.loss import DistillationLoss, SoftTargets, distillation_volume
    from minidist.techniques.distillation.teacher import (
        Teacher,
        find_teacher,
        place_teacher,
        serve_logits,
        teacher_bytes,
    )
__getattr__, __dir__ = lazy_imports(__name__, __file__)
