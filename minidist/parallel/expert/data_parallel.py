"""Data parallelism of a model with sharded experts, for a program without `train`.

    mesh (dp, ep)         replicated parameters     summed over dp x ep
                          experts                   summed over dp: their own rank has seen the tokens of all ep ranks

Proved by: tests/parallel/test_expert.py
"""

from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.core.autograd import Parameter, Tensor
from minidist.core.base.trace import purpose
from minidist.core.collectives import broadcast
from minidist.core.comm import Comm, Mesh
from minidist.core.nn.flat import FlatParameters
from minidist.core.nn.module import Module
from minidist.core.parallel.data_parallel import GradientReducer


class ExpertDataParallel(Module):
    """Wraps a model with sharded experts so that `loss.backward()` leaves complete gradients on every rank.

    mesh: has the axis ep; dp and cp or not. The loss must be divided by the *global* count (sums are formed, no means).
    `flats`: the flat parameters, replicated ones first; give them to the optimizer. Gradient messages have the purpose
    `gradient_reduce`: 2 (n-1)/n of the replicated parameters over n = dp x cp x ep ranks, and of the experts over dp x
    cp.
    """

    def __init__(self, module: Module, mesh: Mesh, algorithm: str = "ring") -> None:
        if "ep" not in mesh.axis_names:
            raise UsageError(
                f"{quoted(mesh)} has no axis 'ep'; make one with init_device_mesh(comm, (dp, ep), ('dp', 'ep'))"
            )
        self.module = module

        # Replicated parameters, and those of this rank's experts, because they are summed over different ranks.
        groups: dict[bool, list[Parameter]] = {False: [], True: []}
        for parameter in module.parameters():
            groups[bool(parameter.layout and "ep" in parameter.layout.axes)].append(parameter)

        # An expert's own rank has seen the tokens of all ep ranks, so its gradient is complete over ep already.
        data = tuple(name for name in mesh.axis_names if name in ("dp", "cp"))
        shared = mesh[tuple(name for name in mesh.axis_names if name in ("dp", "cp", "ep"))]
        comms: list[Comm | None] = [shared, mesh[data] if data else None]

        # One flat unit and one reducer per group; an empty group sends nothing.
        self.flats, self.reducers = [], []
        for parameters, comm in zip(groups.values(), comms, strict=True):
            if not parameters:
                continue
            flat = FlatParameters(parameters)
            self.flats.append(flat)
            if comm is not None:
                with purpose("startup"):
                    broadcast(comm, flat.data)
                reducer = GradientReducer(flat, comm, algorithm=algorithm)
                reducer.observe()
                if comm is shared:
                    # The experts are summed over fewer ranks, or complete.
                    reducer.guard.covers(module, module.parameters())
                self.reducers.append(reducer)

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
        """The module's output for this rank's rows."""
        return self.module(*arguments, **keywords)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for flat in self.flats:
            flat.zero_grad()
