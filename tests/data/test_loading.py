"""Batches made ahead, unpacked data that is kept, rows for uneven ranks, the rule in words."""

import gzip
import hashlib
import os
import signal
import threading
import time
from collections import defaultdict
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.base import cache as cache_module
from minidist.base.cache import content_hash, key_of
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import UsageError
from minidist.data import (
    GlobalBatchSampler,
    PrefetchingSampler,
    cached,
    cut_batch,
    load_dataset,
    sharding_rule,
    text_file,
    weighted_shards,
)
from tests.cases import each
from tests.examples import path_of

uneven_ranks = ModuleType("uneven_ranks")
SourceFileLoader("uneven_ranks", str(path_of("uneven_ranks"))).exec_module(uneven_ranks)


class Counting:
    """A sampler that says who asked it."""

    def __init__(self):
        self.asked, self.made = [], defaultdict(threading.Event)

    def batch(self, step, first, count):
        self.asked.append((step, first, count, threading.current_thread().name))
        self.made[step].set()
        if step == 7:
            raise ValueError("no step 7")
        return step * 100 + first


REQUESTS = [(step, first, 2) for step in range(4) for first in (0, 2)]


def test_batches_are_made_in_order_by_another_thread():
    sampler = Counting()
    with PrefetchingSampler(sampler, REQUESTS) as ahead:
        assert [ahead.batch(*request) for request in REQUESTS] == [step * 100 + first for step, first, _ in REQUESTS]
        assert ahead.served == len(REQUESTS)
    assert {name for *_, name in sampler.asked} == {"minidist prefetch"}
    assert not ahead._thread.is_alive()


def test_at_most_depth_batches_wait_and_leaving_early_ends_the_thread():
    sampler = Counting()
    with PrefetchingSampler(sampler, ((i, 0, 1) for i in range(10**9)), depth=2) as ahead:
        ahead.batch(0, 0, 1)
        time.sleep(0.2)
        assert len(sampler.asked) <= 1 + 2 + 1  # taken, waiting, and one in its hands
    assert not ahead._thread.is_alive()


def test_a_request_out_of_order_is_answered_without_the_thread_and_the_order_goes_on():
    sampler = Counting()
    with PrefetchingSampler(sampler, REQUESTS) as ahead:
        assert ahead.batch(0, 0, 2) == 0
        assert ahead.batch(3, 1, 5) == 301
        assert [ahead.batch(*request) for request in REQUESTS[1:]] == [
            step * 100 + first for step, first, _ in REQUESTS[1:]
        ]
        assert ahead.served == len(REQUESTS)
        assert ahead.batch(9, 0, 1) == 900  # after the last one


def test_an_error_comes_where_its_batch_would_have():
    with PrefetchingSampler(Counting(), [(0, 0, 1), (7, 0, 1)]) as ahead:
        assert ahead.batch(0, 0, 1) == 0
        with pytest.raises(ValueError, match="no step 7"):
            ahead.batch(7, 0, 1)


def test_the_next_batch_is_made_while_this_one_is_used():
    """Nobody asks for batch 1 before it is there."""
    sampler = Counting()
    with PrefetchingSampler(sampler, [(0, 0, 1), (1, 0, 1)]) as ahead:
        ahead.batch(0, 0, 1)
        assert sampler.made[1].wait(timeout=30)
        assert ahead.batch(1, 0, 1) == 100


# --- the cache ---


