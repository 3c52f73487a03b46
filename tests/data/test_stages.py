"""Stages behind a data set: equal bits for any ranks, workers and resume; an epoch of blocks is every sample once."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import SimWorld
from minidist.core.base.errors import MinidistError, UsageError
from minidist.data import GlobalBatchSampler, WorkerSampler, load_dataset
from minidist.data.sampler import WINDOW, block_order, permutation
from minidist.data.workers import LoaderError, open_sampler
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train

IMAGES = "glyphs | crop:2 | flip | shuffle:8"


@pytest.fixture
def own(tmp_path):
    """A file of stages, and images that are stored as bits."""
    (tmp_path / "own.py").write_text(
        "import numpy as np\n"
        "from minidist.data import SampleDataset, glyphs\n"
        "def packed():\n"
        "    images = glyphs()\n"
        "    bits = np.packbits((images.inputs > 0.5).reshape(len(images.inputs), -1), axis=1)\n"
        "    return SampleDataset('packed', bits, images.targets, 10)\n"
        "def decode(samples):\n"
        "    return np.unpackbits(samples, axis=1).astype(np.float32)\n"
        "def noise(samples, draw):\n"
        "    return samples + draw(samples.shape[1]).astype(np.float32)\n"
        "def mask(samples, draw):\n"
        "    return np.where(draw(samples.shape[1]) < 0.1, 0, samples)\n"
        "def shorter(samples):\n"
        "    return samples[:, :-1]\n"
        "def outside(samples):\n"
        "    return samples + 256\n"
        "def fewer(samples):\n"
        "    return samples[1:]\n"
        "def broken(samples):\n"
        "    raise ValueError('not an image')\n"
        "def three(a, b, c):\n"
        "    return a\n"
    )
    return tmp_path / "own.py"


@given(samples=st.integers(1, 700), block=st.integers(1, 40), epoch=st.integers(0, 2), seed=st.integers(0, 3))
def test_an_epoch_of_blocks_is_every_sample_once_and_a_window_reads_few_blocks(samples, block, epoch, seed):
    order = permutation(seed, epoch, samples, block)
    assert sorted(order.tolist()) == list(range(samples))
    for first in range(0, samples, WINDOW * block):
        window = order[first : first + WINDOW * block]
        # The short last block of the file may shift a window's ends into the middle of a block.
        assert len(set((window // block).tolist())) <= WINDOW + 1
    some = np.arange(samples)[epoch::3]
    np.testing.assert_array_equal(block_order(seed, epoch, samples, block, some), order[some])


def test_blocks_are_shuffled_and_so_are_the_samples_in_them():
    first, second = permutation(0, 0, 4096, 16), permutation(0, 1, 4096, 16)
    assert not np.array_equal(first, second)
    blocks = first[: 16 * WINDOW] // 16
    assert np.ptp(blocks) > 64  # of 256: from all over the file
    assert np.mean(np.diff(blocks) == 0) < 0.2  # neighbours are from different blocks


def test_stages_of_images_are_windows_and_mirror_images_of_what_is_stored():
    plain, staged = load_dataset("glyphs"), load_dataset("glyphs | crop:2 | flip")
    sampler, seen = GlobalBatchSampler(staged, 64, 1, 3), set()
    inputs, targets = sampler.batch(0, 0, 64)
    indices = sampler.sample_indices(0)
    np.testing.assert_array_equal(targets, plain.rows(indices)[1])
    size = plain.inputs.shape[1:]
    for row, index in enumerate(indices.tolist()):
        padded = np.pad(plain.inputs[index].astype(np.float32), 2)
        found = [
            (y, x, side)
            for y in range(5)
            for x in range(5)
            for side in (1, -1)
            if np.array_equal(padded[y : y + size[0], x : x + size[1]][:, ::side].ravel(), inputs[row])
        ]
        assert found
        seen.add(found[0])
    assert len(seen) > 20  # of 50


@pytest.mark.parametrize("shape", [(3, 6, 5), (6, 5, 3), (6, 5)])
def test_width_and_height_are_found_for_each_order_of_channels(tmp_path, shape):
    images = np.random.default_rng(0).integers(0, 256, (40, *shape)).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x=images, y=np.arange(40) % 2)
    staged = load_dataset(f"npz:{tmp_path / 'images.npz'} | flip")
    width = 2 if shape == (6, 5, 3) else images.ndim - 1
    made = staged.rows(np.arange(40))[0].reshape(images.shape)
    for image, one in zip(images / np.float32(255), made, strict=True):
        assert np.array_equal(one, image) or np.array_equal(one, np.flip(image, width - 1))
    assert 10 < sum(not np.array_equal(a, b) for a, b in zip(images / np.float32(255), made, strict=True)) < 30


def test_what_is_drawn_depends_on_the_place_alone():
    """Asked for in parts, out of order, by another object; another visit of a sample draws anew."""
    one, other = (GlobalBatchSampler(load_dataset(IMAGES), 12, 1, 5) for _ in range(2))
    whole = [one.batch(step, 0, 12)[0] for step in range(3)]
    np.testing.assert_array_equal(
        np.concatenate([other.batch(2, 7, 5)[0], other.batch(2, 0, 7)[0]]), np.roll(whole[2], -7, 0)
    )
    np.testing.assert_array_equal(other.at(24, 12)[0], whole[2])
    samples = one.samples
    again = GlobalBatchSampler(load_dataset("glyphs | crop:2"), samples, 1, 5)
    first, second = (
        {i: row.tobytes() for i, row in zip(b.indices.tolist(), b[0], strict=True)}
        for b in map(again.batch, (0, 1), (0, 0), (samples, samples))
    )
    assert sum(first[i] != second[i] for i in first) > samples / 2


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_make_the_same_batches(workers, own):
    opening = partial(open_sampler, f"{own}:packed | {own}:decode | {own}:noise | shuffle:4", False, 6, 1, 3)
    requests = [(step, 2, 3) for step in range(7)]
    alone = opening()
    with WorkerSampler(opening, alone, requests, workers) as sampler:
        for request in requests:
            for made, expected in zip(sampler.batch(*request), alone.batch(*request), strict=True):
                np.testing.assert_array_equal(made, expected)
        assert sampler.served == 7


def run(ranks, tmp_path=None, **settings):
    config = TrainConfig.make(model="mlp", width=8, layers=1, reduction="ordered", **settings)
    return SimWorld(ranks).run(train, config)[0].losses


def test_jobs_on_any_ranks_train_on_the_same_batches_and_a_resumed_one_goes_on_with_them(tmp_path):
    one = run(1, data=IMAGES, micro_batch=8, steps=6)
    two = run(2, data=IMAGES, micro_batch=2, accumulation=2, steps=6, prefetch_batches=2)
    for losses in (two, run(4, data=IMAGES, micro_batch=2, steps=6, check_data=True)):
        assert losses == pytest.approx(one, rel=1e-6)
    assert run(2, data="glyphs", micro_batch=4, steps=6) != pytest.approx(one, rel=1e-3)

    saved = str(tmp_path / "saved")
    run(4, data=IMAGES, micro_batch=2, steps=3, save=saved)
    with pytest.raises(MinidistError, match="data"):
        run(2, data="glyphs | crop:3", micro_batch=2, accumulation=2, steps=6, save=saved, resume=True)
    then = run(2, data=IMAGES, micro_batch=2, accumulation=2, steps=6, save=saved, resume=True)
    assert then == pytest.approx(two, rel=1e-6)


def test_held_out_data_pass_the_stages_that_draw_nothing(own):
    from minidist.data import hold_out

    train_on, rest = hold_out(load_dataset(f"{own}:packed | {own}:decode | {own}:noise"))
    assert [len(dataset.stages) for dataset in (train_on, rest)] == [2, 1]
    assert set(np.unique(rest.rows(np.arange(5))[0])) == {0.0, 1.0}


def test_a_stage_may_change_the_shape_of_samples_and_the_tokens(own):
    decoded = load_dataset(f"{own}:packed | {own}:decode")
    assert decoded.features == decoded.inputs.shape[1] * 8
    run(2, data=f"{own}:packed | {own}:decode", micro_batch=2, steps=1)
    text = load_dataset(f"pydoc | {own}:mask")
    inputs, targets = text.rows(np.arange(20), 64)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    assert 0.05 < np.mean(inputs != load_dataset("pydoc").rows(np.arange(20), 64)[0]) < 0.15


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("glyphs | crob:2", r"no stage 'crob:2' \(did you mean 'crop'\?\)"),
        ("glyphs | crop:0", "stage 'crop:0' needs the pixels of padding, a number from 1; write crop:4"),
        ("glyphs | shuffle", "stage 'shuffle' needs the samples of a block, a number from 1; write shuffle:4"),
        ("glyphs |", "no stage ''"),
        ("pydoc | flip", "stage flip is for images, and pydoc has none; leave it out"),
        ("pydoc | OWN:shorter", "became int64 of shape .*; return as many tokens, as integers"),
        ("pydoc | OWN:outside", "made token .*, and tokens are 0 to 255; return tokens of the vocabulary"),
        ("glyphs | OWN:fewer", r"made an array of shape .* of 1 samples; return one row for each"),
        ("glyphs | OWN:broken", "raised ValueError: not an image for samples of shape"),
        ("glyphs | OWN:three", "has 3 parameters; give it one, the samples, or two, the samples and draw"),
    ],
)
def test_a_stage_that_cannot_be_used_is_one_sentence(text, words, own):
    with pytest.raises(UsageError, match=words):
        load_dataset(text.replace("OWN", str(own)))


def test_a_stage_that_fails_in_a_worker_is_said_with_its_sample(own):
    own.write_text(
        own.read_text() + "def late(samples):\n    assert samples.sum(1).max() < 19, 'too bright'\n    return samples\n"
    )
    opening = partial(open_sampler, f"{own}:packed | {own}:decode | {own}:late", False, 4, 1, 0)
    requests = [(step, 0, 4) for step in range(40)]
    words = r"stage .*own.py:late.* raised AssertionError: too bright.*for sample \d+, in step"
    with pytest.raises(LoaderError, match=words), WorkerSampler(opening, opening(), requests, 1) as sampler:
        [sampler.batch(*request) for request in requests]
