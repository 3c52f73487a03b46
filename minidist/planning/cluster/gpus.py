"""The speeds and sizes of GPUs and their clusters, from the makers' data sheets.

Peaks are dense (without structured sparsity). `memory` is what the driver reports: a GPU of "80 GB" has 79.2 GiB, which
are 85e9 bytes. `link` is the bandwidth of one GPU to the others of its node, and `network` is its share of the
bandwidth of the node's network adapters; both are in bytes per second and count one direction. Other machines are
described by a JSON or TOML file with the same names (`Machine.read`).

Sources: the data sheets of NVIDIA V100, A100, H100, H200, DGX B200, GB200 NVL72, GB300 NVL72 and AMD MI300X; DGX A100
and H100 have eight adapters of 200 and 400 Gbit/s for eight GPUs. Cards for slots (L40S, RTX 4090, ...) talk through
the bus, and are planned as eight in a node with one adapter of 100 Gbit/s: another node needs a file. Matrix products
of GeForce cards are those with float32 sums. How much of its peak a GPU reaches was measured on A100, H100 and B200
only.

Proved by: tests/planning/test_cluster.py
"""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from minidist.base.read_file import read_json, read_toml
from minidist.core.base.errors import UsageError, nearest, quoted, quoted_path

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


def _card(
    name: str, fp16: float, fp8: float, memory: float, bandwidth: float, bus: float, family: str = "a100"
) -> Machine:
    """Return a node of eight cards on a bus, in TFLOP/s, GB and GB/s, with one adapter of 100 Gbit/s for all."""
    return Machine(
        name, fp16 * _T, fp8 * _T, memory * _G, bandwidth * _G, bus * _G, network=12.5 / 8 * _G, family=family
    )


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
        Machine("mi325x", 1307.4 * _T, 2614.9 * _T, 275 * _G, 6000 * _G, 448 * _G, 50 * _G),
        replace(_A100, name="a800", link=200 * _G),
        replace(_H100, name="h20", fp16=148 * _T, fp8=296 * _T, memory=102 * _G, memory_bandwidth=4000 * _G),
        # Cards in slots of a PCI Express bus.
        _card("h100-pcie", 756, 1513, 85, 2000, 64, "h100"),
        _card("h100-nvl", 835, 1671, 100, 3900, 64, "h100"),
        _card("a100-pcie-40gb", 312, 0, 42, 1555, 32),
        _card("a100-pcie-80gb", 312, 0, 85, 1935, 32),
        _card("l40s", 362, 733, 48, 864, 32),
        _card("l40", 181, 362, 48, 864, 32),
        _card("l4", 121, 242, 24, 300, 32),
        _card("a40", 149.7, 0, 48, 696, 32),
        _card("a30", 165, 0, 25, 933, 32),
        _card("a10", 125, 0, 24, 600, 32),
        _card("t4", 65, 0, 16, 320, 16),
        _card("rtx-a6000", 154.8, 0, 51, 768, 32),
        _card("rtx-6000-ada", 364, 728, 51, 960, 32),
        _card("rtx-3090", 71, 0, 25.8, 936, 32),
        _card("rtx-4090", 165, 330, 25.8, 1008, 32),
        _card("rtx-5090", 209.5, 419, 34, 1792, 64),
    )
}


def machine_of(name: str) -> Machine:
    """Return a machine by its name or from its file; UsageError for one that is neither.

    A name may be written as people and drivers write it: "H100 SXM 80GB", "NVIDIA A100-SXM4-40GB", "RTX 4090".
    """
    if name.lower() in MACHINES:
        return MACHINES[name.lower()]
    if Path(name).suffix in (".json", ".toml"):
        return Machine.read(name)
    model, gigabytes = _read_name(name)
    found = [machine for machine in MACHINES.values() if _read_name(machine.name)[0] == model]
    if gigabytes is not None:
        found = [machine for machine in found if abs(machine.memory / gigabytes / 1e9 - 1.03) < 0.06]
    if len(found) > 1:
        # Machines that are equal but for their memory, such as a100-40gb and a100-80gb, or for their network.
        plain = [machine for machine in found if machine.name == "-".join(model)]
        found = plain or found
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(machine.name for machine in found)
        raise UsageError(f"--gpu {quoted_path(name)} may be several GPUs; give {names}")
    near = nearest(" ".join(model), MACHINES)
    keys = ", ".join(field.name for field in fields(Machine))
    raise UsageError(
        f"--gpu {quoted_path(name)} is unknown{near}; it must be {', '.join(MACHINES)}, or a .json or .toml file with"
        f" the keys {keys}"
    )


# Words of a GPU's full name that do not tell it from others: makers, product lines, sockets, kinds of memory.
NOISE = {
    *("nvidia", "amd", "instinct", "tesla", "geforce", "quadro", "rtx", "gpu", "tensor", "core", "graphics", "card"),
    *("sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "oam", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x"),
    *("gddr7", "hgx", "dgx", "generation", "gen"),
}


def _read_name(name: str) -> tuple[tuple[str, ...], int | None]:
    """Return the words that name a GPU, and its gigabytes if they are among them."""
    words = re.findall(r"[a-z]*\d*[a-z]*", name.lower().replace("rtx", "rtx "))
    words = [word for word in words if word and word not in NOISE]
    sizes = [match[1] for word in words if (match := re.fullmatch(r"(\d+)g(?:b|ib)?", word))]
    words = [word for word in words if not re.fullmatch(r"\d+g(?:b|ib)?|g(?:b|ib)", word)]
    # "80 GB" is a number and a unit; "6000 ada" is a name.
    spaced = re.search(r"(\d+)\s+g(?:b|ib)\b", name.lower())
    if spaced:
        sizes, words = [spaced[1]], [word for word in words if word != spaced[1]]
    return tuple(words), int(sizes[0]) if sizes and int(sizes[0]) > 0 else None
