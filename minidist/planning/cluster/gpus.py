"""The speeds and sizes of GPUs and their clusters, from the makers' data sheets.

Peaks are dense (without structured sparsity). `memory` is what the driver reports: a GPU of "80 GB" has 79.2 GiB, which
are 85e9 bytes. `link` is the bandwidth of one GPU to the others of its node, and `network` is its share of the
bandwidth of the node's network adapters; both are in bytes per second and count one direction. The machines that have
names are in machines.toml; others are described by a JSON or TOML file with the same keys (`Machine.read`).

Sources: the data sheets of NVIDIA V100, A100, H100, H200, DGX B200, GB200 NVL72, GB300 NVL72 and AMD MI300X; DGX A100
and H100 have eight adapters of 200 and 400 Gbit/s for eight GPUs. Cards for slots (L40S, RTX 4090, ...) talk through
the bus, and are planned as eight in a node with one adapter of 100 Gbit/s: another node needs a file. Matrix products
of GeForce cards are those with float32 sums. How much of its peak a GPU reaches was measured on A100, H100 and B200
only.

Proved by: tests/planning/test_cluster.py
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.read_file import parse_toml, read_json, read_toml

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
    "host_memory": (1e6, 1e18, "bytes"),
}


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes. FLOP/s, bytes and bytes per second of one GPU; `gpus_per_node` is a count.

    host_memory: bytes of a node's memory for each of its GPUs.
    """

    name: str
    fp16: float
    fp8: float  # 0 where the GPU has no 8-bit floats
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    gpus_per_node: int = 8
    family: str = "h100"
    host_memory: float = 125e9  # 1 TB for eight

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
        values: dict[str, Any] = {"name": Path(path).stem, "fp8": 0.0, "host_memory": cls.host_memory, **content}
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


MACHINES = {
    name: Machine(name, **values)
    for name, values in parse_toml(Path(__file__).with_name("machines.toml").read_text(encoding="utf-8")).items()
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
