"""A compressor by its name on the command line: fp16, bf16, topk:K, sign, qsgd:LEVELS, powersgd:RANK.

Proved by: tests/techniques/test_compressors.py
"""

from collections.abc import Callable

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.limits import MAX_COUNT, MIN_VALUE
from minidist.core.comm import Comm
from minidist.techniques.compression.elementwise import MAX_LEVELS, QSGD, Cast, Sign, TopK
from minidist.techniques.compression.error_feedback import GradientCompressor
from minidist.techniques.compression.power_sgd import PowerSGD

MAKERS: dict[str, Callable[[Comm, float, int, str], GradientCompressor]] = {
    "fp16": lambda comm, number, seed, op: Cast(comm, "float16", op),
    "bf16": lambda comm, number, seed, op: Cast(comm, "bfloat16", op),
    "topk": lambda comm, number, seed, op: TopK(comm, number, op),
    "sign": lambda comm, number, seed, op: Sign(comm, op),
    "qsgd": lambda comm, number, seed, op: QSGD(comm, int(number), seed, op),
    "powersgd": lambda comm, number, seed, op: PowerSGD(comm, int(number), seed, op),
}
NAMES = ("none", *MAKERS)
CASTS = ("fp16", "bf16")
NUMBERS = {
    "topk": "elements of a bucket, or a share below 1",
    "qsgd": f"levels, 1 to {MAX_LEVELS}",
    "powersgd": "rank, at least 1",
}


def check_compression(text: str) -> tuple[str, float | None]:
    """Return (name, number) of such a text. Raises UsageError when it is not one."""
    name, colon, word = text.partition(":")
    if name not in NAMES:
        raise UsageError(
            f"compression {quoted(text)}{nearest(name, NAMES)}; it must be one of none, fp16, bf16, topk:K, sign,"
            " qsgd:LEVELS, powersgd:RANK"
        )

    # fp16, bf16 and sign have nothing to choose.
    if name not in NUMBERS:
        if colon:
            raise UsageError(f"compression {quoted(text)}: {name} takes no number")
        return name, None

    # The number is a positive integer; for top-k it may also be a share below 1.
    try:
        number = float(word)
    except ValueError:
        number = -1.0
    whole = 1 <= number <= (MAX_LEVELS if name == "qsgd" else MAX_COUNT) and number.is_integer()
    if not (whole or (name == "topk" and MIN_VALUE <= number < 1)):
        raise UsageError(
            f"compression {quoted(text)}: {name} needs a number ({NUMBERS[name]}), such as"
            f" {name}:{0.01 if name == 'topk' else 4}"
        )
    return name, number


def make_compressor(text: str, comm: Comm, op: str = "mean", seed: int = 0) -> GradientCompressor:
    """Return the compressor of that name for this rank. seed: of QSGD's draws and PowerSGD's first queries."""
    name, number = check_compression(text)
    if name == "none":
        raise UsageError("compression 'none' is not a compressor; do not register a hook")
    return MAKERS[name](comm, number or 0, seed, op)
