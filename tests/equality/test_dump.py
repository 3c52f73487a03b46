"""Dumps: shards, terms and copies are put together, and damaged ones are refused with one sentence."""

import json
import random

import numpy as np
import pytest

from minidist.core.base.errors import UsageError
from minidist.debug.dumps.dump import LAYOUT, read_dump, write_dump
from tests.cases import each

WHOLE = np.arange(48.0, dtype=np.float32).reshape(4, 12)


def test_shards_of_two_axes_terms_and_copies(tmp_path):
    """dp cuts rows and then tp does; b has terms over dp; c is on two ranks only; d is cut along another dim."""
    ranks = []
    for dp in range(2):
        for tp in range(2):
            ranks.append(
                {
                    "gradients/a": WHOLE[2 * dp + tp : 2 * dp + tp + 1],
                    "gradients/b": (dp + 1) * WHOLE,
                    "gradients/d": WHOLE[:, :5] if tp == 0 else WHOLE[:, 5:],
                    **({"gradients/c": WHOLE} if tp == 1 else {}),
                }
            )
    rules = {"*/a": {"shard": {"dp": 0, "tp": 0}}, "gradients/b": {"partial": ["dp"]}, "*/[d]": {"shard": {"tp": 1}}}
    dump = read_dump(write_dump(tmp_path, ranks, {"dp": 2, "tp": 2}, rules))
    for name, expected in (("a", WHOLE), ("b", 3 * WHOLE), ("c", WHOLE), ("d", WHOLE)):
        assert np.array_equal(dump.tensors[f"gradients/{name}"], expected), name
    assert not dump.unequal
    assert dump.dtypes["gradients/a"] == "float32"


def test_copies_that_differ_are_named(tmp_path):
    ranks = [{"weights/a": WHOLE}, {"weights/a": WHOLE}, {"weights/a": WHOLE + 1}]
    dump = read_dump(write_dump(tmp_path, ranks, {"dp": 3}))
    assert dump.unequal == {"weights/a": "rank 2 has other values than rank 0 along dp"}


def test_npz_files(tmp_path):
    (tmp_path / LAYOUT).write_text(json.dumps({"mesh": {"tp": 2}, "tensors": {"*": {"shard": {"tp": 0}}}}))
    for rank in range(2):
        np.savez(tmp_path / f"r{rank}.npz", **{"gradients/a": WHOLE[2 * rank : 2 * rank + 2]})
    assert np.array_equal(read_dump(tmp_path).tensors["gradients/a"], WHOLE)


@each(
    ("layout", "sentence"),
    [
        ([], "is not a JSON object"),
        ({"mesh": {"dp": 0}}, "gives the size of each axis"),
        ({"mesh": {"dp": 10**9}}, "gives the size of each axis"),
        ({"mesh": [2]}, "gives the size of each axis"),
        ({"mesh": {"dp": 2}, "tensor": {}}, "has the key 'tensor' .did you mean 'tensors'"),
        ({"mesh": {"dp": 2}, "tensors": {"*": {"shard": {"tp": 0}}}}, "names the axis 'tp'"),
        ({"mesh": {"dp": 2}, "tensors": {"*": {"shard": {"dp": -1}}}}, "gives the dim"),
        ({"mesh": {"dp": 2}, "tensors": {"*": {"shard": {"dp": 0}, "partial": ["dp"]}}}, "it is one of them"),
        ({"mesh": {"dp": 2}, "tensors": {"*": {"cut": 1}}}, "has the keys shard and partial"),
        ({"mesh": {"dp": 3}}, "has no file of rank 2"),
        ({"mesh": {}}, "has files of 2 ranks"),
        ({"mesh": {"dp": 2}, "names": 3}, "it is a text"),
        ({"mesh": {"dp": 2}, "tensors": {"*": {"shard": {"dp": 5}}}}, "do not join along dim 5"),
    ],
)
def test_a_wrong_layout_is_refused(layout, sentence, tmp_path):
    write_dump(tmp_path, [{"weights/a": WHOLE}] * 2, {"dp": 2})
    (tmp_path / LAYOUT).write_text(json.dumps(layout))
    with pytest.raises(UsageError, match=sentence):
        read_dump(tmp_path)


def test_wrong_tensors_are_refused(tmp_path):
    for number, (ranks, sentence) in enumerate(
        [
            ([{"a": WHOLE}], "a name is KIND/NAME"),
            ([{"weights/a": WHOLE}, {"weights/a": WHOLE[:2]}], "name the dim that dp cuts"),
        ]
    ):
        folder = write_dump(tmp_path / str(number), ranks, {"dp": len(ranks)})
        with pytest.raises(UsageError, match=sentence):
            read_dump(folder)
    np.savez(tmp_path / "rank-0.npz", **{"weights/a": np.array(["text"])})
    (tmp_path / LAYOUT).write_text("{}")
    with pytest.raises(UsageError, match="holds no numbers"):
        read_dump(tmp_path)
    np.savez(tmp_path / "rank-0.npz", **{"weights/a": np.array([{}], dtype=object)})
    with pytest.raises(UsageError, match="is damaged"):
        read_dump(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_damaged_file_is_read_or_refused_with_one_sentence(suffix, tmp_path):
    write_dump(tmp_path, [{"weights/a": WHOLE, "gradients/a": WHOLE}], {})
    if suffix == "npz":
        (tmp_path / "rank-0.safetensors").unlink()
        np.savez(tmp_path / "rank-0.npz", **{"weights/a": WHOLE, "gradients/a": WHOLE})
    path = tmp_path / f"rank-0.{suffix}"
    source, draw, refusals = path.read_bytes(), random.Random(1), []
    for _ in range(150):
        data = bytearray(source)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(data))
            how = draw.randrange(3)
            if how == 0:
                data[place] = draw.randrange(256)
            elif how == 1:
                del data[place:]
            else:
                data[place:place] = bytes(draw.randrange(256) for _ in range(9))
            data = data or bytearray(b"\x01")
        path.write_bytes(data)
        try:
            read_dump(tmp_path)
        except UsageError as error:
            refusals.append(str(error))
    assert len(refusals) > 30
    assert all(text.startswith("--theirs ") and len(text) < 600 for text in refusals)
