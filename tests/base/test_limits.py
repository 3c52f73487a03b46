"""Limits of sizes: a number with too many zeros is one sentence, before anything is allocated for it."""

import pytest

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.limits import MAX_RANKS, check_count, check_ranks, is_size, whole_number
from tests.cases import each


@pytest.mark.parametrize("ranks", [0, -1, MAX_RANKS + 1, 10**400, 10**5000], ids=lambda ranks: len(f"{ranks:x}"))
def test_ranks_out_of_range_are_one_short_sentence(ranks):
    with pytest.raises(UsageError, match="a simulated world has 1 to 100,000") as error:
        check_ranks(ranks)
    assert len(str(error.value)) < 200
    check_ranks(1)
    check_ranks(MAX_RANKS)


def test_counts_sizes_and_whole_numbers():
    check_count(3, "--steps", most=3)
    with pytest.raises(UsageError, match="--steps is 4; it must be from 0 to 3"):
        check_count(4, "--steps", most=3)
    assert [is_size(x) for x in (0, 1, 1e30, 1e-30, 1e-31, 1e31, -1, float("nan"), float("inf"))] == [True] * 4 + [
        False
    ] * 5
    assert [whole_number(text) for text in ("0", "12", "9" * 18, "9" * 19, "", "-1", "1.0", "²", "٣")] == [
        0,
        12,
        10**18 - 1,
        *[None] * 6,
    ]


@each("value", ["a" * 10**6, "\0" * 79, ["b" * 50] * 9, 10**300, 10**5000, "c" * 79 + "'"], ids=range(6))
def test_at_most_80_characters_of_a_value_are_quoted(value):
    assert len(quoted(value)) <= 80 + len(" (1,000,000 characters)")
    assert quoted("runs/" + "x" * 900 + "/job.toml").count("job.toml") == 1


def test_a_short_value_is_its_repr():
    for value in ("", "a b", "it's", 3, None, [1, "x"], "d" * 80):
        assert quoted(value) == repr(value)
    assert quoted("axes.tp=4", marks=False) == "axes.tp=4"
    assert nearest("adan" * 100_000, ["adam"]) == ""


DIGITS = "9" * 5_000


@each(
    "arguments",
    [
        ["tiles", "--tp", str(10**18)],
        ["tiles", "--vocab", str(10**18)],
        ["bench", "collectives", "--simulated", "--ranks", str(10**9)],
        ["bench", "collectives", "--simulated", "--ranks", "2", "--sizes", "9" * 400],
        ["train", "--global-batch", str(10**11)],
        ["train", "--microbatches", str(10**8)],
        ["train", "--dp", str(10**18), "--ep", "7"],
        ["train", "--layers", str(10**400)],
        ["train", "--layers", str(10**6)],
        ["train", "--recompute", f"budget:{DIGITS}"],
        ["train", "--strategy", "ps", "--consistency", f"ssp:{DIGITS}", "--ranks", "3"],
        ["train", "--set", f"steps={DIGITS}"],
        ["train", "--set", "steps=" + "[" * 5_000],
        ["train", "--set", "a" * 10**6],
        ["train", "--zero", "3", "--dp", "2", "--reshard-after-forward", DIGITS],
        ["staleness", "--workers", str(10**9)],
        ["data", "--weights", "inf,1"],
        ["data", "--weights", "1e308,1e308"],
        ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--option", "stages=1"],
        ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--option", f"group={DIGITS}"],
        ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--times", "F=1e308"],
        ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--times", "F=nan"],
        ["data", "--weights", "-1,1"],
        ["data", "--step", "1" + "0" * 30],
        ["data", "--step", "-1"],
        ["train", "--recompute", "budget:nan"],
        ["memory", "--model", "gpt2", "--batch", "1" + "0" * 400],
        ["memory", "--model", "gpt2", "--prefetch", "-1"],
    ],
)
def test_numbers_that_no_machine_can_take_are_one_sentence(arguments, minidist):
    said = minidist(*arguments, code=2).err
    assert said.startswith("minidist: ")
    assert said.count("\n") == 1
    assert len(said) < 600


@each("flag", ["--lowered", "--recompute"])
@each("plan", ["0F0,0B1,0F1\n1F0,1B0,1B0,1F1,1B1\n", "0F0,0F99999999,0B0\n", "99999999F0,0B0\n"])
def test_a_plan_is_valid_before_it_is_lowered(flag, plan, tmp_path, minidist):
    (tmp_path / "plan.csv").write_text(plan)
    assert len(minidist("schedule", tmp_path / "plan.csv", flag, code=2).err) < 600
