"""Every exhibit: its bug can be injected and removed, the run shows it, and its tests fail as declared."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from minidist.cli import main
from minidist.core.base.errors import UsageError
from minidist.core.optim import AdamW
from minidist.course.museum import Catch, CheckResult, Exhibit, Patch, Recording, exhibits, find, jobs, run_exhibit
from minidist.course.museum.exhibit_run import curve, table
from minidist.pipeline.schedules import from_text, get_schedule
from minidist.pipeline.validate import PlanError, validate
from tests.parallel import test_fully_shard
from tests.parallel.models import assert_same, one_device

EXHIBITS = exhibits()
each = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.number)

# The error that minidist raises when it meets the bug.
SAYS = {
    "1a": r"MismatchError: ranks differ in all_reduce/ring: the loss of rank 2 is the mean over 3 rows, .* over 4 rows",
    "1b": r"MismatchError: ranks differ in all_reduce/ring: the loss of rank \d is the mean over \d rows",
    "34": r"BufferReuseError: rank 0: the buffer of its receive from rank 1",
    "5": r"MismatchError: ranks differ in all_reduce/ring: rank \d has model 1 after 0 updates",
    "13b": r"AutogradError: the gradient of 'transformer.wte.weight' is partly summed",
    "15a": r"MismatchError: ranks differ in all_gather",
    "15b": r"DeadlockError: deadlock: 2 of 2 ranks are blocked",
    "16a": r"(?s)DeadlockError.*rank 0 waits in broadcast.*rank 1 has returned",
    "18": r"MismatchError: shape mismatch: rank 0",
    "20a": r"UnwaitedRequestError: rank 0: its send to rank 1.* was never waited for",
    "20b": r"(?s)DeadlockError: deadlock: 1 of 3 ranks are blocked",
    "21": r"deadlock with synchronous sends: rank 0 at 0SEND_F2 .* rank 1 at 3SEND_B0 waits for 2RECV_B0",
    "24": r"rank 1: 1B0 comes before 1F0",
    "26a": r"MismatchError: dtype mismatch: rank 0 sent message of float64",
    "26b": r"DtypeError: mul: dtypes float32 and float64 differ",
    "28a": r"(?s)DeadlockError.*rank 2 has returned",
    "28b": r"MismatchError.*all_reduce/ring",
    "101": r"step 3, epoch 1: of the inputs, sample 6 was read twice, by rank 0; sample 2 was read by no rank",
    "102": r"step 3, epochs 1 and 2: .*sample 4 was read by rank 1 for the second time in the epoch",
    "103": r"sample \d was read by rank \d for the second time in the epoch; .* \(of 4 samples, 3 too often and 2 ",
    "104": r"had read 5 of the 7 samples of epoch 1, and they are not the first ones of that epoch",
    "105": r"sample 2 was read by no rank \(of 4 samples, 1 too often and 1 never",
    "106": r"step 3, .* \(of 4 samples, 3 too often and 3 never",
    "107": r"step 1, epochs 0 and 1: .*sample 6 was read by no rank",
    "108": r"step 0, epoch 0: of the inputs, sample 3 was read twice, by ranks 0, 1",
    "109": r"sample 0 was read by rank 1 before its turn; .* on rank 1, of several copies of the data",
    "141": r"MismatchError: weights differ: .* every rank must build the whole model from the same seed",
    "119": r"MismatchError: ranks differ in all_reduce.*checksum of the weights",
}
# No gradient and no weight differs. Of 20c and 26c the job shows nothing at all: the tests that they name show them.
SILENT = {"19a", "19b", "19c", "20c", "26a", "26c"}
UNSEEN = {"20c", "26c"}


def test_the_exhibit_of_a_technique_that_is_not_there_says_so():
    exhibit = replace(find("127")[0], job=lambda: jobs.train_job(1, 1, setting_of_a_folder=1)())
    with pytest.raises(UsageError, match=r"exhibit 127 shows a bug in a technique .*unknown setting 'setting_of"):
        run_exhibit(exhibit)


@each
def test_an_injected_bug_is_visible(exhibit):
    """Every exhibit: an injection that has no effect, such as one in a module that the job does not use, fails here."""
    run = run_exhibit(exhibit, tests=exhibit.number in UNSEEN)
    assert bool(run.said) == (exhibit.number in SAYS)
    if run.said:
        assert re.search(SAYS[exhibit.number], run.said)
    differs = any(d.largest > 0 for d in run.differences.values())
    assert differs == (exhibit.number not in SILENT and run.wrong is not None)
    if exhibit.number.startswith("19"):
        assert run.wrong.measured["peak bytes of unsharded"] > 1.2 * run.right.measured["peak bytes of unsharded"]
    if exhibit.number in UNSEEN:
        assert {result.status for result in run.checks.values()} == {"caught"}
    if len(run.right.losses) >= 12:
        assert min(run.right.losses[-3:]) < run.right.losses[0]  # it trains
    assert exhibit.title in run.text()


@pytest.mark.sampled(28)
@each
def test_an_injected_bug_is_caught(exhibit):
    with exhibit.injected():
        results = {str(catch): catch.check() for catch in exhibit.caught_by}
    for catch, result in results.items():
        assert result.status == "caught", f"{catch} with bug {exhibit.number}: {result}"


def test_every_bug_finds_what_it_replaces_and_is_taken_out_again():
    for exhibit in EXHIBITS:
        patch = Patch()
        try:
            exhibit.inject(patch)
        except Exception as error:
            raise AssertionError(f"exhibit {exhibit.number}: {error!r}") from error
        finally:
            patch.undo()


CATCHES = {str(catch): catch for exhibit in EXHIBITS for catch in exhibit.caught_by}


def test_the_tests_that_exhibits_name_exist():
    missing = []
    for name, catch in CATCHES.items():
        try:
            catch.load()
        except AttributeError:
            missing.append(name)
    assert missing == []


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", CATCHES)
def test_the_same_tests_pass_without_a_bug(name):
    CATCHES[name].run()


def test_the_museum_has_every_bug_of_the_collection():
    numbers = {int(re.match(r"\d+", exhibit.number)[0]) for exhibit in EXHIBITS}
    assert numbers >= set(range(1, 29))
    assert len({exhibit.number for exhibit in EXHIBITS}) == len(EXHIBITS)
    assert all(exhibit.caught_by and exhibit.inject.__doc__ for exhibit in EXHIBITS)


def test_a_patch_leaves_nothing_behind():
    class Thing:
        def method(self):
            return 1

    class Child(Thing):
        pass

    table, patch = {"a": 1}, Patch()
    patch.setattr(Child, "method", lambda self: 2)
    patch.setattr(Thing, "new", 3)
    patch.setitem(table, "a", 2)
    patch.setitem(table, "b", 2)
    patch.setitem(table, "a", 3)
    assert (Child().method(), Thing.new, table) == (2, 3, {"a": 3, "b": 2})
    patch.undo()
    assert (Child().method(), hasattr(Thing, "new"), table) == (1, False, {"a": 1})
    assert "method" not in vars(Child)


def test_a_test_that_does_not_detect_the_bug_is_shown_as_passed():
    """The table must not say "caught" by itself."""
    catch = Catch("tests/museum/test_checks.py", "test_float32_stays_float32")
    nothing = nothing_injected(catch)
    assert run_exhibit(nothing).checks == {str(catch): CheckResult("passed")}
    assert "0 of 1" in table([run_exhibit(nothing)])


def nothing_injected(*catches):
    return Exhibit("0", "nothing", "", lambda patch: None, lambda: Recording([1.0], []), catches)


def test_an_error_that_the_exhibit_does_not_declare_does_not_count_as_caught(monkeypatch):
    def unrelated():
        raise KeyError("a typing error in the test")

    catch = Catch("tests/museum/test_checks.py", "test_float32_stays_float32")
    monkeypatch.setattr(Catch, "load", lambda self: unrelated)
    run = run_exhibit(nothing_injected(catch))
    assert run.checks[str(catch)].status == "other failure"
    assert run.as_dict()["caught_by"] == {str(catch): ""}
    assert "other failure: KeyError" in run.text()
    assert "0 of 1" in table([run])


def test_the_list_does_not_need_the_techniques_of_single_exhibits():
    """A technique is a folder that can be deleted: the museum still has the other exhibits."""
    missing = ["minidist.techniques.local_sgd.averaging", "minidist.techniques.data_ledger"]
    program = f"""
