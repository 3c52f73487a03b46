"""The config: any two batch sizes give the third, and every wrong value is one sentence that names value and remedy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.autograd import Parameter
from minidist.base.errors import UsageError
from minidist.config.train_config import TrainConfig, resolve_batches
from minidist.train.job import build, make_optimizer

sizes = st.integers(1, 12)


@given(
    micro=sizes,
    accumulation=sizes,
    ranks=sizes,
    missing=st.sampled_from(["global_batch", "micro_batch", "accumulation"]),
)
def test_any_two_batch_sizes_give_the_third(micro, accumulation, ranks, missing):
    values = {"global_batch": micro * accumulation * ranks, "micro_batch": micro, "accumulation": accumulation}
    values.pop(missing)
    batches = resolve_batches(TrainConfig.make(**values), ranks)
    assert (batches.micro_batch, batches.accumulation, batches.dp) == (micro, accumulation, ranks)
    assert batches.global_batch == micro * accumulation * ranks
    assert batches.microbatches == accumulation * ranks


@given(total=st.integers(1, 200), micro=sizes, accumulation=sizes, ranks=sizes)
def test_an_inconsistent_triple_prints_the_equation_and_a_remedy_that_works(total, micro, accumulation, ranks):
    config = TrainConfig.make(global_batch=total, micro_batch=micro, accumulation=accumulation)
    if total == micro * accumulation * ranks:
        assert resolve_batches(config, ranks).global_batch == total
        return
    with pytest.raises(UsageError, match=rf"{total} != {micro} x {accumulation} x {ranks}") as caught:
        resolve_batches(config, ranks)
    batch, _, other = str(caught.value).split("--global-batch ")[1].partition(", or ")
    assert int(batch) == micro * accumulation * ranks
    assert (other != "") == (total % (micro * accumulation) == 0)
    assert not other or int(other.split()[0]) * micro * accumulation == total


@given(total=st.integers(1, 200), ranks=sizes)
def test_a_batch_that_does_not_divide_names_batches_that_do(total, ranks):
    config = TrainConfig.make(global_batch=total)
    if total % ranks == 0:
        assert resolve_batches(config, ranks).micro_batch == total // ranks
        return
    with pytest.raises(UsageError) as caught:
        resolve_batches(config, ranks)
    proposed = [int(word) for word in str(caught.value).split("--global-batch ")[1].split(" or ")]
    for value in proposed:
        assert resolve_batches(TrainConfig.make(global_batch=value), ranks).global_batch == value


def test_betas_are_two_numbers_in_one_spelling():
    assert TrainConfig.make(betas="0.9, .95").betas == TrainConfig.make(betas=[0.9, 0.95]).betas == "0.9,0.95"
    for wrong in ("0.9", "0.9,1", "0.9,nan", "a,b", 3, [0.9, None], "0.9,0.9,0.9"):
        with pytest.raises(UsageError, match=r"--betas .*: input should be two numbers from 0 to below 1, such as"):
            TrainConfig.make(betas=wrong)


def test_the_optimizer_and_its_schedule_follow_the_settings():
    config = TrainConfig.make(betas="0.8,0.9", eps=1e-3, decay="linear", warmup=2, steps=6, final_lr=0.5)
    job = build(config, resolve_batches(config, 1))
    optimizer = make_optimizer(job, [Parameter(np.ones(2))])
    assert (optimizer.betas, optimizer.eps) == ((0.8, 0.9), 1e-3)
    assert [job.schedule(step) for step in (0, 2, 4, 6)] == [0.5, 1.0, 0.75, 0.5]


def test_degree_and_ranks_must_agree():
    with pytest.raises(UsageError, match=r"--dp 3 does not fit 4 ranks.*--dp 4"):
        resolve_batches(TrainConfig.make(dp=3), 4)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"global_bach": 8}, "unknown setting 'global_bach'.*global_batch"),
        ({"lr": -1.0}, "--lr -1.0"),
        ({"steps": 0}, "--steps 0"),
        ({"optimizer": "adan"}, "--optimizer 'adan'"),
        ({"dropout": 1.0}, "--dropout 1.0"),
    ],
)
def test_a_wrong_value_is_one_sentence(values, sentence):
    with pytest.raises(UsageError, match=sentence):
        TrainConfig.make(**values)
