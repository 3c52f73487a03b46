"""`compare --theirs`: every planted bug is named by its pattern, with the first tensor that it makes differ."""

import json
import re

import ml_dtypes
import numpy as np
import pytest

from minidist.core.base.errors import UsageError
from minidist.debug.dumps.dump import read_dump, write_dump
from minidist.debug.dumps.dump_comparison import compare_dumps, compare_with_ours
from minidist.debug.dumps.dump_names import Heads
from tests.cases import each
from tests.equality import planted


def report(folder, kind="gpt"):
    return compare_with_ours(read_dump(folder), kind, planted.HEADS, 2 if kind == "llama" else None)


@each("kind", ["gpt", "llama"])
@each("ranks", [1, 2, 4])
def test_a_right_run_is_equal(kind, ranks, tmp_path):
    found = report(planted.data_parallel(tmp_path, kind, ranks=ranks), kind)
    assert found.equal, found.text()
    assert found.compared == len(list(planted.model_of(kind).parameters()))
    assert found.tolerance < 1e-4


BUGS = {
    "sum for a mean": (r"^2 times \(dp has 2 ranks\) ours$", None),
    "divided twice": (r"^1/2 of \(dp has 2 ranks\) ours$", None),
    "missing micro-batch": (r"^the gradient of rows 0-1, 3 of 4; rows 2 are missing$", None),
    "stale": (r"^our gradient of the batch before: stale by one step$", None),
    "one parameter is not reduced": (
        r"^the gradient of rows 0-1 of 4; rows 2-3 are missing$",
        "gradients/transformer.h.1.mlp.c_fc.weight",
    ),
    "no all-reduce": (r"^the gradient of rows 0-1 of 4; rows 2-3 are missing$", None),
}


@each("bug", BUGS)
def test_a_planted_bug_has_its_pattern(bug, tmp_path):
    pattern, first = BUGS[bug]
    found = report(planted.data_parallel(tmp_path, bug=bug))
    assert not found.equal
    (text,) = found.differences[0].patterns
    assert re.match(pattern, text), found.text()
    if first is None:
        # Backward begins at the last layer norm.
        assert found.differences[0].name == "gradients/transformer.ln_f.bias"
        assert len(found.differences) >= found.compared - planted.LAYERS
    else:
        assert [difference.name for difference in found.differences] == [first]
    # Replicas that hold different values are reported, too.
    assert bool(found.unequal) == (bug in ("one parameter is not reduced", "no all-reduce"))


