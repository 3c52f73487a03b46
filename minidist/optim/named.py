"""The optimizer that a name stands for: one of minidist, or a user's own, FILE.py:CLASS.

    class SignSGD(Optimizer):                                       # --optimizer signs.py:SignSGD
        def update(self, data, grad, state, work, lr, decay, count):
            data -= lr * np.sign(grad)

A user's class is derived from `minidist.core.optim.Optimizer`. `update` sees a slice of the flat weights, so an
optimizer that computes each element by itself works with ZeRO, FSDP, offloading and checkpoints as those of minidist
do.

Proved by: tests/optim/test_own_optimizer.py
"""

import inspect
from functools import cache
from importlib import import_module
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.base.user_file import is_user_function, load_function
from minidist.core.optim.optimizer import Optimizer

# name -> module and class
OPTIMIZERS = {
    "sgd": ("core.optim.sgd", "SGD"),
    "adagrad": ("optim.adagrad", "Adagrad"),
    "rmsprop": ("optim.rmsprop", "RMSProp"),
    "adam": ("optim.adam", "Adam"),
    "adamw": ("core.optim.adam", "AdamW"),
    "lars": ("optim.lars", "LARS"),
    "lamb": ("optim.lamb", "LAMB"),
    "muon": ("optim.muon", "Muon"),
}


@cache
def optimizer_named(name: str) -> type[Optimizer]:
    """Return the class; UsageError for FILE.py:CLASS that is no `Optimizer`, or takes no learning rate."""
    if not is_user_function(name):
        module, kind = OPTIMIZERS[name]
        return getattr(import_module(f"minidist.{module}"), kind)  # type: ignore[no-any-return]
    found: Any = load_function(name, "class")
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise UsageError(
            f"--optimizer {quoted(name)} is not a subclass of minidist.core.optim.Optimizer; derive the class from it"
        )
    if not _takes(found, "lr"):
        raise UsageError(
            f"--optimizer {quoted(name)} takes no lr; let its __init__ have parameters and lr, or leave it out"
        )
    return found


@cache
def takes(name: str, setting: str) -> bool:
    """Return whether the optimizer of this name has a setting: whether its constructor has a parameter called so."""
    return _takes(optimizer_named(name), setting)


def _takes(kind: Any, setting: str) -> bool:
    taken = inspect.signature(kind).parameters
    # Further arguments go to the constructor of the base class.
    more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    return setting in taken or (more and _takes(kind.__base__, setting))
