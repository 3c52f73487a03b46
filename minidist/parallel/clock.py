"""Computation takes time on a virtual clock only when a rank says how much it computed.

A `FlopCounter` counts the operations; before messages are sent, the count since the last time becomes seconds of the
communicator's clock, so that the messages depart when the computation before them is done. The strategies call
`advance_clock` at these points. Without a counter, time does not pass and nothing is done.

Proved by: tests/parallel/test_gradients.py, tests/train/test_offload.py
"""

from minidist.autograd import current_flop_counter
from minidist.comm import Comm

# Messages inside a layer belong to the pass that they are sent in; their purpose says which.
_PASS_OF = {"tensor_forward": "forward", "tensor_backward": "backward", "regather": "backward"}


def advance_clock(comm: Comm, name: str) -> None:
    """Let the time pass that the operations counted since the last call take.

    name: of the span in the trace, such as "forward", or the purpose of the messages that follow.
    """
    counter = current_flop_counter()
    if counter is not None:
        comm.compute(counter.take(), name=_PASS_OF.get(name, name))
