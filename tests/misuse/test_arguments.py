"""Arguments of a wrong kind: one sentence that says what was passed and what to pass."""

import numpy as np
import pytest

from minidist import (
    GPT,
    MLP,
    AdamW,
    GPTConfig,
    LinkModel,
    Llama,
    LlamaConfig,
    Pipeline,
    SimWorld,
    all_gather,
    all_reduce,
    fully_shard,
    glyphs,
    init_device_mesh,
    load_dataset,
    matmul,
    parallelize_module,
    split_model,
)
from minidist.core.base.errors import MinidistError
from minidist.core.nn.flat import FlatParameters
from minidist.optim import Muon
from minidist.pipeline.schedules import get_schedule
from tests.cases import each

CALLS = {
    "a number to shard": (lambda c: fully_shard(3, mesh=c), r"a value of type int as its.*\(model, mesh=comm\)"),
    "a name as a plan": (lambda c: Pipeline(c, "1f1b", [], None), r"got '1f1b' as its plan; pass get_schedule"),
    "no schedule": (lambda c: get_schedule(None), "unknown schedule 'None'; there are 1f1b"),
    "a stage too many": (lambda c: split_model(MLP([2, 2, 2]), 2, [7]), "no stage 7 of 2; number them from 0 to 1"),
    "a stage from the end": (lambda c: split_model(MLP([2, 2, 2]), 2, [-1]), "no stage -1 of 2"),
    "no padding": (lambda c: FlatParameters([], pad_to=0), "pad_to=0; it must be a whole number of at least 1"),
    "no state": (lambda c: MLP([2, 2]).load_state_dict(None), "got a NoneType; pass a dict, as state_dict"),
    "no step": (
        lambda c: AdamW(MLP([2, 2]).parameters()).load_state_dict({}),
        "needs a dict with 'step' and 'state', as",
    ),
    "one size": (lambda c: MLP(3), r"MLP\(3\) has no layer; pass the sizes"),
    "a negative size": (lambda c: MLP([3, -2]), r"sizes\[1\]=-2; it must be a whole number of at least 1"),
    "one text": (lambda c: GPT(GPTConfig(7, 4, 8, 1, 2))(np.arange(3)), r"shape \(3,\).*one text is \(1, T\)"),
    "no algorithm": (lambda c: all_reduce(c, np.ones(2), algorithm=None), "unknown all_reduce algorithm 'None'"),
    "a list as out": (lambda c: all_gather(c, np.ones(2), out=[0, 0]), "rank 0: all_gather into a list; pass an array"),
    "a name as a cost": (lambda c: LinkModel(alpha="1"), "alpha is '1'; it must be 0, or a number from"),
    "a name as a rate": (lambda c: LinkModel(flops="1"), "flops is '1'; it must be from .* per second, or infinite"),
    "a mesh of a number": (lambda c: init_device_mesh(c, 1, ("dp",)), r"shape 1; pass the ranks of each axis, such as"),
    "axes that are numbers": (lambda c: init_device_mesh(c, (1,), (3,)), r"names \(3,\); pass the name of each axis"),
    "a mesh without a communicator": (lambda c: init_device_mesh((1,), ("dp",), c), "needs a communicator, and got"),
    "an axis by number": (lambda c: init_device_mesh(c, (1,), ("dp",)).size(0), "the mesh has no axis 0; it has dp"),
    "a dict as configuration": (lambda c: GPT({"n_layer": 2}), r"GPT got .* as its configuration; pass a GPTConfig\("),
    "the class as configuration": (lambda c: Llama(LlamaConfig), r"Llama got .*; pass a LlamaConfig\("),
    "no heads": (lambda c: GPTConfig(n_head=0), "n_head=0; it must be a whole number of at least 1"),
    "half a width": (lambda c: GPTConfig(n_embd=64.5), "n_embd=64.5; it must be a whole number of at least 1"),
    "no heads of a llama": (lambda c: LlamaConfig(num_attention_heads=0), "num_attention_heads=0; it must be a whole"),
    "no module to split": (lambda c: parallelize_module(None, c, {}), "of type NoneType as its module; pass the model"),
    "two arrays": (lambda c: matmul(np.ones((1, 1)), np.ones((1, 1))), r"ndarray, and needs a Tensor; pass Tensor\("),
    "fewer than no images": (lambda c: glyphs(-1), "samples=-1; it must be a whole number of at least 1"),
    "no name of a dataset": (lambda c: load_dataset(3), r"load_dataset\(3\); pass the name of a dataset"),
    "an unknown setting": (lambda c: Muon(MLP([2, 2]).parameters(), nosuch=1), "Muon has no argument 'nosuch'; of"),
}


@each("call", CALLS.values(), ids=list(CALLS))
def test_an_argument_of_a_wrong_kind_is_refused_in_one_sentence(call):
    made, words = call
    with pytest.raises(MinidistError, match=words):
        SimWorld(1).run(made)