def test_a_file_is_unpacked_once_and_mapped_from_then_on(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDIST_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "words.txt.gz"
    file.write_bytes(gzip.compress(b"to be or not to be"))
    first = text_file(str(file))
    assert isinstance(first.tokens, np.memmap)
    assert first.tokens.tobytes() == b"to be or not to be"
    assert not first.tokens.flags.writeable
    (tmp_path / "copy.gz").write_bytes(file.read_bytes())
    monkeypatch.setattr("minidist.data.files._unpacked", lambda path: pytest.fail("unpacked again"))
    assert np.array_equal(text_file(str(tmp_path / "copy.gz")).tokens, first.tokens)  # another name, the same content
    assert load_dataset(f"text:{file}").samples(4) == 4
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_other_content_is_another_entry_and_half_a_file_is_made_again(tmp_path, capsys):
    source, place = tmp_path / "a", tmp_path / "cache"
    source.write_bytes(b"one")
    made = []

    def make():
        made.append(source.read_bytes())
        return np.frombuffer(made[-1], np.uint8)

    for _ in range(2):
        assert cached(source, "bytes", make, place).tobytes() == b"one"
    source.write_bytes(b"two")
    assert cached(source, "bytes", make, place).tobytes() == b"two"
    assert cached(source, "letters", make, place).tobytes() == b"two"  # something else is done to it
    assert made == [b"one", b"two", b"two"]
    (entry,) = place.glob(f"bytes-{key_of(content_hash(source), 'bytes')}.npy")
    entry.write_bytes(entry.read_bytes()[:-1])
    assert cached(source, "bytes", make, place).tobytes() == b"two"
    assert len(made) == 4
    said = capsys.readouterr().err
    assert (
        said
        == f"minidist: the cache entry {entry} is damaged: its checksum is not that of its bytes; it is made again\n"
    )


def test_a_key_has_the_content_the_name_the_version_and_every_parameter(tmp_path):
    """The SHA-256 of all of them, as written down here."""
    source = np.arange(6, dtype=np.uint8)
    content = hashlib.sha256(b"uint8 (6,) " + bytes(range(6))).hexdigest()
    assert content_hash(source) == content
    spelled = f'["words", 2, {{"lower": true, "most": 9}}, "{content}"]'
    assert key_of(content, "words", 2, most=9, lower=True) == hashlib.sha256(spelled.encode()).hexdigest()
    others = [{}, {"version": 2}, {"most": 9}, {"most": 8}, {"lower": True}]
    made = [cached(source, "words", lambda n=n: np.full(3, n), tmp_path, **more) for n, more in enumerate(others)]
    assert [array.tolist() for array in made] == [[n] * 3 for n in range(len(others))]
    assert content_hash(source.view(np.int8)) != content
    for wrong in (np.nan, b"x", np.float32(1)):
        with pytest.raises(UsageError, match=r"of a cached words cannot be written as JSON .* pass numbers, texts"):
            cached(source, "words", lambda: source, tmp_path, least=wrong)


def test_two_writers_and_a_killed_one(tmp_path, monkeypatch):
    """A writer that is overtaken leaves one whole entry; one that is killed leaves none, and its file goes later."""

    def overtaken():
        cached(np.arange(2), "x", lambda: np.ones(2), tmp_path)
        return np.ones(2)

    assert cached(np.arange(2), "x", overtaken, tmp_path).tolist() == [1, 1]
    assert len(list(tmp_path.iterdir())) == 1

    # Killed after the bytes are on the disk, and before the rename.
    synced = []
    monkeypatch.setattr(cache_module.os, "fsync", synced.append)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL) if synced else os._exit(3))
        cached(np.arange(3), "x", lambda: np.ones(3), tmp_path)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = tmp_path.glob("*.tmp")
    assert cached(np.arange(3), "x", lambda: np.full(3, 2.0), tmp_path).tolist() == [2, 2, 2]
    assert left.exists()  # it may be another writer's
    os.utime(left, (0, 0))
    for entry in tmp_path.glob("*.npy"):
        entry.unlink()
    cached(np.arange(3), "x", lambda: np.ones(3), tmp_path)
    assert not left.exists()


