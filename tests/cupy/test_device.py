"""Training on arrays with CuPy's interface, and no more than that: engine, models, optimizers, strategies, messages.

The stand-in computes with NumPy; what a GPU computes is tested by the tests marked cuda.
"""

import json
import random
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from minidist.base import arrays as xp
from minidist.base.device import LOCAL_RANKS, creating_on, cuda
from minidist.comm import SimWorld
from minidist.commands.runner import run_comparison
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from tests.config.test_no_setting_is_ignored import BASE, STREAMED, VALUES, ranks_of, what_happens
from tests.cupy.stand_in import Device, DeviceArray

SMALL = {"data": "markov", "layers": 2, "width": 16, "heads": 2, "context": 8, "steps": 2, "global_batch": 8}

# One comparison of every axis, bit for bit where gradients are summed in order, else to 1e-12 in float64.
AXES = [
    (2, {"dp": 2, "reduction": "ordered", "clip": 1.0, "dropout": 0.1}),
    (2, {"dp": 2, "zero": 1, "reduction": "ordered"}),
    (2, {"dp": 2, "zero": 3, "reduction": "ordered", "recompute": "full"}),
    (2, {"tp": 2, "sequence_parallel": True, "precision": "fp64"}),
    (2, {"cp": 2, "model": "llama", "precision": "fp64"}),
    (2, {"dp": 2, "ep": 2, "experts": 4, "precision": "fp64"}),
    (2, {"pp": 2, "microbatches": 4, "schedule": "zb-h1", "reduction": "ordered"}),
    (4, {"pp": 2, "dp": 2, "microbatches": 2, "reduction": "ordered"}),
    (2, {"dp": 2, "compression": "topk:0.1"}),
    (2, {"dp": 2, "compression": "qsgd:4"}),
    (2, {"dp": 2, "compression": "powersgd:2"}),
    (2, {"dp": 2, "reduction": "ordered", "local_steps": 2, "optimizer": "sgd"}),
    (2, {"pp": 2, "reduction": "ordered", "schedule": "pipedream"}),
    (2, {"dp": 2, "reduction": "ordered", "document_separator": 3}),
    (2, {"cp": 2, "attention": "all-gather", "document_separator": 3, "precision": "fp64"}),
    (2, {"cp": 2, "attention": "ulysses", "document_separator": 3, "precision": "fp64"}),
    (2, {"dp": 2, "reduction": "ordered", "steps": 4, **STREAMED, "outer_fragments": 2, "outer_delay": 1}),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("ranks", "settings"), AXES, ids=lambda value: str(value).strip("{}").replace("'", ""))
def test_every_axis_equals_one_device(ranks, settings):
    with creating_on(Device()):
        verdict = run_comparison(TrainConfig.make(**{**SMALL, **settings}), ranks, 60.0)
    assert verdict.equal, verdict.sentence()
    assert verdict.tensors > 0


JOBS = [
    (1, {"precision": "fp16", "attention_dropout": 0.1}),
    (2, {"dp": 2, "precision": "bf16", "optimizer": "lamb"}),
    (2, {"dp": 2, "optimizer": "muon"}),
    (2, {"dp": 2, "optimizer": "sgd", "momentum": 0.9, "local_steps": 2}),
    (2, {"dp": 2, "zero": 2, "accumulation": 2, "offload": "optimizer"}),
    (2, {"dp": 2, "compression": "topk:0.1", "noise_scale": True}),
    (2, {"dp": 2, "compression": "sign"}),
    (2, {"dp": 2, "compression": "qsgd:4"}),
    (2, {"dp": 2, "compression": "powersgd:2"}),
    (2, {"dp": 2, "zero": 3, "sparsity": 0.5, "sparsity_schedule": "1,2"}),
    (2, {"dp": 2, "sparsity_pattern": "2:4", "sparsity_schedule": "1"}),
    (2, {"pp": 2, "clip": 1.0, "microbatches": 2}),
    (2, {"dp": 2, "model": "cnn", "data": "glyphs", "batch_norm": "sync"}),
    (2, {"dp": 2, "quantize": "int8", "evaluate_every": 1}),
    (2, {"cp": 2, "attention": "ulysses"}),
    (2, {"pp": 2, "schedule": "pipedream"}),
    (2, {"dp": 2, "model": "mlp", "data": "glyphs"}),
    (2, {"pp": 2, "layers": 4, "partition": "1,3", "repartition_every": 2, "steps": 3}),
]


def run_on_host_and_device(ranks, settings, where, tolerance):
    """Losses may differ by `tolerance`, and by 100 times as much in half precision; sizes and memory are equal."""
    config = TrainConfig.make(**{**SMALL, **settings})
    host = SimWorld(ranks).run(train, config)
    with creating_on(where):
        device = SimWorld(ranks).run(train, config)
    for ours, theirs in zip(device, host, strict=True):
        half = config.precision in ("fp16", "bf16")
        assert ours.losses == pytest.approx(theirs.losses, rel=100 * tolerance if half else tolerance)
        assert ours.sizes == theirs.sizes
        assert ours.peak_by_purpose == theirs.peak_by_purpose


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("ranks", "settings"), JOBS, ids=lambda value: str(value).strip("{}").replace("'", ""))
def test_a_job_has_the_losses_and_the_memory_of_the_host(ranks, settings):
    run_on_host_and_device(ranks, settings, Device(), 1e-5)


