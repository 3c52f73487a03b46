"""The types of the tensor axis: no layout has a wrong one, and each planted bug is named at its operation."""

import pytest

from minidist.comm import SimWorld
from minidist.core.autograd import Parameter, gelu
from minidist.core.base import arrays as xp
from minidist.core.nn.layers import LayerNorm
from minidist.core.parallel import tensor_parallel
from minidist.core.parallel.tensor_parallel import reduce_from_tensor_parallel_region
from minidist.job.config.train_config import TrainConfig, resolve_dims
from minidist.job.train.trainer import train
from minidist.parallel.layout_check import LayoutError
from minidist.parallel.tensor import sequence_parallel

GPT = {"model": "gpt", "layers": 2, "width": 16, "heads": 4, "context": 8, "data": "markov"}
JOB = {**GPT, "steps": 2, "microbatches": 2, "global_batch": 8}
LLAMA = {"model": "llama", "kv_heads": 1}
SPLIT = {"sequence_parallel": True}

LAYOUTS = [
    {"tp": 2},
    {"tp": 2, **SPLIT},
    {"tp": 4},
    {"tp": 2, **LLAMA},
    {"tp": 2, **LLAMA, **SPLIT},
    {"tp": 4, **LLAMA, "kv_heads": 2},
    {"tp": 2, "experts": 2},
    {"tp": 2, "experts": 2, **SPLIT},
    {"tp": 2, "experts": 2, "ep": 2, "dp": 2, **SPLIT},
    {"tp": 2, "pp": 2, "schedule": "1f1b", **SPLIT},
    {"tp": 2, "pp": 2, "schedule": "zb-h1"},
    {"tp": 2, "recompute": "full", **SPLIT},
    {"tp": 2, "recompute": "selective", **SPLIT},
    {"tp": 2, "cp": 2},
    {"tp": 2, "dp": 2, "zero": 1},
    {"tp": 2, "dp": 2, "zero": 2, **SPLIT},
    {"tp": 2, "dp": 2, "zero": 3},
    {"tp": 2, "cp": 2, **SPLIT},
    {"tp": 2, "dropout": 0.1, **SPLIT},
    {"tp": 2, "precision": "bf16", **SPLIT},
    {"tp": 2, "evaluate_every": 1},
]


def run(**settings):
    config = TrainConfig.make(**{**JOB, **settings})
    return SimWorld(resolve_dims(config).ranks).run(train, config)[0]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_has_a_wrong_type_and_nothing_changes(layout):
    checked, plain = run(**layout, check_layouts=True), run(**layout)
    assert checked.measured["layouts_checked"] > 50
    assert (checked.digest, checked.losses) == (plain.digest, plain.losses)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_later_stage_begins_with_whole_rows_or_with_its_part_of_them(sequence_parallel):
    """Its norm is checked on what another stage has sent, whose type is on no tape."""
    layout = {"tp": 2, "pp": 2, "layers": 2, "steps": 1, "sequence_parallel": sequence_parallel}
    checked, plain = run(**layout, check_layouts=True), run(**layout)
    assert (checked.digest, checked.losses) == (plain.digest, plain.losses)
    assert checked.measured["layouts_checked"] > 0


def test_an_mlp():
    job = {"model": "mlp", "layers": 3, "width": 16, "steps": 2, "global_batch": 8, "tp": 2}
    config = TrainConfig.make(**job, check_layouts=True)
    assert SimWorld(2).run(train, config)[0].measured["layouts_checked"] > 10


# --- planted bugs -----------------------------------------------------------------------------------------------------


def error_of(**layout):
    with pytest.raises(LayoutError) as raised:
        run(**layout, check_layouts=True)
    return str(raised.value)


def test_a_norm_on_split_rows_whose_gradient_is_not_reduced(monkeypatch):
    monkeypatch.setattr(sequence_parallel.SequenceParallelLayerNorm, "forward", LayerNorm.forward)
    text = error_of(tp=2, **SPLIT)
    assert "layer_norm of parameter 'transformer.h.0.ln_1.weight' of shape (16,), I over tp (2 ranks)" in text
    assert "its gradient on each rank is a summand that nothing sums" in text


def test_the_bias_of_a_row_parallel_layer_on_every_rank(monkeypatch):
    original = tensor_parallel.linear

    def with_bias(x, weight, bias, activation, in_out):
        y = original(x, weight, bias, activation, in_out)
        return y + BIAS["it"] if bias is None and "c_proj" in weight.name else y

    BIAS = {"it": Parameter(xp.zeros(16, xp.float32), True, "c_proj.bias")}
    monkeypatch.setattr(tensor_parallel, "linear", with_bias)
    text = error_of(tp=2)
    assert "add of parameter 'c_proj.bias'" in text
    assert "it is added to summands, so it counts 2 times: add it after the reduction" in text


def test_a_sum_that_is_not_reduced(monkeypatch):
    monkeypatch.setattr(tensor_parallel, "row_parallel_sum", lambda product, bias, comm: product)
    assert "counts 2 times: add it after the reduction" in error_of(tp=2)  # the residual stream next to summands


def test_a_summand_in_a_nonlinear_operation(monkeypatch):
    monkeypatch.setattr(tensor_parallel, "row_parallel_sum", lambda product, bias, comm: gelu(product))
    text = error_of(tp=2)
    assert "gelu of the input of shape (4, 8, 16), P over tp (2 ranks)" in text
    assert "it is a summand on each rank: reduce it before this operation" in text


def test_a_sum_that_is_reduced_twice(monkeypatch):
    original = tensor_parallel.row_parallel_sum

    def twice(product, bias, comm):
        return reduce_from_tensor_parallel_region(original(product, bias, comm), comm)

    monkeypatch.setattr(tensor_parallel, "row_parallel_sum", twice)
    text = error_of(tp=2)
    assert "Reduce of the input of shape (4, 8, 16), I over tp (2 ranks)" in text
    assert "the sum is 2 times the value: it is reduced twice" in text


def test_an_input_that_does_not_pass_f(monkeypatch):
    monkeypatch.setattr(tensor_parallel, "copy_to_tensor_parallel_region", lambda x, comm: x)
    text = error_of(tp=2)
    assert "linear of the input of shape (4, 8, 16), I over tp (2 ranks)" in text
    assert "pass copy_to_tensor_parallel_region on its way in" in text


def test_a_router_on_split_tokens(monkeypatch):
    """With the sequence split, a router that sees its rank's tokens only has a summand of its gradient."""
    from minidist.parallel.expert import tensor_parallel

    monkeypatch.setattr(tensor_parallel, "_gather_sequence", lambda comm, module, arguments: arguments[0])
    text = error_of(tp=2, experts=2, **SPLIT)
    assert "parameter 'transformer.h.0.mlp.router" in text
    assert "a summand that nothing sums" in text


def test_the_command_reports_and_refuses(minidist):
    words = ["train", "--model", "gpt", "--layers", "1", "--steps", "1", "--check-layouts", "--trace", "none"]
    assert "results over the tensor axis are right" in minidist(*words, "--tp", "2").out
    assert "it belongs to --tp 2 or more" in minidist(*words, "--dp", "2", code=2).err
