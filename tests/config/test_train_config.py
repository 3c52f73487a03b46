"""The config: any two batch sizes give the third, and every wrong value is one sentence that names value and remedy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError
from minidist.data import weighted_shards
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.job import build, make_optimizer

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
def test_a_batch_that_the_ranks_do_not_divide_has_shares_that_differ_by_one_row(total, ranks):
    config = TrainConfig.make(global_batch=total)
    exact = TrainConfig.make(global_batch=total, weights="equal")
    if total % ranks:
        with pytest.raises(UsageError, match="does not hold") as caught:
            resolve_batches(exact, ranks)
        proposed = [int(word) for word in str(caught.value).split("--global-batch ")[1].split(" or ")]
        for value in proposed:
            assert resolve_batches(TrainConfig.make(global_batch=value, weights="equal"), ranks).global_batch == value
    else:
        assert resolve_batches(exact, ranks).micro_batch == total // ranks
    if total >= ranks:
        shares = [sum(rows) for rows in resolve_batches(config, ranks).shares.rows]
        assert (sum(shares), sorted(shares, reverse=True)) == (total, shares)
        assert shares[0] - shares[-1] <= 1
        return
    with pytest.raises(UsageError, match=f"leave 0 for rank {total}") as caught:
        resolve_batches(config, ranks)
    remedy = int(str(caught.value).split("--global-batch ")[1].split(" or ")[0])
    assert resolve_batches(TrainConfig.make(global_batch=remedy), ranks).global_batch == remedy


@given(total=st.integers(1, 60), micro=sizes, weights=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_shares_follow_the_weights_and_micro_batches_are_no_larger_than_asked(total, micro, weights):
    config = TrainConfig.make(global_batch=total, micro_batch=micro, weights=",".join(map(str, weights)))
    counts = [rows for _, rows in weighted_shards(total, weights)]
    if min(counts) < -(-max(counts) // micro):
        with pytest.raises(UsageError, match="one for each of its micro-batches; use --global-batch"):
            resolve_batches(config, len(weights))
        return
    batches = resolve_batches(config, len(weights))
    shares = batches.shares
    for rows, weight in zip(shares.rows, weights, strict=True):
        assert abs(sum(rows) - total * weight / sum(weights)) < 1
        assert max(rows) - min(rows) <= 1
    assert batches.micro_batch == shares.largest <= micro
    ends = [sum(shares.place(number)) for number in range(batches.microbatches)]
    assert ([shares.place(number)[0] for number in range(batches.microbatches)], ends[-1]) == ([0, *ends[:-1]], total)


@pytest.mark.parametrize(("text", "ranks"), [("2,x", 2), ("2,0", 2), ("", 1), ("1,inf", 2), ("2,1,1", 2)])
def test_weights_that_are_none(text, ranks):
    with pytest.raises(UsageError, match=r"--weights.*(in 2,1,1|give one for each|must be a number from)"):
        resolve_batches(TrainConfig.make(global_batch=8, weights=text), ranks)


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
    assert [job.lr_factor(step) for step in (0, 2, 4, 6)] == [0.5, 1.0, 0.75, 0.5]


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
