"""The parameter server: some ranks hold the weights, the others compute gradients, and no rank has to wait for all.

    servers   rank 0: keys a, c     rank 1: key b       each key (a parameter) lives on one server
                 ▲  │                  ▲  │
            push │  │ pull        push │  │ pull        gradients to the servers, weights to the workers
                 │  ▼                  │  ▼
    workers   rank 2 ... rank n-1                       worker w at its clock c computes gradient (w, c)

A worker pushes the gradient of its clock c to all servers. Each server sends its weights, as the worker's next pull,
when the *consistency* allows that worker to start clock c+1:

    bsp        all workers' gradients of a clock are added in worker order and applied as one update; all workers wait
    delay:t    the same, but a worker may run up to t clocks ahead of the last update (bounded delay; delay:0 is bsp)
    ssp:s      every push is a separate update, applied as it comes; a worker may start clock c when the slowest has
               done c-s pushes: it sees all updates of the clocks up to c-s-1, and its own (stale synchronous)
    asp        ssp without a bound: no worker waits for another

The network decides what comes first: a server's receive is a wildcard. So a run's numbers depend on its order, but on
nothing else. The order of each server's updates and the version that each pull saw are in the trace, and `replay`
computes the same weights from them on one device, bit for bit.

The others go on without a worker that dies (where the world survives it: `SimWorld(on_failure="isolate")`): a push that
was received whole is applied once, a part of one never, and a bound no longer waits for it. A server that dies takes
its weights with it.

In this folder: `server_shards` (which server holds which keys), `worker`, `server` (with the settings of a run, such as
how far a worker may run ahead), `server_job` (a run, called by all ranks), `server_replay` (the run again, on one
device). Of `minidist train --strategy ps`: `extension` (with its settings and rules), `loop` (with the comparison with
one device), `ranks` (what a worker computes and a server holds), `trainer` (the job on a rank).

Sources: Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014 (servers, bounded delay);
Ho et al., More effective distributed ML via a stale synchronous parallel parameter server, NeurIPS 2013; Zhang et al.,
Staleness-aware async-SGD, IJCAI 2016 (the rate divided by the staleness).
Proved by: tests/parallel/test_parameter_server.py, tests/parallel/test_killed_workers.py
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.techniques.parameter_server.server import ServerConfig, Updates, parse_consistency
    from minidist.techniques.parameter_server.server_job import run
    from minidist.techniques.parameter_server.server_replay import read_records, replay
    from minidist.techniques.parameter_server.server_shards import Rows, Weights, compress_pushes, make_shards

__getattr__, __dir__ = lazy_imports(__name__, __file__)
