"""Stages that are cut anew while a pipeline trains: every bit stays that of one device, and every byte is accounted."""

from functools import partial

import numpy as np
import pytest

from minidist.base.memory import MemoryAccount
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import watchers
from minidist.job.checkpoint.directory import Checkpoint
from minidist.job.checkpoint.resume import read_job_state
from minidist.job.train.metrics import MetricsFile, read_metrics
from minidist.job.train.trainer import train
from minidist.pipeline.runtime.layer_profile import LayerProfile, LayerTimes
from minidist.planning.volumes import phases_bytes
from minidist.techniques.repartition.extension import profiled_by
from tests.cases import has_settings
from tests.jobs import equals_one_device, sent_bytes, train_compared
from tests.train.test_shares import config_of

JOB = {"pp": 2, "layers": 4, "microbatches": 2, "global_batch": 8, "steps": 3, "repartition_every": 2}
EIGHT = {"layers": 8, "microbatches": 4}
IMAGES = {"model": "cnn", "data": "glyphs", "heads": 4, "context": 64, "width": 4}
FLOAT = {"precision": "fp64", "reduction": "ring"}
FP16 = {"precision": "fp16", "loss_scale_hysteresis": 1}
SPARSE = {"sparsity": 0.5, "sparsity_schedule": "1,3,1"}
ONE, EIGHTH = {2: [1, 1, 1, 9]}, {2: [1] * 7 + [4]}  # the last layer is slow, so one before it moves


class GivenProfile(LayerProfile):
    """A profile that is given. seconds: steps done -> seconds of each layer. paces: of each rank, its slowness."""

    def __init__(self, seconds, paces):
        super().__init__()
        self.given, self.paces = seconds, paces

    def take(self, done):
        if done not in self.given:
            return None
        work = np.array(self.given[done], float)
        return LayerTimes(work * (1.0 if self.paces is None else self.paces[self.comm.rank]), work)


def run(values, seconds, paces=None, observers=lambda comm: (), world=None):
    """Return the results of a job whose layers take the given seconds, its world and its config."""
    config, batches, ranks = config_of(**{**JOB, **values})
    world = world or SimWorld(ranks)
    profile = LayerProfile if seconds is None else partial(GivenProfile, seconds, paces)

    def main(comm):
        with profiled_by(profile):
            return train(comm, config, observers(comm))

    results = world.run(main)
    return results, world, config, batches


def cuts(results):
    return results[0].measured["partitions"]


CASES = [
    ({"dp": 2, "clip": 0.1, "dropout": 0.1, "evaluate_every": 1}, ONE),
    ({"dp": 2, "zero": 1, "clip": 0.1, "noise_scale": True, "global_batch": 11, "weights": "3,1"}, ONE),
    ({"dp": 2, "zero": 3, "persistence_threshold": 50, "evaluate_every": 2, "precision": "bf16"}, ONE),
    ({"dp": 2, "zero": 3, **SPARSE}, ONE),
    ({**EIGHT, "schedule": "dualpipe", "dp": 2, "zero": 1}, EIGHTH),
    ({**EIGHT, "schedule": "zb-v"}, EIGHTH),
    ({"pp": 3, "layers": 6, "steps": 6, "model": "llama"}, {2: [1, 1, 1, 1, 1, 9], 4: [9, 1, 1, 1, 1, 1]}),
]
CASES = [case for case in CASES if has_settings(case[0])]
IN_ADDITION = {  # what a layer has in addition to its weights
    # Two steps overflow, so the moved layers have masks and no optimizer state yet.
    "masks": ({"dp": 2, **FP16, "loss_scale": 2.0**19, **SPARSE}, ONE),
    "ranges": ({"quantize": "int8", "steps": 5, "evaluate_every": 1}, ONE),
    "ranges of shards": ({"quantize": "int8", "tp": 2, "evaluate_every": 1, **FLOAT}, ONE),
    "running statistics": ({**IMAGES, "dp": 2, "evaluate_every": 3}, ONE),
}
IN_ADDITION = {name: case for name, case in IN_ADDITION.items() if has_settings(case[0])}
EMPTY = [  # a stage that has no layer at first
    ({"pp": 3, "layers": 4, "partition": "2,0,2"}, {2: [9, 1, 1, 1]}),
    ({"pp": 3, "layers": 4, "partition": "2,0,2", "dp": 2, "zero": 1}, {2: [9, 1, 1, 1]}),
]
MORE = [
    ({"dp": 2, "zero": 1, **FP16, "loss_scale": 2.0**18, "offload": "optimizer"}, ONE),
    ({"dp": 2, "zero": 2, "check_replicas": True}, ONE),
    ({"dp": 4, "zero": 3, "dp_replicate": 2}, ONE),
    ({"dp": 2, "zero": 3, "offload": "parameters"}, ONE),
    ({"offload": "activations", "prefetch_batches": 2}, ONE),
    ({"optimizer": "muon", "momentum": 0.5, "dp": 2, "zero": 1}, ONE),
    ({"optimizer": "lamb", "dp": 2, "zero": 1, "recompute": "selective"}, ONE),
    ({**EIGHT, "schedule": "interleaved", "chunks": 2, "recompute": "full"}, EIGHTH),
    ({**EIGHT, "schedule": "dualpipev"}, EIGHTH),
    ({"model": "mlp", "data": "glyphs", "heads": 4, "context": 64, "layers": 3}, ONE),
    ({"tp": 2, **FLOAT}, ONE),
    ({"cp": 2, "dp": 2, "zero": 1, **FLOAT}, ONE),
    ({"experts": 2, "ep": 2, "dp": 4, "zero": 1, **FLOAT}, ONE),
    ({"experts": 2, "ep": 2, "dp": 4, "zero": 3, "tp": 2, **FLOAT}, ONE),
]