# A value of every setting. The weights of a parameter server are on the host, and a budget is resolved before a job.
SETTINGS = [
    name
    for name in VALUES
    if VALUES[name].get("strategy") != "ps" and name not in ("memory_budget", "recompute_budget")
]
# What depends on the last bits, names that are drawn, and what a peak is made of: a number is an array of 4 B on a
# device and a scalar on the host, and of two moments with nearly as many bytes another one may be the peak.
BITS = re.compile(r"digest='\w*'|\w*[.]npy|(gradient_exponents|peak_by_purpose|step_peak)=\{.*?\}|directory '.*?'")
NUMBER = re.compile(r"(?<![\w.])-?\d+\.?\d*(?:e[+-]?\d+)?")


def happens(settings):
    """The text of all that a job shows, in pieces between its numbers, and the numbers."""
    text = BITS.sub("", what_happens.__wrapped__(*sorted(settings.items())))
    return NUMBER.split(text), [float(number) for number in NUMBER.findall(text)]


@pytest.mark.sampled(75)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_and_one_that_is_drawn_do_on_a_device_what_they_do_on_the_host(name):
    """Losses, messages, memory, virtual times and files, and the comparison with one device where there is one."""
    for other in random.Random(name).sample(SETTINGS, len(SETTINGS)):
        settings = {**VALUES[name], **VALUES[other]}
        try:
            words, numbers = happens(settings)
            break
        except UsageError:
            continue  # the two do not combine
    with creating_on(Device()):
        on_device = happens(settings)
    assert on_device[0] == words
    assert on_device[1] == pytest.approx(numbers, rel=1e-2, abs=1e-5)

    config = TrainConfig.make(**{**BASE, "reduction": "ordered", **settings})
    if config.save or config.init_from or config.distill_from:
        return
    with creating_on(Device()):
        try:
            verdict = run_comparison(config, ranks_of(config), 60.0, given=settings)
        except UsageError:
            return  # the pair cannot be compared
    assert verdict.equal, verdict.sentence()


def test_the_stand_in_is_as_strict_as_cupy():
    a = Device().asarray(np.ones((2, 3)))
    for attempt in (
        lambda: np.asarray(a),
        lambda: a + np.ones(3),
        lambda: a.max(initial=0),
        lambda: np.vecdot(a, a),
        lambda: a.__setitem__(0, np.ones(3)),
        lambda: a[[0, 1]],
    ):
        with pytest.raises((TypeError, IndexError), match="cupy"):
            attempt()
    with pytest.raises(AttributeError, match="no attribute 'itemset'"):
        a.itemset(0)
    with pytest.raises(AttributeError, match="METHODS does not list it"):
        a.diagonal()
    with pytest.raises(TypeError, match="FUNCTIONS does not list it"):
        np.roll(a, 1)
    assert isinstance(a.sum(), DeviceArray)
    assert a.T.base is a


def test_new_arrays_and_weights_are_on_the_device():
    with creating_on(Device()):
        for made in (xp.zeros(3, np.float32), xp.full(2, 7, np.int64), xp.device_arange(4), xp.as_array([1, 2])):
            assert isinstance(made, DeviceArray)
        assert isinstance(xp.to_device(np.ones(2)), DeviceArray)
    assert isinstance(xp.to_host(Device().asarray(np.ones(2))), np.ndarray)
    assert isinstance(xp.zeros(3, np.float32), np.ndarray)


def test_the_flag(monkeypatch, minidist):
    monkeypatch.setattr("minidist.base.device.cuda", Device)
    job = ["--dp", "2", "--steps", "1", "--data", "markov", "--device", "cuda", "--json"]
    for command in (["train", *job, "--trace", "none"], ["compare", *job]):
        assert json.loads(minidist(*command).out)["ranks"] == 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [(["--device", "tpu"], "--device 'tpu'; it must be cpu or cuda"), (["--device", "cuda"], "--device cuda")],
)
def test_a_device_that_is_not_there_is_one_sentence(flags, sentence, minidist):
    if flags[1] == "cuda":
        try:
            cuda()
            pytest.skip("this machine has a GPU")
        except UsageError:
            pass
    assert sentence in minidist("train", "--dp", "2", *flags, code=2).err


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({}, 0),
        ({"MPI_LOCALRANKID": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "5"}, 1),
        ({"SLURM_LOCALID": "3"}, 3),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "1", "SLURM_LOCALID": "3"}, 1),
    ],
)
def test_the_ranks_of_a_node_take_its_gpus_in_turn(variables, number, monkeypatch):
    """On a node of four GPUs, with the module cupy replaced."""
    used = []
    calls = SimpleNamespace(
        is_available=lambda: True,
        Device=lambda n: SimpleNamespace(use=lambda: used.append(n)),
        runtime=SimpleNamespace(getDeviceCount=lambda: 4),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=calls))
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cuda()
    assert used == [number]


@pytest.mark.cuda
@pytest.mark.parametrize(("ranks", "settings"), AXES, ids=lambda value: str(value).strip("{}").replace("'", ""))
def test_every_axis_equals_one_device_on_a_gpu(ranks, settings, gpu):
    with creating_on(gpu):
        verdict = run_comparison(TrainConfig.make(**{**SMALL, **settings}), ranks, 60.0)
    assert verdict.equal, verdict.sentence()


@pytest.mark.cuda
@pytest.mark.parametrize(("ranks", "settings"), JOBS, ids=lambda value: str(value).strip("{}").replace("'", ""))
def test_a_job_on_a_gpu_has_the_losses_of_the_host(ranks, settings, gpu):
    run_on_host_and_device(ranks, settings, gpu, 1e-4)