def test_without_a_place_for_the_cache_it_is_only_slower(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    assert cached(tmp_path / "file", "bytes", lambda: np.zeros(3), tmp_path / "file" / "below").tolist() == [0, 0, 0]


def test_a_broken_gz_is_one_sentence(tmp_path):
    (tmp_path / "x.gz").write_bytes(b"\x1f\x8b broken")
    with pytest.raises(UsageError, match="cannot be read"):
        text_file(str(tmp_path / "x.gz"))


def test_generated_data_is_shared_and_read_only():
    assert load_dataset("markov") is load_dataset("markov")
    for array in (load_dataset("markov").tokens, load_dataset("glyphs").inputs, load_dataset("pydoc").tokens):
        assert not array.flags.writeable


# --- uneven ranks, and the rule ---


@given(st.integers(0, 200), st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
def test_weighted_shards_cover_all_rows_in_proportion(rows, weights):
    shards = weighted_shards(rows, weights)
    assert [first for first, _ in shards] == np.cumsum([0, *(size for _, size in shards)])[:-1].tolist()
    assert sum(size for _, size in shards) == rows
    for (_, size), weight in zip(shards, weights, strict=True):
        assert abs(size - rows * weight / sum(weights)) < 1
        assert weight or not size
    assert weighted_shards(12, [1, 1, 1]) == [(0, 4), (4, 4), (8, 4)]


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([], "give one per rank"),
        ([2, -1], "the weight of rank 1 is -1; it must be 0, or"),
        ([0, 0], "give one per rank"),
    ],
)
def test_weights_that_mean_nothing(weights, sentence):
    with pytest.raises(UsageError, match=sentence):
        weighted_shards(4, weights)


@each("ranks", [1, 2, 3, 4, 5, 8])
def test_a_step_on_uneven_ranks_is_that_of_one_device_and_takes_as_long_as_all_together(ranks, monkeypatch):
    monkeypatch.setattr(uneven_ranks, "ROWS", 60)
    links = LinkModel(flops=1e8, memory_bandwidth=1e8)  # so that a step is mostly computing
    results = SimWorld(ranks, links=links).run(uneven_ranks.train)
    alone, seconds = SimWorld(1, links=links).run(uneven_ranks.train)[0]
    for weights, _ in results:
        assert np.abs(weights - alone).max() < 1e-12
    equal = SimWorld(ranks, links=links).run(uneven_ranks.train, [1.0] * ranks)
    if ranks > 1:
        ideal = sum(seconds) * 3 / (ranks + 2)  # the speed of rank 0 over the sum of the speeds
        assert max(sum(time) for _, time in results) < 1.15 * ideal
        assert max(sum(time) for _, time in equal) > 1.2 * ideal


def test_the_rule_in_words(minidist):
    sampler = GlobalBatchSampler(load_dataset("glyphs"), 12, 1, 5)
    text = sharding_rule(sampler, cut_batch(12, 3, 2), step=1)
    indices = sampler.sample_indices(1)
    assert f"replica 2: micro-batches 4 to 5, rows 8 to 11: samples {' '.join(map(str, indices[8:12]))}" in text
    assert "2,000 samples; a step takes 12, so an epoch is 166.7 steps" in text
    shown = minidist("data", "--dp", "2", "--global-batch", "8", "--weights", "3,1").out
    assert "replica 0: micro-batches 0 to 0, rows 0 to 5" in shown
    assert "replica 1: micro-batches 1 to 1, rows 6 to 7" in shown
    minidist("data", "--weights", "fast", code=2)


def test_a_poisoned_entry_of_the_cache_is_made_again(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"content")
    made = cached(tmp_path / "a.txt", "text", lambda: np.arange(5), tmp_path)
    (entry,) = tmp_path.glob("text-*.npy")
    for poison in (np.zeros((2, 2), complex), np.arange(5, 10), np.array(["a"] * 5)):
        del made
        np.save(entry, poison)
        made = cached(tmp_path / "a.txt", "text", lambda: np.arange(5), tmp_path)
        assert made.tolist() == [0, 1, 2, 3, 4]
    assert cached(tmp_path / "a.txt", "text", lambda: pytest.fail("not needed"), tmp_path).tolist() == made.tolist()


@each("ranks", ["0", "-1", "100001", "9" * 30])
def test_the_command_refuses_a_number_of_ranks_that_no_world_has(ranks, minidist):
    assert "a simulated world has 1 to 100,000 ranks here" in minidist("data", "--ranks", ranks, code=2).err
