"""Generated data are what they claim; a user's file is read, or refused in one sentence with value and remedy."""

import gzip
import io
from itertools import pairwise
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.core.base.errors import UsageError
from minidist.data import bigram_entropy, glyphs, load_dataset, markov, unigram_entropy
from minidist.data.generated import random_tokens
from tests.cases import each


def test_the_python_help_is_english_bytes():
    data = load_dataset("pydoc")
    assert data.vocab_size == 256
    assert data.tokens.size > 100_000
    assert b" the " in data.tokens.tobytes()
    assert bigram_entropy(data.tokens) < unigram_entropy(data.tokens) < log(256)


def test_the_markov_source_has_the_entropy_that_it_claims():
    """Measured on the tokens: the bigram entropy tends to the entropy rate."""
    data = markov(tokens=200_000)
    assert data.tokens.max() < data.vocab_size
    assert bigram_entropy(data.tokens) == pytest.approx(data.entropy, abs=0.01)
    assert data.entropy < unigram_entropy(data.tokens) - 0.1  # the token before tells something
    assert data.entropy != markov(tokens=10, seed=1).entropy


def test_generated_data_are_the_same_on_every_rank():
    for name in ("markov", "glyphs"):
        one, other = load_dataset(name), load_dataset(name)
        for attribute in ("tokens",) if one.is_tokens else ("inputs", "targets"):
            np.testing.assert_array_equal(getattr(one, attribute), getattr(other, attribute))


def test_glyphs_can_be_told_apart():
    """The nearest neighbour among 1,500 images names most of 500 others; a guess would be right in a tenth."""
    data = glyphs(2000)
    assert (data.features, data.classes, len(data.targets)) == (144, 10, 2000)
    assert set(data.targets) == set(range(10))
    flat = data.inputs.reshape(2000, -1)
    known, asked = flat[:1500], flat[1500:]
    distance = (known**2).sum(axis=1) - 2 * asked @ known.T
    right = data.targets[distance.argmin(axis=1)] == data.targets[1500:]
    assert right.mean() > 0.8


def test_entropies_of_small_texts():
    assert unigram_entropy(b"aaaa") == 0
    assert unigram_entropy(b"abab") == pytest.approx(log(2))
    assert bigram_entropy(b"ababa") == pytest.approx(0, abs=1e-15)
    assert bigram_entropy(b"aabba") == pytest.approx(log(2))  # after a: a or b; after b: b or a


@given(st.lists(st.integers(0, 4), min_size=2, max_size=50))
def test_bigram_entropy_is_its_definition(tokens):
    pairs = list(pairwise(tokens))
    expected = -sum(log(pairs.count((a, b)) / tokens[:-1].count(a)) / len(pairs) for a, b in pairs)
    assert bigram_entropy(np.array(tokens)) == pytest.approx(expected, abs=1e-12)


def test_text_is_its_bytes(tmp_path):
    (tmp_path / "text.txt").write_text("grüße")
    data = load_dataset(f"text:{tmp_path}/text.txt")
    assert bytes(data.tokens) == "grüße".encode()
    assert data.vocab_size == 256


@pytest.mark.parametrize(
    ("suffix", "dtype"), [("u8", "<u1"), ("u16", "<u2"), ("bin", "<u2"), ("u32", "<u4"), ("i64", "<i8")]
)
def test_tokens_have_the_dtype_of_the_suffix(tmp_path, suffix, dtype):
    tokens = np.array([3, 1, 200, 0], dtype)
    tokens.tofile(tmp_path / f"tokens.{suffix}")
    data = load_dataset(f"tokens:{tmp_path}/tokens.{suffix}")
    np.testing.assert_array_equal(data.tokens, tokens)
    assert data.vocab_size == 201
    assert isinstance(data.tokens, np.memmap)


def test_tokens_with_a_header(tmp_path):
    np.save(tmp_path / "tokens.npy", np.array([5, 70_000], np.int32))
    data = load_dataset(f"tokens:{tmp_path}/tokens.npy")
    assert (data.tokens.tolist(), data.vocab_size) == ([5, 70_000], 70_001)


