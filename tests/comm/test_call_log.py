"""The log of a rank's collective calls: what its messages say of them, and the sentence of two that differ."""

from minidist.comm import SimWorld
from minidist.comm.call_log import CallLog
from minidist.comm.call_site import CallSite
from minidist.comm.unlike_calls import unlike_calls
from tests.cases import each

HERE, THERE = CallSite("/here.py", 3), CallSite("/there.py", 5)


def log_of(*keys, site=HERE, kept=8):
    """The calls of a rank that are remembered."""
    return [(number, key, site, None) for number, key in enumerate(keys)][-kept:]


def said_by(*keys):
    """What the messages of a rank's calls say of the calls before each of them."""

    log = CallLog(8)
    return [log.continue_with(key) for key in keys]


def test_what_a_message_says_depends_on_every_call_before_it_and_on_no_other():
    said = said_by("broadcast/naive root 0", "barrier", "barrier", "all_reduce/ring")
    assert len(set(said)) == 4
    assert all(len(text) == 2 for text in said)
    unlike = said_by("broadcast/naive root 1", "barrier", "barrier", "all_reduce/ring")
    assert unlike[0] == said[0]  # the calls are compared by their own names
    assert all(a != b for a, b in zip(said[1:], unlike[1:], strict=True))
    other_last = said_by("broadcast/naive root 0", "barrier", "barrier", "split")
    assert other_last == said


def test_the_last_calls_are_kept_with_their_numbers():
    world = SimWorld(1)
    kept = world.kept_calls
    world.run(lambda comm: [comm.collective(str(number)) for number in range(kept + 2)])
    assert [call[:2] for call in world.calls.calls("world")[0]] == [(n, str(n)) for n in range(2, kept + 2)]


UNLIKE = {
    "roots": (
        [["barrier", f"broadcast/naive root {root}"] for root in (0, 1, 0)],
        "roots differ: call 1 of world is broadcast/naive root 0 on ranks 0, 2 and broadcast/naive root 1 on rank 1, at"
        " /here.py:3; every rank must pass the same root",
    ),
    "operations": (
        [["barrier"], ["split"], ["all_reduce/ring"]],
        "operation mismatch: call 0 of world is barrier on rank 0, split on rank 1 and all_reduce/ring on rank 2, at"
        " /here.py:3; every rank of a communicator must call the same collectives in the same order",
    ),
    "a call too few": (
        [["barrier"] * 3, ["barrier"] * 2, ["barrier"] * 2],
        "calls differ: call 2 of world is barrier on rank 0, at /here.py:3, and ranks 1, 2 made no such call; every"
        " rank of a communicator must call the same collectives in the same order",
    ),
    "a rank without calls": ([["barrier"], []], "calls differ: call 0 of world is barrier on rank 0, at /here.py:3"),
    "a reduction": (
        [["all_reduce/ring"], ["all_reduce/ring max"]],
        "reduction mismatch: call 0 of world is all_reduce",
    ),
    "nothing": ([["barrier", "split"]] * 3, ""),
}


@each("what", UNLIKE)
def test_the_first_call_that_differs_is_named(what):
    keys, words = UNLIKE[what]
    logs = {rank: log_of(*of_rank) for rank, of_rank in enumerate(keys)}
    assert unlike_calls("world", logs, logs).startswith(words)
    assert words or not unlike_calls("world", logs, logs)
    if words.startswith("calls differ"):
        assert not unlike_calls("world", logs), "ranks that go on may still make it"


def test_lines_that_differ_are_named_both():
    logs = {0: log_of("barrier"), 1: log_of("split", site=THERE)}
    assert "is barrier on rank 0 at /here.py:3 and split on rank 1 at /there.py:5; every" in unlike_calls("world", logs)


ARRAYS = {
    "sizes": (
        "all_reduce/ring",
        [("float32", (2,)), ("float32", (3,))],
        "shape mismatch: call 0 of world is all_reduce of float32[2] on rank 0 and of"
        " float32[3] on rank 1, at /here.py:3; every rank must pass an array of the same shape",
    ),
    "dtypes": (
        "reduce/naive root 1",
        [("float32", (2,)), ("float64", (2,))],
        "dtype mismatch: call 0 of world is reduce of float32[2] on rank 0 and of float64[2] on rank 1",
    ),
    "shapes of one size": ("all_reduce/ring", [("float32", (2, 3)), ("float32", (3, 2))], ""),
    "parts of a gather": ("all_gather/ring", [("float32", (2,)), ("float32", (3,))], ""),
}


@each("what", ARRAYS)
def test_arrays_are_compared_where_every_rank_must_pass_the_same(what):
    key, passed, words = ARRAYS[what]
    calls = {rank: [(0, key, HERE, array)] for rank, array in enumerate(passed)}
    assert unlike_calls("world", calls).startswith(words)
    assert bool(unlike_calls("world", calls)) == bool(words)
    met = unlike_calls("world", calls, met=0)
    assert bool(met) == (what != "shapes of one size"), "of a call whose messages have not fitted"


def test_calls_that_are_not_known_any_more_are_no_difference():
    ahead, behind = log_of(*["barrier"] * 5, kept=2), log_of(*["barrier"] * 2, kept=2)
    assert not unlike_calls("world", {0: ahead, 1: behind})
