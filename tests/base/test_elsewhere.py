"""What the core calls and does not contain is there in every program, and loaded by none that does not use it."""

import subprocess
import sys

from minidist.core.base.hooks import Elsewhere, elsewhere

UNUSED = """
import sys
import numpy as np
from minidist.core.autograd import Tensor
from minidist.core.nn import MLP
from minidist.core.optim import AdamW
model = MLP([4, 8, 2])
model(Tensor(np.ones((3, 4), np.float32))).sum().backward()
AdamW(model.parameters()).step()
print(*(m for m in sys.modules if m.startswith("minidist")))
"""


def test_every_function_that_the_core_calls_is_set():
    assert set(Elsewhere.__annotations__) == set(vars(elsewhere))


def test_a_step_on_one_device_loads_none_of_their_modules():
    ran = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    for name in ("base.device", "base.meta", "base.promise_fibers", "nn.describe", "nn.moving"):
        assert f"minidist.{name}" not in loaded, name