def idx(array, code=8):
    return bytes([0, 0, code, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files(tmp_path, packed):
    images, labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4) * 10, np.array([7, 1], np.uint8)
    for stem, array in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        if packed:
            (tmp_path / f"{stem}.gz").write_bytes(gzip.compress(idx(array), mtime=0))
        else:
            (tmp_path / stem).write_bytes(idx(array))
    data = load_dataset(f"idx:{tmp_path}")
    assert (data.features, data.classes) == (12, 8)
    inputs, targets = data.rows(np.array([1]))
    np.testing.assert_array_equal(inputs, images[1].reshape(1, 12).astype(np.float32) / np.float32(255))
    assert inputs.dtype == np.float32
    assert targets.tolist() == [1]


@pytest.mark.parametrize(("labels", "names"), [(1, ["data_batch_1.bin", "data_batch_2.bin"]), (2, ["train.bin"])])
def test_cifar_files(tmp_path, labels, names):
    rows = np.random.default_rng(0).integers(0, 10, (2 * len(names), labels + 3072), dtype=np.uint8)
    for name, part in zip(names, np.split(rows, len(names)), strict=True):
        part.tofile(tmp_path / name)
    data = load_dataset(f"cifar:{tmp_path}")
    assert (data.image, data.channels_last) == ((3, 32, 32), False)
    inputs, targets = data.rows(np.array([1, 0]))
    np.testing.assert_array_equal(inputs, rows[[1, 0], labels:].astype(np.float32) / np.float32(255))
    assert targets.tolist() == rows[[1, 0], labels - 1].tolist()


@pytest.mark.parametrize("names", [("x", "y"), ("x_train", "y_train")])
def test_npz_archives(tmp_path, names):
    np.savez(tmp_path / "data.npz", **{names[0]: np.full((3, 2), 0.5), names[1]: np.array([0, 2, 1])})
    data = load_dataset(f"npz:{tmp_path}/data.npz")
    inputs, targets = data.rows(np.array([2, 0]))
    np.testing.assert_array_equal(inputs, np.full((2, 2), 0.5, np.float32))
    assert (inputs.dtype, targets.tolist(), data.classes) == (np.float32, [1, 0], 3)


def write(folder):
    """Files with every defect."""
    (folder / "empty.txt").touch()
    (folder / "text.txt").write_text("text")
    (folder / "odd.u16").write_bytes(b"abc")
    (folder / "tokens.dat").write_bytes(b"abcd")
    (folder / "bad.npy").write_bytes(b"no header")
    np.save(folder / "float.npy", np.zeros(3))
    np.array([-1], "<i4").tofile(folder / "negative.i32")
    (folder / "part").mkdir()
    (folder / "part" / "data_batch_1.bin").write_bytes(bytes(3072))
    (folder / "bad.npz").write_bytes(b"no archive")
    np.savez(folder / "names.npz", a=np.zeros(2), b=np.zeros(2))
    np.savez(folder / "shapes.npz", x=np.zeros((3, 2)), y=np.zeros(2, int))
    np.savez(folder / "labels.npz", x=np.zeros((2, 2)), y=np.zeros(2))
    for name, images in (("cut", idx(np.zeros((2, 2), np.uint8))[:-1]), ("other", b"PNG..."), ("zip", None)):
        (folder / name).mkdir()
        if images:
            (folder / name / "train-images-idx3-ubyte").write_bytes(images)
        else:
            (folder / name / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"abc" * 99, mtime=0)[:-4])


