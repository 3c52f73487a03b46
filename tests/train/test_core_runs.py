"""What `minidist train` runs is the core: below the core's loop, the layouts of the papers enter the core's files.

A crossing is a function outside the core that a function of the core has called. What a job does in a step, and the
checks that are on in every run, are crossings with a name; nothing else is.
"""

import sys
from pathlib import Path

import minidist
from minidist.comm import SimWorld
from minidist.job.config.train_config import TrainConfig
from minidist.job.train import loop
from minidist.job.train.trainer import train
from tests.test_core import CORE, file_of

PACKAGE = str(Path(minidist.__file__).parent)
CORE_FILES = {str(file_of(module)) for module in CORE} | {str(file_of(f"{module}.__init__")) for module in CORE}

GPT = {"data": "markov", "layers": 1, "width": 8, "heads": 2, "context": 4, "steps": 2, "micro_batch": 2}
DEEP = {**GPT, "layers": 4, "pp": 2, "microbatches": 2}
LAYOUTS = {
    "DDP": {**GPT, "dp": 2, "clip": 1.0},
    "ZeRO 1": {**GPT, "dp": 2, "zero": 1},
    "ZeRO 2": {**GPT, "dp": 2, "zero": 2},
    "FSDP": {**GPT, "dp": 2, "zero": 3},
    "TP": {**GPT, "tp": 2, "sequence_parallel": True},
    "CP": {**GPT, "cp": 2},
    "Ulysses": {**GPT, "cp": 2, "attention": "ulysses"},
    "EP": {**GPT, "dp": 2, "ep": 2, "experts": 2},
    "GPipe": {**DEEP, "schedule": "gpipe"},
    "1F1B": DEEP,
    "ZB-H1": {**DEEP, "schedule": "zb-h1"},
    "3-D": {**DEEP, "dp": 2, "tp": 2, "zero": 1, "clip": 1.0},
}


def crossings(config):
    """Train, and return the functions outside the core that the core has called below its loop."""
    found, known = set(), set()

    def watch(frame, event, argument):
        code = frame.f_code
        if event != "call" or code in known or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_filename in CORE_FILES:
            known.add(code)
            return
        caller = frame.f_back
        while caller is not None and caller.f_code is not loop.train.__code__:
            name = caller.f_code.co_filename
            if name.startswith(PACKAGE) and name not in CORE_FILES:
                return
            caller = caller.f_back
        if caller is not None:
            known.add(code)
            found.add(f"{Path(code.co_filename).relative_to(PACKAGE)} {code.co_qualname}")

    sys.setprofile(watch)
    try:
        SimWorld(config.pop("ranks", None) or ranks(config)).run(train, TrainConfig.make(**config))
    finally:
        sys.setprofile(None)
    return found


def ranks(config):
    return config.get("dp", 1) * config.get("tp", 1) * config.get("cp", 1) * config.get("pp", 1)


if __name__ == "__main__":
    for layout, config in LAYOUTS.items():
        print(layout, *sorted(crossings(dict(config))), sep="\n    ")
