"""The speeds and sizes of GPUs and their clusters, from the makers' data sheets.

Peaks are dense (without structured sparsity). `memory` is what the driver reports: a GPU of "80 GB" has 79.2 GiB, which
are 85e9 bytes. `link` is the bandwidth of one GPU to the others of its node, and `network` is its share of the
bandwidth of the node's network adapters; both are in bytes per second and count one direction. Other machines are
described by a JSON or TOML file with the same names (`Machine.read`).

Sources: the data sheets of NVIDIA V100, A100, H100, H200, DGX B200, GB200 NVL72, GB300 NVL72 and AMD MI300X; DGX A100
and H100 have eight adapters of 200 and 400 Gbit/s for eight GPUs.

Proved by: tests/planning/test_cluster.py
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.read_file import read_json, read_toml

PRECISIONS = ("fp16", "bf16", "fp8")
FAMILIES = ("a100", "h100", "b200")  # the families whose efficiencies are in calibration.py

# Key of a machine file -> its least and its largest value, far from those of any GPU, and the unit.
RANGES = {
    "fp16": (1e9, 1e21, "FLOP/s"),
    "fp8": (1e9, 1e21, "FLOP/s"),
    "memory": (1e9, 1e18, "bytes"),
    "memory_bandwidth": (1e6, 1e18, "bytes/s"),
    "link": (1e4, 1e18, "bytes/s"),
    "network": (1e4, 1e18, "bytes/s"),
    "gpus_per_node": (1, 100_000, "GPUs"),
}


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes. FLOP/s, bytes and bytes per second of one GPU; `gpus_per_node` is a count."""

    name: str
    fp16: float
    fp8: float  # 0 where the GPU has no 8-bit floats
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    gpus_per_node: int = 8
    family: str = "h100"

    def peak(self, precision: str) -> float:
        """Return the FLOP/s of matrix products; UsageError for a precision that the GPU does not have."""
        if precision not in PRECISIONS:
            raise UsageError(f"--precision {quoted(precision)}; it must be {', '.join(PRECISIONS)}")
        if precision == "fp8" and not self.fp8:
            raise UsageError(f"--precision fp8: {self.name} has no 8-bit floats; give --precision bf16")
        return self.fp8 if precision == "fp8" else self.fp16

    @classmethod
    def read(cls, path: str | Path) -> "Machine":
        """Return the machine that a file describes; UsageError names the key that is missing, unknown or wrong."""
        remedy = "give a file with the keys " + ", ".join(field.name for field in fields(cls))
        read = read_toml if str(path).endswith(".toml") else read_json
        content = read(path, "--gpu", remedy)
        if not isinstance(content, dict):
            raise UsageError(f"--gpu {quoted_path(path)} is not a table of keys; {remedy}")
        known = {field.name for field in fields(cls)}
        for key in content:
            if key not in known:
                raise UsageError(f"key {quoted(key)} in {quoted_path(path)} is unknown{nearest(key, known)}; {remedy}")
        values: dict[str, Any] = {"name": Path(path).stem, "fp8": 0.0, **content}
        values.setdefault("gpus_per_node", 8)
        for key in RANGES:
            if key not in values:
                raise UsageError(f"{quoted_path(path)} has no key {key!r}; {remedy}")
            values[key] = _number(values[key], key, str(path))
        if values.setdefault("family", "h100") not in FAMILIES:
            raise UsageError(
                f"family {quoted(values['family'])} in {quoted_path(path)}; it must be {', '.join(FAMILIES)}"
            )
        if not isinstance(values["name"], str):
            raise UsageError(
                f"name {quoted(values['name'])} in {quoted_path(path)} is not a string; write it in quotes"
            )
        return cls(**values)


def _number(value: Any, key: str, path: str) -> float:
    """Return the value of a key of a machine file as a number; UsageError unless it is in the range."""
    least, most, unit = RANGES[key]
    kinds = (int,) if key == "gpus_per_node" else (int, float)
    # Only fp8 may be 0, which means that the GPU has no 8-bit floats. NaN is in no range.
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if is_number and (least <= value <= most or (key == "fp8" and value == 0)):
        return value if key == "gpus_per_node" else float(value)
    kind = "a whole number" if key == "gpus_per_node" else "0, or a number" if key == "fp8" else "a number"
    raise UsageError(
        f"{key} in {quoted_path(path)} is {quoted(value)}; it must be {kind} from {least:g} to {most:g} {unit}"
    )


_T, _G = 1e12, 1e9
_A100 = Machine("a100-80gb", 312 * _T, 0, 85 * _G, 2039 * _G, 300 * _G, 25 * _G, family="a100")
_H100 = Machine("h100", 989.4 * _T, 1978.9 * _T, 85 * _G, 3350 * _G, 450 * _G, 50 * _G)
_B200 = Machine("b200", 2250 * _T, 4500 * _T, 191 * _G, 8000 * _G, 900 * _G, 50 * _G, family="b200")

MACHINES = {
    machine.name: machine
    for machine in (
        Machine("v100", 125 * _T, 0, 34 * _G, 900 * _G, 150 * _G, 12.5 * _G, family="a100"),
        replace(_A100, name="a100-40gb", memory=42 * _G, memory_bandwidth=1555 * _G),
        _A100,
        _H100,
        replace(_H100, name="h100-96gb", memory=102 * _G, memory_bandwidth=2400 * _G),
        replace(_H100, name="h800", link=200 * _G),
        replace(_H100, name="h200", memory=150 * _G, memory_bandwidth=4800 * _G),
        _B200,
        replace(_B200, name="gb200", fp16=2500 * _T, fp8=5000 * _T, memory=198 * _G, gpus_per_node=72),
        replace(_B200, name="b300", memory=288 * _G, network=100 * _G),
        replace(
            _B200, name="gb300", fp16=2500 * _T, fp8=5000 * _T, memory=298 * _G, network=100 * _G, gpus_per_node=72
        ),
        Machine("mi300x", 1307.4 * _T, 2614.9 * _T, 206 * _G, 5300 * _G, 448 * _G, 50 * _G),
    )
}


def machine_of(name: str) -> Machine:
    """Return a machine by its name or from its file; UsageError for one that is neither."""
    if name.lower() in MACHINES:
        return MACHINES[name.lower()]
    if Path(name).suffix in (".json", ".toml"):
        return Machine.read(name)
    near = nearest(name.lower(), MACHINES)
    raise UsageError(
        f"--gpu {quoted_path(name)} is unknown{near}; it must be {', '.join(MACHINES)}, or a .json or .toml file"
    )