import sys
from minidist.job.config import train_config  # which loads the techniques
sys.modules |= dict.fromkeys({missing})
from minidist.course.museum import exhibits
print([exhibit.title for exhibit in exhibits()])
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "the outer step leads away from the average" in process.stdout, process.stderr


def test_a_check_that_cannot_run_says_so_and_is_not_counted_as_caught():
    """In an environment without pytest, such as the one of `make demo`."""
    program = "import sys; sys.modules['pytest'] = None; from minidist.cli import main; main(['museum', '5', '--json'])"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (answer,) = json.loads(process.stdout)
    assert set(answer["caught_by"].values()) == {""}
    assert list(answer["not_run"].values()) == ["pytest is not installed; pip install -e '.[test]'"]


def test_the_command_shows_story_curves_and_tests(capsys, tmp_path):
    main_exits(["museum", "1a", "-o", str(tmp_path / "curves.svg")])
    text = capsys.readouterr().out
    for words in (
        "mean of means over ragged shards",
        "loss without",
        "loss with",
        "max |difference| of gradients",
        "test_ragged_shards",
    ):
        assert words in text
    assert "without the bug" in (tmp_path / "curves.svg").read_text()
    main_exits(["museum", "21", "--json", "--no-tests"])
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["said"].startswith("PlanError")
    assert answer["caught_by"] == {str(find("21")[0].caught_by[0]): ""}