@each(
    ("spec", "message"),
    [
        ("pydok", r"--data pydok: no such data \(did you mean 'pydoc'\?\); one of pydoc, .*, text:FILE, .*idx:DIR"),
        ("texts:{0}/text.txt", r"no such data \(did you mean 'text'\?\)"),
        ("pydoc:file", "no such data"),
        ("{0}/text.txt", r"is a file, but its kind is missing; write text:/.*/text.txt$"),
        ("absent.txt", r"--data absent.txt: there is no file 'absent.txt'$"),
        ("absent.npz", "there is no file 'absent.npz'$"),
        ("absent.bin", "there is no file 'absent.bin'$"),
        ("absent.npy", "there is no file 'absent.npy'$"),
        ("{0}", r"is a folder; write idx:DIR or cifar:DIR$"),
        ("text:", "names no file; write text:FILE"),
        ("idx", "names no file; write idx:DIR"),
        ("text:{0}/test.txt", r"does not exist \(did you mean 'text.txt'\?\); name an existing file"),
        ("text:{0}/nowhere/text.txt", "does not exist; name an existing file"),
        ("text:{0}/empty.txt", "is empty; name a file with something in it"),
        ("text:{0}", "is a folder; name a file in it"),
        ("tokens:{0}/odd.u16", "has 3 bytes, not a multiple of the 2 of a .u16 token"),
        ("tokens:{0}/tokens.dat", r"the suffix '.dat' names no dtype; rename it to one of .u8"),
        ("tokens:{0}/bad.npy", "is not a NumPy array file: .*; write it with numpy.save"),
        ("tokens:{0}/float.npy", r"is \(3,\) float64; tokens are whole numbers in one dimension"),
        ("tokens:{0}/negative.i32", "holds the token -1; tokens are numbers from 0 on"),
        ("idx:{0}/nowhere", "is not a folder; name the one with"),
        ("idx:{0}", "has no train-images-idx3-ubyte or train-images-idx3-ubyte.gz; put both"),
        ("idx:{0}/cut", "has 15 bytes, its header says 16; fetch it again"),
        ("idx:{0}/other", "does not begin like an idx file"),
        ("idx:{0}/zip", "cannot be read: .*; fetch it again"),
        ("cifar", "names no file; write cifar:DIR"),
        ("cifar:{0}/nowhere", "is not a folder; name the one with data_batch_1.bin"),
        ("cifar:{0}", "has no data_batch_1.bin and no train.bin; unpack the binary version"),
        ("cifar:{0}/part", "has 3072 bytes, not a multiple of the 3073 of an image; fetch it again"),
        ("npz:{0}/bad.npz", "is not a NumPy archive; write it with numpy.savez"),
        ("npz:{0}/names.npz", "holds a, b; it needs x and y, or x_train and y_train"),
        ("npz:{0}/shapes.npz", r"has inputs \(3, 2\) and labels \(2,\); it needs"),
        ("npz:{0}/labels.npz", "has labels of float64; labels are whole numbers"),
    ],
)
def test_a_defect_is_one_sentence(tmp_path, spec, message):
    write(tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        load_dataset(spec.format(tmp_path))
    assert "\n" not in str(caught.value)


def archive(**arrays):
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    return content.getvalue()


def test_damaged_archives_are_one_sentence_and_never_another_error(tmp_path):
    rng = np.random.default_rng(0)
    whole = archive(x=rng.integers(0, 255, (20, 4, 4), np.uint8), y=np.arange(20) % 3)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            damaged[place] ^= int(rng.integers(1, 256))
        (tmp_path / "a.npz").write_bytes(bytes(damaged))
        try:
            load_dataset(f"npz:{tmp_path / 'a.npz'}")
        except UsageError as error:
            refused += len(str(error)) < 600
    assert refused > 250


@each(
    ("name", "content", "sentence"),
    [
        ("a.npz", archive(x=np.array([[1], [2]], object), y=np.arange(2)), "damaged, or its arrays are not of numbers"),
        ("a.npz", archive(x=np.array([["a"], ["b"]]), y=np.arange(2)), "inputs are numbers"),
        ("a.npz", archive(x=np.zeros((2, 2)), y=np.array([0, 2**63], np.uint64)), "labels are below"),
        ("a.npz", lambda: archive(x=np.zeros((1, 65_000_000), np.uint8), y=np.arange(1)), "more than 200 times"),
        ("a.gz", lambda: gzip.compress(bytes(65_000_000), 1, mtime=0), "use gunzip"),
        ("a.gz", gzip.compress(bytes(1_000), mtime=0)[:-9] + b"123456789", "fetch it again"),
        ("a.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': ((((((", "is not a NumPy array file"),
        ("a.npy", archive(x=np.arange(3)), "is a NumPy archive"),
        ("a.u32", b"\xff\xff\xff\xff", "holds the token 4294967295"),
    ],
)
def test_data_that_no_model_can_take(name, content, sentence, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDIST_CACHE", str(tmp_path / "cache"))
    (tmp_path / name).write_bytes(content() if callable(content) else content)  # two take a second
    kind = {".npz": "npz", ".gz": "text"}.get(name[1:], "tokens")
    with pytest.raises(UsageError, match=sentence):
        load_dataset(f"{kind}:{tmp_path / name}")


def test_idx_with_65_dims_and_paths_that_do_not_exist(tmp_path):
    for stem in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (tmp_path / stem).write_bytes(bytes([0, 0, 8, 65]) + (1).to_bytes(4, "big") * 65 + b"x")
    with pytest.raises(UsageError, match="has 65 dims"):
        load_dataset(f"idx:{tmp_path}")
    for spec in ("text:~nosuchuser/x", "idx:~nosuchuser"):
        with pytest.raises(UsageError, match="has no user ~nosuchuser"):
            load_dataset(spec)
    with pytest.raises(UsageError, match="no path can have"):
        load_dataset("text:a\0b")


def test_random_tokens_are_of_the_whole_vocabulary_and_the_same_everywhere():
    data = load_dataset("random:50")
    assert (data.name, data.vocab_size, data.entropy) == ("random:50", 50, np.log(50))
    counts = np.bincount(data.tokens, minlength=50)
    assert len(counts) == 50
    assert abs(counts / data.tokens.size - 1 / 50).max() < 1e-3
    assert load_dataset("random:50") is data
    assert not data.tokens.flags.writeable
    np.testing.assert_array_equal(random_tokens(50, 100).tokens, data.tokens[:100])


@each("wrong", ["1", "0", "-3", "many", "1e3", "1000000000"])
def test_a_vocabulary_that_is_no_number_is_one_sentence(wrong):
    with pytest.raises(UsageError, match=f"--data random:{wrong}: the vocabulary must be a number from 2 to"):
        load_dataset(f"random:{wrong}")
