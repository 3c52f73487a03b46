"""The config: any two batch sizes give the third, and every wrong value is one sentence that names value and remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.base.errors import UsageError
from minidist.config.train_config import TrainConfig, resolve_batches

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