def rotary_pairs(name, gradient):
    """The rows of queries and keys as Meta's checkpoints have them."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return gradient
    heads = planted.HEADS if "q_proj" in name else 2
    return gradient.reshape(heads, 2, -1, gradient.shape[1]).swapaxes(1, 2).reshape(gradient.shape)


def head_order(name, gradient):
    if not name.endswith("q_proj.weight"):
        return gradient
    return gradient.reshape(planted.HEADS, -1, gradient.shape[1])[[2, 3, 0, 1]].reshape(gradient.shape)


def one_shard(name, gradient):
    if not name.endswith("o_proj.weight"):
        return gradient
    result = np.zeros_like(gradient)
    result[:8] = gradient[:8]
    return result


def transposed(name, gradient):
    return np.ascontiguousarray(gradient.T) if name.endswith("o_proj.weight") else gradient


@pytest.mark.parametrize(
    ("change", "sentence", "last"),
    [
        (
            rotary_pairs,
            "ours with the rows of each head as pairs (2i, 2i+1): the other form of rotary positions",
            "k_proj",
        ),
        (head_order, "ours with the heads in the order 2, 3, 0, 1", "q_proj"),
        (one_shard, "ours in 0:8 of dim 0 (of 16), zeros elsewhere: one shard only", "o_proj"),
        (transposed, "ours, transposed", "o_proj"),
    ],
)
def test_a_changed_layout_has_its_pattern(change, sentence, last, tmp_path):
    found = report(planted.data_parallel(tmp_path, "llama", change=change), "llama")
    assert f"model.layers.1.self_attn.{last}.weight" in found.differences[0].name
    assert found.differences[0].patterns == [sentence]


def swapped(*parts):
    """A change of gradients: heads 1 and 3 are exchanged in these thirds of the fused matrix and its bias."""

    def change(name, gradient):
        if "h.0.attn.c_attn" not in name:
            return gradient
        result = gradient.copy().reshape(*gradient.shape[:-1], 3, planted.HEADS, -1)
        for part in parts:
            result[..., part, [1, 3], :] = result[..., part, [3, 1], :]
        return result.reshape(gradient.shape)

    return change


REMEDY = "give them one order wherever this tensor is cut or joined by heads"


@pytest.mark.parametrize(
    ("parts", "words"),
    [((0, 1, 2), "in the queries, keys and values"), ((0,), "in the queries"), ((0, 2), "in the queries and values")],
)
def test_two_heads_of_a_fused_matrix_that_are_exchanged_are_named(parts, words, tmp_path):
    found = report(planted.data_parallel(tmp_path, change=swapped(*parts)))
    weight, bias = "gradients/transformer.h.0.attn.c_attn.weight", "gradients/transformer.h.0.attn.c_attn.bias"
    patterns = {difference.name: difference.patterns for difference in found.differences}
    assert set(patterns) == {weight, bias}
    assert patterns[weight] == [f"ours with heads 1 and 3 exchanged {words}: {REMEDY}"]
    assert f"{weight} is ours with heads 1 and 3 exchanged" in found.text()
    # The gradient of a key's bias is nothing but rounding, in which no order can be seen.
    (sentence,) = patterns[bias]
    assert sentence.startswith("ours with heads 1 and 3 exchanged in the queries")


def test_two_heads_of_a_projection_that_are_exchanged_are_named(tmp_path):
    def change(name, gradient):
        if "h.1.attn.c_proj.weight" not in name and "layers.1.self_attn.o_proj" not in name:
            return gradient
        by_head = gradient if "c_proj" in name else gradient.T
        by_head = by_head.reshape(planted.HEADS, -1, by_head.shape[1])[[0, 2, 1, 3]].reshape(by_head.shape)
        return np.ascontiguousarray(by_head if "c_proj" in name else by_head.T)

    for kind in ("gpt", "llama"):
        found = report(planted.data_parallel(tmp_path / kind, kind, change=change), kind)
        assert [d.patterns for d in found.differences] == [[f"ours with heads 1 and 2 exchanged: {REMEDY}"]]


def test_two_heads_of_a_weight_in_another_dump_are_named(tmp_path):
    right = read_dump(planted.data_parallel(tmp_path / "a"))
    tensors = {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in right.tensors.items()}
    name = "weights/transformer.h.0.attn.c_attn.weight"
    tensors[name] = swapped(0, 1, 2)(name, tensors[name])
    other = read_dump(write_dump(tmp_path / "b", [tensors], {}))
    (difference,) = compare_dumps(other, right, "gpt", Heads(planted.HEADS, planted.HEADS), 1e-5).differences
    assert difference.name == name
    assert difference.patterns[0].startswith("ours with heads 1 and 3 exchanged in the queries, keys and values")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (lambda loss: np.full((), np.nan), "a loss that is not finite is equal to none"),
        (lambda loss: np.full((), np.inf), "a loss that is not finite is equal to none"),
        (lambda loss: 2 * loss, "they differ by "),
        (lambda loss: 1.001 * loss, "they differ by 0.00"),
    ],
)
def test_a_loss_that_is_another_is_not_equal(bad, why, tmp_path):
    """The divisor of a loss that is only printed changes no gradient."""
    dump = read_dump(planted.data_parallel(tmp_path / "a"))
    ours = report(write_dump(tmp_path / "c", [{**dump.tensors, "batch/loss": np.ones(1)}], {})).loss[1]
    for n, loss in enumerate((np.array([ours]), bad(np.array([ours])))):
        found = report(write_dump(tmp_path / f"{n}", [{**dump.tensors, "batch/loss": loss}], {}))
        assert found.equal == (n == 0)
        assert (why in found.text()) != found.equal
        assert not found.differences


def test_activations_come_before_gradients(tmp_path):
    """The first block whose output differs is named, and the gradients behind it follow."""
    folder = planted.data_parallel(tmp_path / "a")
    ours = compare_with_ours(read_dump(folder), "gpt", planted.HEADS, None)
    assert ours.order[0].startswith("gradients/transformer.ln_f")
    dump = read_dump(folder)
    tensors = {**dump.tensors, "activations/transformer.h.1": np.zeros((4, 6, 16), np.float32)}
    for name in dump.of_kind("gradients"):
        tensors[f"gradients/{name}"] = tensors[f"gradients/{name}"].astype(np.float32)
    found = report(write_dump(tmp_path / "b", [tensors], {}))
    assert found.differences[0].name == "activations/transformer.h.1"
    assert found.differences[0].patterns == ["all zeros"]


def test_bfloat16_has_a_tolerance_of_its_own(tmp_path):
    folder = planted.data_parallel(tmp_path / "a")
    dump = read_dump(folder)
    tensors = {
        name: a.astype(ml_dtypes.bfloat16) if name.startswith("gradients/") else a for name, a in dump.tensors.items()
    }
    coarse = report(write_dump(tmp_path / "b", [tensors], {}))
    assert coarse.equal, coarse.text()
    assert 1e-3 < coarse.tolerance < 0.5
    tensors = {name: 2 * a if name.startswith("gradients/") else a for name, a in tensors.items()}
    assert report(write_dump(tmp_path / "c", [tensors], {})).differences[0].patterns == ["2 times ours"]


def test_two_dumps(tmp_path):
    right, wrong = planted.data_parallel(tmp_path / "a"), planted.data_parallel(tmp_path / "b", bug="divided twice")
    heads = Heads(planted.HEADS, planted.HEADS)
    assert compare_dumps(read_dump(right), read_dump(right), "gpt", heads, 1e-6).equal
    found = compare_dumps(read_dump(wrong), read_dump(right), "gpt", heads, 1e-5)
    assert found.differences[0].patterns == ["1/2 of (dp has 2 ranks) ours"]


def test_the_command(tmp_path, minidist):
    wrong = ["compare", "--theirs", planted.data_parallel(tmp_path / "a", bug="sum for a mean")]
    gpt = ["--model", "gpt", "--heads", "4"]
    out = minidist(*wrong, *gpt, code=1).out
    assert "first: gradients/transformer.ln_f.bias is 2 times (dp has 2 ranks) ours" in out
    out = minidist(*wrong, *gpt, "--json", code=1).out
    assert json.loads(out)["first_difference"] == "gradients/transformer.ln_f.bias"
    right = planted.data_parallel(tmp_path / "b")
    assert minidist("compare", "--theirs", right, *gpt).out.startswith("equal: ")
    minidist("compare", "--theirs", right, "--against", right, "--tolerance", "1e-6")


@each(
    ("words", "part"),
    [
        (["--theirs", "nowhere", "--model", "gpt"], "is not a folder"),
        (["--against", "x"], "add --theirs DIR"),
        (["--theirs", "x", "--dp", "2"], "--dp is of a job"),
        (["--theirs", "x", "--model", "mlp"], "dumps of a gpt or a llama"),
        (["--theirs", "x", "--against", "y"], "--against needs --tolerance"),
        (["--theirs", "x", "--tolerance", "0.1"], "it is measured, so leave it out"),
    ],
)
def test_wrong_flags_end_with_2(words, part, minidist):
    assert part in minidist("compare", *words, code=2).err


def test_what_our_run_cannot_use_is_refused(tmp_path):
    dump = read_dump(planted.data_parallel(tmp_path / "a"))
    small = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in dump.tensors.items()}
    weights = {name: a for name, a in small.items() if name.startswith("weights/")}
    rest = {name: a for name, a in small.items() if not name.startswith("weights/")}
    cases = {
        "has no weights": rest,
        "has no batch/tokens": {name: a for name, a in small.items() if not name.startswith("batch/")},
        "it is one number, the mean over all tokens": {**small, "batch/loss": np.ones(2, np.float32)},
        "it holds integers": {**small, "batch/tokens": np.zeros((2, 3), np.float32)},
        "values outside of 0 to 10": {**small, "batch/tokens": np.full((2, 7), 11)},
        "has no weights/transformer.ln_f.bias": {
            n: a for n, a in small.items() if n != "weights/transformer.ln_f.bias"
        },
        "have no counterpart, such as 'gradients/more'": {**small, "gradients/more": np.zeros(3, np.float32)},
        "no tensor of the dump has a name": {
            **weights,
            "batch/tokens": small["batch/tokens"],
            "gradients/a": np.zeros(2),
        },
    }
    for number, (sentence, tensors) in enumerate(cases.items()):
        folder = write_dump(tmp_path / f"case-{number}", [tensors], {})
        with pytest.raises(UsageError, match=sentence):
            report(folder)


def test_another_number_of_key_value_heads_is_named(tmp_path):
    folder = planted.data_parallel(tmp_path, "llama")
    with pytest.raises(UsageError, match=r"k_proj\.weight has the shape .*; give --kv-heads 2$"):
        compare_with_ours(read_dump(folder), "llama", planted.HEADS, None)
