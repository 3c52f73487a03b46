"""The account of bytes: each buffer once, released when it dies, charged to the account that saw it born."""

import numpy as np
import pytest

from minidist.base.memory import MemoryAccount, account_memory, thinned
from minidist.base.watchers import Watcher, current, set_watcher, track, watchers, watching
from minidist.core.base.errors import UsageError


def test_counts_a_buffer_once_and_until_its_last_view_dies():
    with account_memory(timeline=True) as account:
        a = track(np.zeros(100), "activation")
        view = track(a[10:20].reshape(2, 5), "gradient")
        assert account.by_purpose == {"activation": 800}
        del a
        assert account.current == 800
        del view
        assert account.current == 0
        b = track(np.zeros(10, np.float32), "gradient")
    assert (account.peak, account.peak_by_purpose) == (800, {"activation": 800, "gradient": 40})
    assert account.at_peak == {"activation": 800}
    assert account.events == [("activation", 800), ("activation", -800), ("gradient", 40)]
    assert account.history() == [{"activation": 800}, {"activation": 0}, {"activation": 0, "gradient": 40}]
    del b


def test_events_have_times_and_are_spread_over_a_jump_of_the_clock():
    now = [0.0]
    with account_memory(clock=lambda: now[0]) as account:
        a, b = track(np.zeros(1), "activation"), track(np.zeros(2), "activation")
        now[0] = 4.0
        del a
        now[0] = 5.0
        account.stop()
        del b
    now[0] = 6.0
    assert account.samples() == [(0.0, {"activation": 8}), (2.0, {"activation": 24}), (4.0, {"activation": 16})]
    assert account.current == 0
    with pytest.raises(UsageError, match=r"clock=comm\.time"):
        MemoryAccount(timeline=True).samples()


def test_the_history_needs_a_timeline():
    with pytest.raises(UsageError, match="timeline=True"):
        MemoryAccount().history()


def test_release_is_charged_to_the_account_of_the_birth():
    with account_memory() as first:
        a = track(np.zeros(10), "stash")
    with account_memory() as second:
        del a
    assert first.current == 0
    assert second.peak == 0


def test_off_costs_and_counts_nothing():
    assert current(MemoryAccount) is None
    a = np.zeros(3)
    assert track(a, "activation") is a


def test_unknown_purpose():
    with pytest.raises(ValueError, match="unknown memory purpose 'heap'"):
        MemoryAccount().track(np.zeros(1), "heap")


def test_empty_arrays_weigh_nothing():
    account = MemoryAccount()
    account.track(np.zeros(0), "activation")
    assert account.current == 0


def test_a_new_watcher_takes_the_place_of_the_one_of_its_class_and_of_no_other():
    class Other(Watcher):
        pass

    old, new, other = MemoryAccount(), MemoryAccount(), Other()
    with watching(other), watching(old):
        token = set_watcher(new)
        assert watchers.get() == (other, new)
        assert current(MemoryAccount) is new
        track(np.zeros(3), "activation")
        watchers.reset(token)
        assert watchers.get() == (other, old)
    assert (old.peak, new.peak) == (0, 24)


def test_a_watcher_watches_until_the_outermost_of_its_blocks_ends():
    account = MemoryAccount()
    with account:
        with account:
            assert watchers.get() == (account,)
        assert watchers.get() == (account,)
    with account as again:
        assert watchers.get() == (again,)
    assert watchers.get() == ()


def test_the_peak_follows_every_rise():
    account = MemoryAccount()
    arrays = [account.track(np.zeros(size, np.uint8), "parameter") for size in (100, 10, 1)]
    assert account.peak == account.current == 111
    arrays.pop()
    arrays.append(account.track(np.zeros(2, np.uint8), "stash"))
    assert (account.peak, account.at_peak) == (112, {"parameter": 110, "stash": 2})


def test_thinned_samples_keep_the_peak():
    samples = [(float(n), {"activation": n * (99 - n)}) for n in range(100)]
    assert thinned(samples, 100) == samples
    few = thinned(samples, 30)
    assert len(few) == 25
    assert max(few, key=lambda sample: sample[1]["activation"]) == (49.0, {"activation": 49 * 50})
    assert [time for time, _ in few] == sorted(time for time, _ in few)
    assert thinned([], 30) == []
