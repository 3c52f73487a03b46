"""Whether what a GPU must hold fits in its memory: surely, perhaps, or not.

What is counted from shapes is not all that a GPU holds.

    kernels     fused ones of norms and activation functions keep what is counted, eager ones more (`eager_bytes`): the
                range is from one to the other, and the central estimate is in the middle, unless the job says which
    allocator   keeps freed blocks: 0.95 to 1.1 times the whole (`Calibration.memory_range`); of a job that is known to
                have eager kernels 1.18 times (`Calibration.eager_reserved`)
    device      its context and the buffers of the communication library: 1 GB (`Calibration.reserved_bytes`)

Proved by: tests/planning/test_cluster.py, tests/planning/test_zero_stages.py
"""

from dataclasses import dataclass, replace

from minidist.planning.cluster.calibration import CALIBRATION
from minidist.planning.cluster.gpus import Machine
from minidist.planning.cluster.layout import Job
from minidist.planning.cluster.memory import RankMemory


@dataclass(frozen=True)
class Fit:
    """The bytes that a GPU must have, as a range with its central estimate, and the machine that has it.

    reserved: what the allocator reserves, as a multiple of the central estimate of what is allocated.
    """

    machine: Machine
    low: float
    central: float
    high: float
    reserved: float = 1.0

    @classmethod
    def of_peak(cls, machine: Machine, peak: int, eager: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> "Fit":
        """Return the fit of a peak that is counted from shapes. eager: bytes of eager kernels, least, likely, most."""
        low, high = CALIBRATION.memory_range
        least, likely, most = (peak + more for more in eager)
        reserved = CALIBRATION.reserved_bytes
        return cls(machine, low * least + reserved, likely + reserved, high * most + reserved)

    @classmethod
    def of_rank(cls, machine: Machine, rank: RankMemory, job: Job) -> "Fit":
        """Return the fit of a rank's memory."""
        low, likely, high = (share * rank.eager for share in job.eager_shares)
        fit = cls.of_peak(machine, rank.peak, (low, likely, high))
        if not low:
            return fit
        reserved = CALIBRATION.eager_reserved
        return replace(fit, high=max(fit.high, reserved * fit.central), reserved=reserved)

    @property
    def fits(self) -> bool:
        """Return whether the central estimate fits, with what the allocator reserves."""
        return self.margin >= 0

    @property
    def margin(self) -> float:
        """Return the bytes that the central estimate leaves, below 0 when it does not fit."""
        return self.machine.memory - self.reserved * self.central

    @property
    def verdict(self) -> str:
        """Return "yes" when the whole range fits, "may not" when the central estimate does, "no" otherwise."""
        if not self.fits:
            return "no"
        return "yes" if self.high <= self.machine.memory else "may not"

    @property
    def room(self) -> str:
        """Return how much memory is free or missing, as text."""
        least, most = self.machine.memory - self.high, self.machine.memory - self.low
        if least >= 0:
            return f"free {gigabytes(least, most)}"
        if most <= 0:
            return f"missing {gigabytes(-most, -least)}"
        return f"{gigabytes(-least)} too much at the upper end, {gigabytes(most)} free at the lower"

    def needs(self, who: str) -> str:
        """Return how much memory someone needs and the GPU has, as a sentence without a full stop."""
        has = f"{self.machine.memory / 1e9:,.0f} GB ({self.machine.memory / 2**30:,.0f} GiB)"
        return f"{who} needs {gigabytes(self.low, self.high)}, and {self.machine.name} has {has}"


def not_counted() -> str:
    """Return as a sentence what is not counted from shapes, and between which bounds it is taken to be."""
    low, high = CALIBRATION.memory_range
    return (
        f"not counted: what eager kernels keep of a gated block; fragmentation of the allocator, taken as {low:.2f} to"
        f" {high:.2f} times the total; the device's context and the buffers of the communication library, taken as"
        f" {CALIBRATION.reserved_bytes / 1e9:.1f} GB"
    )


def gigabytes(*numbers: float) -> str:
    """Return bytes as GB, "1.5 GB" or a range, "12 to 14 GB", with one decimal below 10 GB."""
    written = [f"{n / 1e9:,.0f}" if n >= 10e9 else f"{n / 1e9:.1f}" for n in numbers]
    return " to ".join(dict.fromkeys(written)) + " GB"