def test_a_range_of_numbers():
    assert [exhibit.number for exhibit in find("1")] == ["1a", "1b"] == [exhibit.number for exhibit in EXHIBITS[:2]]
    assert [exhibit.number for exhibit in find("27-29")] == ["27a", "27b", "28a", "28b", "29"]
    assert {"101", "117b", "120"} <= {exhibit.number for exhibit in find("101-140")}


def main_exits(arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert not end.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["museum", "99"], "no exhibit '99'"),
        (["museum", "60-70"], "no exhibit '60-70'"),
        (["museum", "101-"], "no exhibit '101-'"),
        (["museum", "-o", "x.svg"], "give its number"),
        (["museum", "21", "-o", "x.svg"], "no loss curve"),
    ],
)
def test_wrong_requests(arguments, words, minidist):
    assert words in minidist(*arguments, code=UsageError.exit_code).err


# --- near misses: code that looks like a bug of the collection and is right ---


def test_the_micro_batches_of_a_unit_added_before_they_are_summed_over_ranks():
    """The order of additions differs from the declared one: stage 3 is not DDP with no_sync."""
    result = test_fully_shard.SimWorld(3).run(test_fully_shard.train)[0]
    with pytest.raises(AssertionError):
        assert_same(result, one_device(lambda flat: AdamW(flat, lr=0.01, weight_decay=0.1), 3, 2, False))


def test_crossed_sends_in_a_whole_plan():
    """The plan is complete in every other respect: with both sends after the receives that they need, it passes."""
    validate(from_text("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0\n"))
    crossed = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1\n"
    )
    with pytest.raises(PlanError, match="deadlock with synchronous sends"):
        validate(from_text(crossed))


def test_numbers_from_one_on_the_last_of_three_ranks():
    plan = get_schedule("1f1b").plan(3, 3)
    last = plan.to_text().splitlines()[-1].replace("2F2", "2F3").replace("2F1", "2F2").replace("2F0", "2F1")
    with pytest.raises(PlanError, match="rank 2: 2B0 comes before 2F0"):
        validate(from_text("\n".join([*plan.to_text().splitlines()[:-1], last])))


def test_curves_share_a_scale():
    assert curve([2.0, 1.0], [2.0, 0.0])[:2] == "█▅"
