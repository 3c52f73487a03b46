"""`--check-data`: every layout reads each sample once per epoch, also across a resume, and what does not is named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.core.base.errors import MismatchError
from minidist.data import PrefetchingSampler
from minidist.data import sampler as samplers
from minidist.data.sampler import Batch, GlobalBatchSampler, permutation
from minidist.job.checkpoint.directory import Checkpoint
from minidist.job.config.train_config import TrainConfig
from minidist.job.train import job
from minidist.job.train.trainer import train
from minidist.techniques.data_ledger import ledger as data_ledger
from minidist.techniques.data_ledger.ledger import DataLedger, digest
from tests.cases import each
from tests.planning.test_volumes import SMALL, table

SAMPLES = 10  # steps of the jobs below cross the ends of epochs


def tokens(folder):
    path = folder / "tokens.npy"
    np.save(path, np.arange(SAMPLES * SMALL["context"] + 1, dtype=np.uint16) % 50)
    return {**SMALL, "data": f"tokens:{path}", "steps": 5, "width": 8, "check_data": True}


ASYNCHRONOUS = {"schedule": "pipedream", "clip": None}
LAYOUTS = [
    (2, 5, {"dp": 2, "weights": "3,1", "micro_batch": None, "global_batch": 8, "accumulation": 2, "evaluate_every": 2}),
    (3, 5, {"dp": 3, "micro_batch": None, "global_batch": 7, "accumulation": 2}),
    (4, 5, {"tp": 2, "pp": 2}),
    (2, 5, {"cp": 2, "prefetch_batches": 2}),
    (2, 5, {"dp": 2, "adaptive_batch": 16}),
    (2, 5, {"pp": 2, "repartition_every": 2, "layers": 3, "microbatches": 2}),
    *([(2, 5, {"dp": 2, "local_steps": 2, "clip": None})] if "local_steps" in TrainConfig.model_fields else []),
    (3, 1, {"pp": 3, "replicas": "2,1", **ASYNCHRONOUS}),
    (2, 3, {"pp": 2, "evaluate_every": 2, "data": "markov", **ASYNCHRONOUS}),
    (3, 3, {"strategy": "ps", "servers": 1, "model": "llama", "clip": None, "save": "saved", "every": 2}),
]


@each(("ranks", "checks", "values"), LAYOUTS, sampled=3)
def test_every_layout_reads_each_sample_once(ranks, checks, values, tmp_path):
    """`table` asserts the bytes of every purpose against their closed forms."""
    values = {**tokens(tmp_path), **values}
    if "save" in values:
        values["save"] = str(tmp_path / "saved")
    assert table(tmp_path, ranks, **values)["data_check"] == checks * ranks * (ranks - 1) * 40


# --- across a resume ---


def run(ranks, values, **more):
    return SimWorld(ranks).run(train, TrainConfig.make(**{**values, **more}))


def test_a_job_is_resumed_on_other_ranks_in_the_middle_of_an_epoch(tmp_path):
    values = {**tokens(tmp_path), "save": str(tmp_path / "saved"), "global_batch": 4, "micro_batch": None}
    run(2, values, dp=2, steps=3)
    state = Checkpoint(values["save"]).state["data_ledger"]
    assert state == {"done": 12, "open_epoch": f"{digest(permutation(0, 1, SAMPLES)[:2]):016x}"}
    run(4, values, dp=2, tp=2, steps=4, resume=True)
    run(1, values, steps=6, resume=True)
    assert Checkpoint(values["save"]).state["data_ledger"]["done"] == 24


def test_a_checkpoint_without_a_ledger_says_how_many_samples_were_read(tmp_path):
    values = {**tokens(tmp_path), "save": str(tmp_path / "saved"), "dp": 2}
    run(2, values, steps=3, check_data=False, adaptive_batch=8)
    read = sum(Checkpoint(values["save"]).state["batch_plan"]["samples"])
    assert "data_ledger" not in Checkpoint(values["save"]).state
    run(2, values, steps=4, resume=True, adaptive_batch=8)
    assert Checkpoint(values["save"]).state["data_ledger"]["done"] > read


def test_an_epoch_that_is_laid_out_anew_after_a_resume(tmp_path, monkeypatch):
    """Both the sampler and the ledger take the new order, and what was read before is not its beginning."""
    values = {**tokens(tmp_path), "save": str(tmp_path / "saved"), "micro_batch": 4}
    run(1, values, steps=3)
    other = lambda seed, epoch, samples, block=0: permutation(seed + 1, epoch, samples)  # noqa: E731
    monkeypatch.setattr(samplers, "permutation", other)
    monkeypatch.setattr(data_ledger, "permutation", other)
    words = "had read 2 of the 10 samples of epoch 1, and they are not the first ones of that epoch in this job"
    with pytest.raises(MismatchError, match=words):
        run(1, values, steps=4, resume=True)


# --- what is reported ---


def test_ranks_that_read_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(job.Job, "micro_batch", lambda self, step, n, *sides: right(self, step, n % 2, *sides))
    first, second = permutation(0, 0, SAMPLES)[:4].reshape(2, 2).tolist()
    words = [f"sample {n} was read twice, by ranks 0, 1" for n in sorted(first)]
    words += [f"sample {n} was read by no rank" for n in sorted(second)[:3]]
    message = "step 0, epoch 0: of the inputs, " + "; ".join(words) + r" \(of 4 samples, 2 too often and 2 never\);"
    with pytest.raises(MismatchError, match=message):
        run(2, tokens(tmp_path), dp=2, accumulation=2)


right = job.Job.micro_batch


def test_a_batch_that_is_trained_on_again(tmp_path, monkeypatch):
    """The thread hands over the batch of the step before, whose numbers come with it."""
    batch = PrefetchingSampler.batch
    monkeypatch.setattr(PrefetchingSampler, "batch", lambda self, step, *rows: batch(self, min(step, 1), *rows))
    again = sorted(permutation(0, 0, SAMPLES)[2:4].tolist())
    words = "; ".join(f"sample {n} was read by rank 0 for the second time in the epoch" for n in again)
    with pytest.raises(MismatchError, match=f"step 2, epoch 0: of the inputs, {words}"):
        run(1, tokens(tmp_path), micro_batch=2, prefetch_batches=1)


def test_tensor_parallel_ranks_that_read_different_samples(tmp_path, monkeypatch):
    indices = GlobalBatchSampler.sample_indices

    def by_rank(self, step, *rows):
        return indices(self, step + (rank_of(self) == 1), *rows)

    ranks: dict[int, int] = {}
    rank_of = lambda sampler: ranks.setdefault(id(sampler), len(ranks))  # noqa: E731, each rank has its own sampler
    monkeypatch.setattr(GlobalBatchSampler, "sample_indices", by_rank)
    with pytest.raises(MismatchError, match=r"read by rank \d before its turn.* on rank \d, of several copies"):
        run(2, tokens(tmp_path), tp=2, micro_batch=2)


def test_targets_that_do_not_belong_to_the_inputs():
    def main(comm):
        ledger = DataLedger(SAMPLES, 0)
        ledger.expect(3)
        first, *_, last = order = permutation(0, 0, SAMPLES)
        ledger.record(order[:3], ["inputs"])
        ledger.record(np.array([*order[1:3], last]), ["targets"])
        with pytest.raises(
            MismatchError, match=rf"of the targets, sample {last} .*before its turn; sample {first} was"
        ):
            ledger.check(comm, 0, "step 0")

    SimWorld(1).run(main)


@pytest.mark.parametrize(
    ("done", "count", "epochs"),
    [(0, 4, "epoch 0"), (2, 2, "epoch 0"), (4, 1, "epoch 1"), (3, 2, "epochs 0 and 1"), (3, 6, "epochs 0 and 2")],
)
def test_an_error_names_the_epochs_of_the_samples_that_were_due(done, count, epochs):
    """An epoch has four samples; instead of the last one that is due, none is read."""
    listed = np.concatenate([permutation(0, epoch, 4) for epoch in range(3)])[done : done + count]

    def main(comm):
        ledger = DataLedger(4, 0)
        ledger.load({"done": done})
        ledger.expect(count)
        ledger.record(listed[:-1])
        ledger.check(comm, 0, "step 5")

    words = rf"^step 5, {epochs}: of the inputs, sample {listed[-1]} was read by no rank \(of {count} samples, 0 too"
    with pytest.raises(MismatchError, match=words):
        SimWorld(1).run(main)


def test_what_was_due_and_read_is_done_after_a_check():
    """Three checks of a rank that reads what is next: nothing of one step is left for the following one."""

    def main(comm):
        ledger = DataLedger(SAMPLES, 0)
        listed = np.concatenate([permutation(0, epoch, SAMPLES) for epoch in range(2)])
        for step in range(3):
            ledger.expect(6)
            ledger.record(listed[6 * step : 6 * step + 6][comm.rank :: comm.size])
            ledger.check(comm, 0, f"step {step}")
            assert (ledger.done, ledger.due) == (6 * step + 6, 0)

    SimWorld(2).run(main)


def test_an_order_that_is_no_permutation(monkeypatch):
    monkeypatch.setattr(data_ledger, "permutation", lambda *key: np.array([2, 0, 2, 1]))

    def main(comm):
        ledger = DataLedger(4, 0)
        ledger.expect(2)
        ledger.record(np.array([2, 0]))
        ledger.check(comm, comm.rank, "step 0")

    with pytest.raises(MismatchError, match="the order of epoch 0 has sample 2 twice, and 4 places for 4 samples"):
        SimWorld(2).run(main)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_split_of_the_next_samples_is_right_and_any_other_is_not(data):
    """Over any ranks, in any order, across epochs; one number changed, left out or added is reported by every rank."""
    samples, ranks, count, done = (data.draw(st.integers(1, n)) for n in (6, 3, 9, 12))
    listed = np.concatenate([permutation(0, epoch, samples) for epoch in range(30)])[done : done + count]
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count))
    change = data.draw(st.sampled_from(["none", "another", "fewer", "more"]))
    read = data.draw(st.permutations(list(zip(listed.tolist(), owners, strict=True))))
    if change != "none":
        number, owner = read.pop()
        read += {"another": [(number + 1, owner)], "fewer": [], "more": [(number, 0)] * 2}[change]

    def main(comm):
        ledger = DataLedger(samples, 0)
        ledger.load({"done": done})
        ledger.expect(count)
        ledger.record(np.array([number for number, owner in read if owner == comm.rank], np.int64))
        try:
            ledger.check(comm, 0, "step 0")
        except MismatchError as error:
            assert ledger.done == done
            return str(error)
        return ledger.done

    results = SimWorld(ranks).run(main)
    assert len(set(results)) == 1
    assert (results[0] == done + count) == (change == "none")


def test_a_batch_keeps_its_numbers():
    """It is a pair for whoever trains, and worker processes pickle it."""
    import pickle

    batch = pickle.loads(pickle.dumps(Batch((np.ones(2), np.zeros(2)), np.array([4, 7]))))
    inputs, targets = batch
    assert (inputs.tolist(), targets.tolist(), batch.indices.tolist()) == ([1, 1], [0, 0], [4, 7])
