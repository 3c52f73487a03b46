"""--compression: send less of the gradient, and remember what was not sent.

Each class below is the state of a communication hook of `DistributedDataParallel`; one hook serves them all:

    ddp.register_comm_hook(TopK(comm, k=100), compress)

    gradient ──(+)──▶ corrected ──▶ compressed ──▶ to all ranks ──▶ decompressed and added in rank order ──▶ bucket
              ▲           │              │
              └─ residual ◀── corrected - compressed          error feedback: nothing is lost, it is only late

    class      on the wire, for d elements            compressed gradient
    Cast       2 d B, ring all-reduce                 cast to float16 or bfloat16; the sums are rounded too
    TopK       k (4 B + a value)                      the k elements of largest magnitude; |C(x)-x|^2 <= (1 - k/d) |x|^2
    Sign       d/8 B + a value                        sign(x) times the mean magnitude, |x|_1 / d
    QSGD       d B + a value                          |x|_2 sign(x) l/s, l rounded up or down at random: unbiased
    PowerSGD   r (m + k) values for an m x k matrix   a product of rank r, by one step of power iteration

Error feedback: sent + residual = gradient + earlier residual, so over the steps everything arrives. QSGD needs none
because its errors have mean zero, and a cast's are small. Of 16-bit gradients the arithmetic, the residuals
and "a value" are float32; top-k sends 2 B per element. `sent_bytes` of each class is what it sends, in closed form.

Sources: Lin et al., Deep gradient compression, ICLR 2018; Karimireddy et al., Error feedback fixes SignSGD, ICML 2019;
Alistarh et al., QSGD, NeurIPS 2017; Vogels et al., PowerSGD, NeurIPS 2019, algorithms 1 and 2.
error_feedback.py  what all compressors share
elementwise.py     float16 and bfloat16; the largest elements; signs and one magnitude; random rounding to a few levels
power_sgd.py       two thin factors of a matrix
by_name.py         a compressor by its name on the command line
extension.py       --compression in a job: a hook on each data axis, its state in checkpoints, and its rules
replay.py          the same on one device
push.py            what a worker pushes to a parameter server

Proved by: tests/techniques/test_compressors.py
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.parallel.compressor import compress
    from minidist.techniques.compression.by_name import NAMES, check_compression, make_compressor
    from minidist.techniques.compression.elementwise import QSGD, Cast, Sign, TopK, dequantize, quantize
    from minidist.techniques.compression.error_feedback import GradientCompressor
    from minidist.techniques.compression.power_sgd import PowerSGD, orthonormal
    from minidist.techniques.compression.replay import CompressionReplay
__getattr__, __dir__ = lazy_imports(__name__, __file__)