def equals_one_device_and_sends_the_closed_form(values, seconds):
    config, batches, ranks = config_of(**{**JOB, **values})

    def main(*arguments):
        with profiled_by(partial(GivenProfile, seconds, None)):
            return train(*arguments)

    results, _, measured = train_compared(SimWorld(ranks), config, main)
    assert len(results[0].phases) == 1 + len(seconds)
    assert +measured == +phases_bytes(config, batches, [result.phases for result in results])
    assert measured["repartition"] > 0


@pytest.mark.parametrize(("values", "seconds"), EMPTY)
def test_a_stage_without_layers_gets_some_with_their_state(values, seconds):
    equals_one_device_and_sends_the_closed_form(values, seconds)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("values", "seconds"), [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)]
)
def test_it_equals_one_device_and_sends_the_closed_form(values, seconds):
    equals_one_device_and_sends_the_closed_form(values, seconds)


@pytest.mark.parametrize("case", IN_ADDITION)
def test_what_a_layer_has_in_addition_to_its_weights_moves_with_it(case):
    equals_one_device_and_sends_the_closed_form(*IN_ADDITION[case])


def owners(results, number, per_stage):
    """Return {parameter: for each of its elements the set of ranks with its AdamW state} of cut `number`, with ZeRO 1.

    By enumeration: a stage's parameters one after the other, the padded unit in equal parts.
    """
    found = {}
    for rank, result in enumerate(results):
        (axis,) = result.phases[number].sizes
        (unit,) = axis.units
        at, share = 0, unit // per_stage
        for name, size in axis.parameters.items():
            places = found.setdefault((name, axis.stage == 0 and "wte" in name), [set() for _ in range(size)])
            for element in range(size):
                if (at + element) // share == rank % per_stage:
                    places[element].add(rank)
            at += size
    return found


@pytest.mark.parametrize("zero", [0, 1])
def test_each_moved_layer_is_sent_once_and_of_shards_what_is_not_there(zero):
    values = {"dp": 2, "zero": zero, "precision": "fp64"}
    results, world, *_ = run(values, ONE)
    assert cuts(results) == [("2,2", 2), ("3,1", 1)]

    # h.2 moves from stage 1 to stage 0, weights to both replicas; its state, two arrays of AdamW, too.
    (before, after) = (run.sizes[0].parameters for run in results[0].phases)
    moved = sum(size for name, size in after.items() if name not in before)
    assert {name.split(".")[2] for name in after if name not in before} == {"2"}
    state = 2 * 2 * moved
    if zero:
        old, new = owners(results, 0, 2), owners(results, 1, 2)
        state = 2 * sum(len(now - then) for name in new for now, then in zip(new[name], old[name], strict=True))
    sent = [phase.sizes[0].more["repartition"] for result in results for phase in result.phases]
    assert sum(one.lacking for one in sent) == 8 * (2 * moved + state)

    # One message between two ranks, and no other but the tables and one exchange of times.
    messages = [m for trace in world.traces for m in trace.sent("repartition")]
    moves = [(m.rank, m.peer) for m in messages if not m.operation.startswith("all_gather")]
    assert len(moves) == len(set(moves))
    if not zero:
        assert sorted(moves) == [(2, 0), (3, 1)]
        assert {m.nbytes for m in messages if not m.operation.startswith("all_gather")} == {8 * 3 * moved}


