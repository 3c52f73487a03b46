"""Programs that hang on purpose: from their dumps the diagnosis finds what their labels say, and nothing else."""

import json

import pytest

from minidist.core.base.errors import UsageError
from minidist.course.museum import find
from minidist.debug.flight_recorder.corpus import CASES, Case, Label, hanging_world, write_corpus
from minidist.debug.flight_recorder.diagnosis import diagnose
from minidist.debug.flight_recorder.files import read_files
from minidist.debug.flight_recorder.write import write_dumps


@pytest.fixture(scope="module", params=["pickle", "json"])
def corpus(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, (2, 3, 5), request.param)
    return folder


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_a_diagnosis_finds_what_the_label_says(name, ranks, corpus):
    label = json.loads((corpus / "labels.json").read_text())[f"{name}-{ranks}"]
    found = diagnose(read_files(corpus / f"{name}-{ranks}")[0])
    assert sorted({wait.operation.rank for wait in found.waits}) == label["waits"]
    assert list(found.circle) == label["circle"]
    assert list(found.suspects) == label["suspects"]
    assert next((each.sequence for each in found.differences if each.group == "0"), None) == label["difference"]
    assert found.hangs
    assert all("corpus.py:" in wait.operation.site for wait in found.waits)


def test_a_job_that_ends_does_not_hang(tmp_path):
    from minidist.comm import SimWorld
    from minidist.core.collectives import all_reduce

    def main(comm):
        import numpy as np

        group = comm.split(comm.rank % 2)
        for each in (comm, group, comm):
            all_reduce(each, np.ones(3))

    world = SimWorld(4)
    world.run(main)
    write_dumps(world, tmp_path)
    found = diagnose(read_files(tmp_path)[0])
    assert not found.hangs
    assert {ranks for _, ranks in found.groups.values()} == {(0, 1, 2, 3), (0, 2), (1, 3)}
    assert found.lines()[-1].startswith("nothing hangs")


def test_a_case_that_ends_is_an_error():
    def ends(comm):
        """Every rank returns."""

    with pytest.raises(AssertionError, match="every rank returns: it does not hang on 2 ranks"):
        hanging_world(Case(ends, lambda ranks: Label((), (), (), 0), ""), 2)


def test_the_exhibits_that_are_named_exist():
    numbers = [case.exhibit for case in CASES.values() if case.exhibit]
    assert numbers
    assert [find(number)[0].number for number in numbers] == numbers


@pytest.mark.parametrize(
    ("ranks", "form", "part"), [([1], "pickle", "at least 2"), ([257], "json", "256"), ([2], "xml", "pickle or json")]
)
def test_wrong_flags(ranks, form, part, tmp_path):
    with pytest.raises(UsageError, match=part):
        write_corpus(tmp_path, ranks, form)
