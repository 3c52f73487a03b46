"""Arguments of a wrong kind: one sentence that says what was passed and what to pass."""

import numpy as np
import pytest

from minidist import (
    GPT,
    MLP,
    AdamW,
    FlatParameters,
    GPTConfig,
    Linear,
    LinkModel,
    Llama,
    LlamaConfig,
    MixtureOfExperts,
    Pipeline,
    RingAttention,
    SimWorld,
    Tensor,
    TrainConfig,
    all_gather,
    all_reduce,
    barrier,
    chunk_sizes,
    copy_to_tensor_parallel_region,
    expert_capacity,
    fully_shard,
    gelu,
    get_schedule,
    glyphs,
    gradient_axes,
    init_device_mesh,
    load_dataset,
    make_buckets,
    matmul,
    parallelize_module,
    purpose,
    sequence_positions,
    shards_of,
    split_model,
    vocab_parallel_cross_entropy,
)
from minidist.core.base.errors import MinidistError
from minidist.core.nn.layers import Embedding, LayerNorm
from minidist.nn.ops.functions import relu
from minidist.optim import Muon
from minidist.pipeline.schedules import load_plan
from minidist.report.page import page
from tests.cases import each

CALLS = {
    "a number to shard": (lambda c: fully_shard(3, mesh=c), r"a value of type int as its.*\(model, mesh=comm\)"),
    "a name as a plan": (lambda c: Pipeline(c, "1f1b", [], None), r"got '1f1b' as its plan; pass get_schedule"),
    "no schedule": (lambda c: get_schedule(None), "unknown schedule 'None'; there are 1f1b"),
    "a stage too many": (lambda c: split_model(MLP([2, 2, 2]), 2, [7]), "no stage 7 of 2; number them from 0 to 1"),
    "a stage from the end": (lambda c: split_model(MLP([2, 2, 2]), 2, [-1]), "no stage -1 of 2"),
    "no padding": (lambda c: FlatParameters([], pad_to=0), "pad_to=0; it must be a whole number of at least 1"),
    "no state": (lambda c: MLP([2, 2]).load_state_dict(None), "got a value of type NoneType; pass a dict of"),
    "no step": (
        lambda c: AdamW(MLP([2, 2]).parameters()).load_state_dict({}),
        "needs a dict with 'step' and 'state', as",
    ),
    "one size": (lambda c: MLP(3), r"MLP\(3\) has no layer; pass the sizes"),
    "a negative size": (lambda c: MLP([3, -2]), r"sizes\[1\]=-2; it must be a whole number of at least 1"),
    "one text": (lambda c: GPT(GPTConfig(7, 4, 8, 1, 2))(np.arange(3)), r"shape \(3,\).*one text is \(1, T\)"),
    "no algorithm": (lambda c: all_reduce(c, np.ones(2), algorithm=None), "unknown all_reduce algorithm 'None'"),
    "a list as out": (lambda c: all_gather(c, np.ones(2), out=[0, 0]), "rank 0: all_gather into a value of type list"),
    "a name as a cost": (lambda c: LinkModel(alpha="1"), "alpha is '1'; it must be 0, or a number from"),
    "a name as a rate": (lambda c: LinkModel(flops="1"), "flops is '1'; it must be from .* per second, or infinite"),
    "a mesh of a number": (lambda c: init_device_mesh(c, 1, ("dp",)), r"shape 1; pass the ranks of each axis, such as"),
    "axes that are numbers": (lambda c: init_device_mesh(c, (1,), (3,)), r"names \(3,\); pass the name of each axis"),
    "a mesh without a communicator": (lambda c: init_device_mesh((1,), ("dp",), c), "needs a communicator, and got"),
    "an axis by number": (lambda c: init_device_mesh(c, (1,), ("dp",)).size(0), "the mesh has no axis 0; it has dp"),
    "two axes for a size": (
        lambda c: init_device_mesh(c, (1,), ("dp",)).size(("dp",)),
        r"has no axis \('dp',\); it has",
    ),
    "a list as an axis": (lambda c: init_device_mesh(c, (1,), ("dp",)).get_local_rank(["dp"]), r"has no axis \['dp'\]"),
    "None as axes": (lambda c: init_device_mesh(c, (1,), ("dp",))[None], "the mesh has no axis None; it has dp"),
    "a dict as configuration": (lambda c: GPT({"n_layer": 2}), r"GPT got .* as its configuration; pass a GPTConfig\("),
    "the class as configuration": (lambda c: Llama(LlamaConfig), r"Llama got .*; pass a LlamaConfig\("),
    "no heads": (lambda c: GPTConfig(n_head=0), "n_head=0; it must be a whole number of at least 1"),
    "half a width": (lambda c: GPTConfig(n_embd=64.5), "n_embd=64.5; it must be a whole number of at least 1"),
    "no heads of a llama": (lambda c: LlamaConfig(num_attention_heads=0), "num_attention_heads=0; it must be a whole"),
    "no module to split": (lambda c: parallelize_module(None, c, {}), "of type NoneType as its module; pass the model"),
    "two arrays": (lambda c: matmul(np.ones((1, 1)), np.ones((1, 1))), r"ndarray, and needs a Tensor; pass Tensor\("),
    "fewer than no images": (lambda c: glyphs(-1), "samples=-1; it must be a whole number of at least 1"),
    "no name of a dataset": (lambda c: load_dataset(3), r"load_dataset\(3\); pass the name of a dataset"),
    "an array for an operation": (lambda c: gelu(np.ones(2)), r"of type ndarray, and needs a Tensor; pass Tensor\("),
    "a number for an operation": (lambda c: gelu(3), "an operation got a value of type int, and needs a Tensor"),
    "an array for one without float32": (lambda c: relu(np.ones(2)), "a value of type ndarray, and needs a Tensor"),
    "a name as a summand": (lambda c: Tensor([1.0]) + "x", "an operation got 'x', and needs a Tensor"),
    "nothing as a divisor": (lambda c: Tensor([1.0]) / None, "operation got a value of type NoneType, and needs"),
    "a name as a power": (lambda c: Tensor([1.0]) ** "x", "pow: the exponent is 'x'; it must be a number"),
    "a name as a shape": (lambda c: Tensor([1.0]).reshape("x"), "reshape: 'x' is not a shape; pass whole numbers"),
    "a name as an axis": (lambda c: Tensor([1.0]).sum("x"), r"sum: axis 'x' does not exist in shape \(1,\)"),
    "names as axes": (lambda c: Tensor([1.0]).transpose("x"), r"axes \('x',\) are not a permutation"),
    "no dtype": (lambda c: Tensor([1.0]).astype("x"), "astype: 'x' is not a dtype; pass one such as np.float32"),
    "a name as a tensor": (lambda c: Tensor("x"), r"Tensor\('x'\); pass an array, or numbers in lists of equal"),
    "a ragged tensor": (lambda c: Tensor([[1], [1, 2]]), "pass an array, or numbers in lists of equal lengths"),
    "half a feature": (lambda c: Linear(4.5, 4), "in_features=4.5; it must be a whole number of at least 0"),
    "a name as a number of words": (lambda c: Embedding("x", 4), "num_embeddings='x'; it must be a whole number"),
    "half a norm": (lambda c: LayerNorm(1.5), "features=1.5; it must be a whole number"),
    "a name as a width": (lambda c: MixtureOfExperts("x", 4, 2), "width='x'; it must be a whole number of at least 1"),
    "a number as a device": (lambda c: MLP([2, 2]).to(3), r"to\(3\): no device; pass 'cpu', 'cuda' or a Device"),
    "a number of operations": (lambda c: c.compute(3), r"rank 0: compute\(3, seconds=0.0\); pass \(FLOPs, bytes\) of"),
    "a name as seconds": (lambda c: c.compute(seconds="x"), r"compute\(\(\), seconds='x'\); pass .* number of seconds"),
    "text as seconds": (lambda c: c.compute(seconds="1"), r"compute\(\(\), seconds='1'\); pass .* number of seconds"),
    "text as FLOPs": (
        lambda c: c.compute([("1", 2)]),
        r"compute\(\[\('1', 2\)\], seconds=0.0\); pass \(FLOPs, bytes\)",
    ),
    "no function for a stream": (lambda c: c.run_async(3), r"rank 0: run_async\(3\); pass a function without"),
    "a list of algorithms": (lambda c: all_reduce(c, np.ones(2), algorithm=["ring"]), "unknown all_reduce algorithm"),
    "a list of schedules": (lambda c: get_schedule(["1f1b"]), "unknown schedule \"\\['1f1b'\\]\""),
    "a name as a rank to kill": (lambda c: c.world.kill("x"), r"kill names rank 'x', but the world has ranks 0\.\.0"),
    "half a message": (lambda c: c.world.kill(0, after_messages="x"), "after 'x' messages; it must be at least 0"),
    "a purpose by number": (lambda c: purpose(3), "unknown message purpose 3; one of gradient_reduce"),
    "a name of a length": (lambda c: chunk_sizes("x", 2), r"chunk_sizes\('x', 2\); pass two whole numbers"),
    "a model as parameters": (lambda c: FlatParameters(MLP([2, 2])), r"FlatParameters got a value of type MLP.*\(\)"),
    "numbers as parameters": (lambda c: FlatParameters([3]), "FlatParameters got a value of type int among its"),
    "a model as flat": (lambda c: make_buckets(MLP([2, 2]), 1), r"make_buckets got a value of type MLP; pass a FlatP"),
    "shards of a number": (lambda c: shards_of(3), r"int is not sharded; call fully_shard\(module, mesh=comm\) first"),
    "a plan by number": (lambda c: parallelize_module(MLP([2, 2]), c, 3), "a plan of tensor parallelism is a dict"),
    "a ring of a number": (lambda c: RingAttention(3, 4), "RingAttention needs a communicator, and got a value of"),
    "a region of a number": (
        lambda c: copy_to_tensor_parallel_region(Tensor([1.0]), 3),
        "copy_to_tensor_parallel_region needs a communicator, and got a value of type int",
    ),
    "logits in an array": (
        lambda c: vocab_parallel_cross_entropy(np.ones((1, 2)), [0], comm=c, vocab_size=2),
        "the logits are a value of type ndarray",
    ),
    "axes of no mesh": (lambda c: gradient_axes(3), "gradient_axes got a value of type int; pass the mesh of"),
    "a name as a sequence": (lambda c: sequence_positions("x", 0, 2), "length='x'; it must be a whole number"),
    "a number as ranks that wait": (lambda c: barrier(3), "barrier needs a communicator, and got a value of type int"),
    "one stage": (
        lambda c: split_model(MLP([2, 2, 2]), 2, 1),
        r"the numbers of stages are 1; pass a list, such as \[1\]",
    ),
    "a name as tokens": (lambda c: expert_capacity("a", 2, 1, 1.0), "tokens='a'; it must be a whole number"),
    "a name as a factor": (lambda c: expert_capacity(4, 2, 1, "a"), "factor='a'; it must be a finite number above 0"),
    "a name as steps": (lambda c: TrainConfig(steps="a"), "--steps 'a': input should be a valid integer"),
    "a setting by another name": (
        lambda c: TrainConfig(stepz=3),
        r"unknown setting 'stepz' \(did you mean 'steps'\?\)",
    ),
    "no plan": (lambda c: load_plan(None), r"load_plan\(None\); pass the name of a schedule, FILE.csv or FILE.py"),
    "a page of nothing": (lambda c: page([], {}), "a page of no traces; pass those of a run"),
    "an unknown setting": (lambda c: Muon(MLP([2, 2]).parameters(), nosuch=1), "Muon has no argument 'nosuch'; of"),
}


@each("call", CALLS.values(), ids=list(CALLS))
def test_an_argument_of_a_wrong_kind_is_refused_in_one_sentence(call):
    made, words = call
    with pytest.raises(MinidistError, match=words):
        SimWorld(1).run(made)