def test_times_choose_the_cut():
    def chosen(seconds, paces=None, **values):
        return cuts(run(values, {2: seconds}, paces)[0])[-1][0]

    assert chosen([1, 1, 1, 1]) == "2,2"
    assert chosen([1, 1, 1, 9]) == "3,1"
    # Rank 1 takes three times as long for every layer, and has four of five equal ones: it keeps one.
    assert chosen([1, 1, 1, 1], [1, 3]) == "3,1"
    assert chosen([1, 1, 1, 1, 1], [1, 3], layers=5, partition="1,4") == "4,1"
    # A layer that is slow on a slow rank is expensive nowhere else: the fast rank takes what is worth it.
    assert chosen([1, 1, 1, 1], [3, 1], partition="3,1") == "1,3"
    # A gain of less than five per cent is not worth a move.
    assert chosen([1, 1, 0.97, 1.02], partition="2,2") == "2,2"
    # All replicas wait for the slowest of them.
    assert chosen([1] * 6, [1, 1, 1, 3], layers=6, dp=2) == "5,1"


def test_the_clock_of_a_slow_rank_moves_layers_away_from_it():
    slow = SimWorld(2, links=LinkModel(slowdown=lambda rank: 4.0 if rank else 1.0))
    results, *_ = run({"steps": 6}, None, world=slow)
    assert cuts(results) == [("2,2", 2), ("3,1", 4)]
    # Times alone would choose this cut again; ranks of equal speed keep their layers.
    results, *_ = run({"steps": 6, "width": 32}, None, world=SimWorld(2))
    assert cuts(results) == [("2,2", 6)]


@pytest.mark.parametrize("zero", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_resumed_job_begins_with_the_cut_of_its_checkpoint(zero, tmp_path):
    seconds = {2: [1, 1, 1, 9], 4: [9, 1, 1, 1]}
    values = {"dp": 2, "zero": zero, "steps": 5}
    whole, *_ = run(values, seconds)
    assert cuts(whole) == [("2,2", 2), ("3,1", 2), ("1,3", 1)]

    save = {"save": str(tmp_path)}
    run({**values, **save, "steps": 3}, seconds)
    assert read_job_state(Checkpoint(tmp_path)).everything["partition"] == [3, 1]
    rest, world, config, batches = run({**values, **save, "resume": True}, seconds)
    assert cuts(rest) == [("3,1", 1), ("1,3", 1)]
    assert (rest[0].losses, [r.digest for r in rest]) == (whole[0].losses, [r.digest for r in whole])
    measured = sent_bytes(world)
    del measured["checkpoint"]
    assert +measured == +phases_bytes(config, batches, [result.phases for result in rest], 3)

    # Another model is refused as ever.
    with pytest.raises(UsageError, match="was made with --layers 4, this job has 5; resume with --layers 4"):
        run({**values, **save, "resume": True, "layers": 5}, seconds)

    # Another number of stages, or a job that does not choose, begins with its own cut.
    other, *_ = run(
        {**values, **save, "pp": 4, "resume": True, "from_step": 3, "layers": 4, "repartition_every": None}, {}
    )
    assert other[0].losses == whole[0].losses


def test_a_schedule_with_two_stages_per_rank_resumes_and_metrics_have_the_cut(tmp_path):
    values = {**EIGHT, "schedule": "zb-v", "save": str(tmp_path / "a")}
    with MetricsFile(tmp_path / "m") as metrics:
        run(values, EIGHTH, observers=lambda comm: [metrics])
    partitions = [record["partition"] for record in read_metrics(tmp_path / "m")]
    rest, *_ = run({**values, "steps": 4, "resume": True}, {})
    assert partitions == ["uniform", "uniform", cuts(rest)[0][0]] != ["uniform", "uniform", "2,2,2,2"]


def test_compare_and_a_resume_on_one_device(tmp_path):
    config, _, ranks = config_of(**{**JOB, "save": str(tmp_path), "width": 16})
    equals_one_device(ranks, config)
    alone, *_ = config_of(
        **{**JOB, "save": str(tmp_path), "width": 16, "pp": 1, "repartition_every": None, "steps": 5, "resume": True}
    )
    assert np.isfinite(SimWorld(1).run(train, alone)[0].losses).all()


def test_the_old_part_of_the_model_is_freed():
    def live(values, seconds):
        seen = {}

        def look(state):
            account = next(watcher for watcher in watchers.get() if isinstance(watcher, MemoryAccount))
            seen[state.rank] = [account.by_purpose.get(name, 0) for name in ("parameter", "gradient", "optimizer")]

        look.reads_tensors = False
        run({"dp": 2, "zero": 1, **values}, seconds, observers=lambda comm: [look])
        return seen

    assert live({}, ONE) == live({"partition": "3,1"}, {})
