"""Which parameters are usually not decayed: biases, and the weights of norms.

Proved by: tests/optim/test_optimizers.py
"""

import re

from minidist.core.optim.optimizer import Group


def is_bias_or_norm(name: str) -> bool:
    """Return True for "h.0.attn.c_attn.bias" and for "h.0.ln_1.weight": parameters that are usually not decayed."""
    return re.search(r"(^|\.)(bias$|(ln|norm|layer_?norm)(_\w+|\d+)?(\.|$))", name) is not None


NO_DECAY = Group(is_bias_or_norm, weight_decay=0.0)
