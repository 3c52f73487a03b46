"""Every exercise: our solution passes, the stub fails, and each typical wrong answer gets a hint that fits."""

import numpy as np
import pytest

from minidist import all_reduce
from minidist.course.lesson import examine, names, solution
from minidist.course.lesson.catalogue import exercises, find
from minidist.course.lesson.exercises import e26_checkpoints
from minidist.course.lesson.hint_file import listed, rows
from tests.cases import each
from tests.lesson.bank import bank, mutated
from tests.lesson.judged_here import judged
from tests.lesson.wrong_answers import onto_what_a_dead_save_left

# The bank judges every answer, in this process; these are judged as a reader's are, in processes.
FIRST = {entry.exercise: entry for entry in reversed(bank()) if entry.hint}


@each("name", names(), sampled=4)
def test_a_typical_wrong_answer_gets_a_hint_that_fits(name):
    result = examine(name, FIRST[name].made(), mpi=False)
    assert not result
    assert FIRST[name].hint in result.hint, result.text
    assert "not yet" in result.text


def test_what_a_text_says_is_judged():
    """A grid of zeros has no scale, and the mean of largest logits is not the largest one."""
    answer = mutated("09b.one_grid", "largest[0] / 127 or 1.0", "largest[0] / 127")
    assert "got [nan" in judged("09b.one_grid", answer).text
    answer = mutated("14b.split_cross_entropy", '"max")', '"avg")')
    assert "got [inf" in judged("14b.split_cross_entropy", answer).text


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", names())
def test_our_solution_passes_at_par(name):
    result = examine(name, solution(name), mpi=False)
    assert result.passed, result.text
    assert result.par == pytest.approx(result.yours, rel=1e-9)


def test_more_than_two_versions_of_the_weights_are_refused():
    answer = mutated("17c.two_versions", "{latest: versions[latest], latest", "{**versions, latest")
    assert "two versions are enough" in judged("17c.two_versions", answer).hint


def test_a_save_meets_what_a_dead_one_has_left():
    (case,) = (case for case in find("26.save").cases() if case.size == 1 and case.seed == 2)
    disk, name, parts = e26_checkpoints.disk_arguments(case, 0)
    solution("26.save")(disk, name, parts)
    assert e26_checkpoints.check_disk(case, [disk.states]) == ""
    assert disk.files["latest"] == b"step-2"
    assert set(disk.files) == {"step-1/part-0", "step-2/part-0", "latest"}
    disk, *_ = e26_checkpoints.disk_arguments(case, 0)
    onto_what_a_dead_save_left(disk, name, parts)
    assert "'part-1' of 'step-2' was left by a save" in e26_checkpoints.check_disk(case, [disk.states])


def test_a_disk_renames_and_removes_as_posix_does():
    disk = e26_checkpoints.Disk({"a/x": b"1", "b/y": b"2", "c": b"3", "d": b"4"})
    for old, new, error in (("a", "b", "Directory not empty"), ("a", "c", "Not a directory"), ("c", "b", "not empty")):
        with pytest.raises(OSError, match=error):
            disk.rename(old, new)
    disk.rename("c", "d")
    disk.rename("a", "e")
    assert disk.files == {"b/y": b"2", "d": b"3", "e/x": b"1"}
    disk.remove("b")
    disk.remove("d")
    assert list(disk.files) == ["e/x"]
    with pytest.raises(FileNotFoundError):
        disk.remove("b")


@each("name", names(), sampled=8)
def test_an_unwritten_function_fails(name):
    def stub(*arguments):
        raise NotImplementedError("yours")

    result = examine(name, stub, mpi=False)
    assert not result
    assert "this is the stub" in result.hint
    assert not examine(name, lambda *arguments: None, mpi=False)


@each("name", names())
def test_each_exercise_has_wrong_answers_and_hints(name):
    assert sum(entry.exercise == name and entry.hint is not None for entry in bank()) >= 3
    assert find(name).hints


def test_the_rows_of_the_hints_belong_to_exercises_and_name_errors_that_exist():
    shared = {"before", "after", "03", "schedules", "cs336.weights", "cse234", "programs", "plans"}
    assert set(rows()) - shared <= {*exercises(), *exercises("assignments")}

    kinds, errors = [BaseException], set()
    while kinds:
        kind = kinds.pop()
        errors.add(kind.__name__)
        kinds += kind.__subclasses__()
    raised = {name for hints in rows().values() for row in hints for name in listed(row.get("raised", []))}
    assert raised <= errors


def test_a_variance_by_the_mean_of_squares_is_refused_where_rows_are_far_from_0():
    def by_squares(comm, x, eps):
        sums = all_reduce(comm, np.concatenate([[len(x)], x.sum(axis=0), (x**2).sum(axis=0)]))
        mean, squares = np.split(sums[1:] / max(1, sums[0]), 2)
        return (x - mean) / np.sqrt(np.maximum(squares - mean**2, 0) + eps)

    text = judged("16b.sync_batch_norm", by_squares).text
    assert "far from 0, and the mean of the squares" in text


def test_a_cross_entropy_without_the_target_gets_its_hint_on_one_rank():
    def without_target(comm, logits, targets, first):
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.log(powers.sum(axis=1)), powers / powers.sum(axis=1, keepdims=True)

    text = judged("14b.split_cross_entropy", without_target).text
    assert "1 rank, " in text
    assert "the target's logit is missing" in text
