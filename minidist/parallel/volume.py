"""How much a parallel layer sends: the type in which each technique states its own closed form.

A technique's `..._volume` function stands in its own module, next to the code that sends; `planning/layer_volumes.py`
sums them over a model's layers, and the tests compare the sum with the trace of a run, byte for byte.

Proved by: tests/planning/test_volumes.py
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Volume:
    """Return the elements that all ranks of an axis together send for one layer in one micro-batch, per pass.

    regather: what backward gathers a second time because forward kept the shard only.
    """

    forward: int = 0
    backward: int = 0
    regather: int = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(self.forward + other.forward, self.backward + other.backward, self.regather + other.regather)

    def __mul__(self, layers: int) -> "Volume":
        return Volume(self.forward * layers, self.backward * layers, self.regather * layers)
