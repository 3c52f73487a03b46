"""Whether what a GPU must hold fits in its memory: surely, perhaps, or not.

What is counted from shapes is not all that a GPU holds. An allocator that keeps freed blocks, and kernels that keep
more or less than the formulas, make the peak a range (`Calibration.memory_range`); the device's context and the
buffers of the communication library come on top (`Calibration.reserved_bytes`).

Proved by: tests/planning/test_cluster.py, tests/planning/test_zero_stages.py
"""

from dataclasses import dataclass

from minidist.planning.cluster.calibration import CALIBRATION, Calibration
from minidist.planning.cluster.gpus import Machine


@dataclass(frozen=True)
class Fit:
    """The bytes that a GPU must have, as a range with its central estimate, beside those of a machine."""

    machine: Machine
    low: float
    central: float
    high: float

    @classmethod
    def of_peak(cls, machine: Machine, peak: int, calibration: Calibration = CALIBRATION) -> "Fit":
        """Return the fit of a peak that is counted from shapes."""
        low, high = calibration.memory_range
        reserved = calibration.reserved_bytes
        return cls(machine, low * peak + reserved, peak + reserved, high * peak + reserved)

    @property
    def fits(self) -> bool:
        """Return whether the central estimate fits."""
        return self.central <= self.machine.memory

    @property
    def margin(self) -> float:
        """Return the bytes that the central estimate leaves, below 0 when it does not fit."""
        return self.machine.memory - self.central

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


def not_counted(calibration: Calibration = CALIBRATION) -> str:
    """Return as a sentence what is not counted from shapes, and between which bounds it is taken to be."""
    low, high = calibration.memory_range
    return (
        f"not counted: fragmentation of the allocator and kernels that keep other values, taken as {low:.2f} to"
        f" {high:.2f} times the total; the device's context and the buffers of the communication library, taken as"
        f" {calibration.reserved_bytes / 1e9:.1f} GB"
    )


def gigabytes(*numbers: float) -> str:
    """Return bytes as GB, "1.5 GB" or a range, "12 to 14 GB", with one decimal below 10 GB."""
    written = [f"{n / 1e9:,.0f}" if n >= 10e9 else f"{n / 1e9:.1f}" for n in numbers]
    return " to ".join(dict.fromkeys(written)) + " GB"
