"""AdamW and the gradient norm against PyTorch's fused AdamW and clip_grad_norm_, one thread, in ns an element.

    OPENBLAS_NUM_THREADS=1 python -m minidist.bench.optimizer [elements]

Interleaved rounds; printed are the minima of both sides and the median of the ratios. Needs the extra `peers`.
"""

import os
import statistics
import sys
import time

import numpy as np
import torch

from minidist.optim import AdamW, ParameterSlice, clip_grad_norm_


def seconds(function, repeats=3):
    """The fastest of `repeats` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def compare(name, own, peer, elements, rounds=8):
    """One line about two functions that do the same."""
    pairs = [(seconds(own), seconds(peer)) for _ in range(rounds)]
    best_own, best_peer = (min(times) / elements * 1e9 for times in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{name:12s} own {best_own:.2f} ns, torch {best_peer:.2f} ns an element, ratio {ratio:.2f}")


def main(elements):
    """Both libraries take the same steps from the same numbers; the weights are compared before a ratio is printed."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    data = generator.standard_normal(elements, dtype=np.float32)
    grad = generator.standard_normal(elements, dtype=np.float32) * np.float32(0.01)
    parameter = torch.nn.Parameter(torch.from_numpy(data.copy()))
    parameter.grad = torch.from_numpy(grad.copy())
    piece = ParameterSlice(data, grad, "w")
    own, peer = AdamW([piece]), torch.optim.AdamW([parameter], fused=True)
    for _ in range(3):
        own.step()
        peer.step()
    difference = float(np.abs(data - parameter.detach().numpy()).max())
    print(f"{elements} float32 elements, OPENBLAS_CORETYPE={os.environ.get('OPENBLAS_CORETYPE')}, ", end="")
    print(f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}, max |difference| {difference:.1e}")
    assert difference < 1e-5
    compare("AdamW", own.step, peer.step, elements)
    norm = torch.nn.utils.clip_grad_norm_
    compare("norm", lambda: clip_grad_norm_(piece, 1e9), lambda: norm([parameter], 1e9), elements)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3_200_000)
