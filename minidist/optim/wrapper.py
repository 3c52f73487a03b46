"""A class that holds an optimizer and steps it, such as an outer optimizer, has the attributes of the optimizer.

Proved by: tests/optim/test_optimizers.py, tests/parallel/test_zero.py
"""

from typing import Any


class OptimizerWrapper:
    """Base class of classes that have an optimizer and step it: `optimizer`, whose attributes are found here, too.

    A setting (`lr`, `lr_factor`, ...) or `grad_scale` that is set here is set there; it would be ignored otherwise.
    """

    optimizer: Any

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:  # it is being made
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inside = self.__dict__.get("optimizer")
        if inside is not None and (name == "grad_scale" or name in inside.settings):
            setattr(inside, name, value)
        else:
            super().__setattr__(name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return {"step": steps taken, "state": `state`}, in which a class may have more than its optimizer."""
        return {**self.optimizer.state_dict(), "state": self.state}
