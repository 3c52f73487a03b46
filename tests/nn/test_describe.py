"""print(model): a tree with shapes and counts, also of wrapped and sharded models; modules in every container."""

import re

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.autograd import Parameter, Tensor
from minidist.core.base.errors import UsageError
from minidist.core.nn import GPT, MLP, GPTConfig, Linear, Module
from minidist.core.parallel.fsdp import fully_shard
from minidist.core.parallel.model_parallel import apply_tensor_parallel
from minidist.nn import Dropout, ModuleDict, ModuleList
from minidist.optim import SGD
from minidist.parallel.data_parallel import DistributedDataParallel


def test_the_tree_has_shapes_and_counts():
    assert repr(MLP([6, 5, 5, 3])) == (
        "MLP(  # 83 parameters\n"
        "  (layers.0): Linear(activation='relu', weight (5, 6), bias (5,))  # 35\n"
        "  (layers.1): Linear(activation='relu', weight (5, 5), bias (5,))  # 30\n"
        "  (layers.2): Linear(weight (3, 5), bias (3,))  # 18\n"
        ")"
    )


def test_alike_layers_are_one_line_and_the_counts_add_up():
    model = GPT(GPTConfig(11, 5, 12, 3, 2), dtype=np.float64)
    text = repr(model)
    assert "(h.0-2): 3 x Block(  # 1,884" in text
    assert "(lm_head): TiedHead(weight (11, 12) float64 tied)" in text
    assert "(drop): Dropout(p=0.0)" in text
    total = sum(p.size for p in model.parameters())
    assert text.startswith(f"GPT(  # {total:,} parameters\n")
    transformer = re.search(r"\(transformer\): Transformer\(  # ([\d,]+)", text)[1]
    assert int(transformer.replace(",", "")) == total


def test_frozen_wrapped_sharded_and_split_models_say_so():
    def program(comm):
        model = MLP([6, 4, 3])
        model.layers[0].bias.requires_grad = False
        wrapped = repr(DistributedDataParallel(model, comm))
        sharded = repr(fully_shard(MLP([6, 4, 3]), mesh=comm))
        split = repr(apply_tensor_parallel(MLP([6, 4, 3]), comm))
        return wrapped, sharded, split

    wrapped, sharded, split = SimWorld(2).run(program)[0]
    assert wrapped.startswith("DistributedDataParallel(2 replicas  # 43 parameters\n  (module): MLP(  # 43\n")
    assert "bias (4,) frozen" in wrapped
    assert "weight (4, 6) in 2 shards" in sharded
    assert "weight (2, 6) of (4, 6) over tp" in split


# --- where modules are found ---


class Heads(Module):
    def __init__(self, heads):
        self.heads = heads
        self.initialize(3)

    def forward(self, x):
        first, second = self.heads.values() if hasattr(self.heads, "values") else self.heads
        return first(x).sum() + second(x).sum()


@pytest.mark.parametrize(
    ("heads", "names"),
    [
        (lambda a, b: {"a": a, "b": b}, "ab"),
        (lambda a, b: [a, b], "01"),
        (lambda a, b: ModuleList([a]).append(b), "01"),
        (lambda a, b: ModuleDict({"a": a, "b": b}), "ab"),
    ],
)
def test_modules_in_lists_and_dicts_are_found_and_named(heads, names):
    model = Heads(heads(Linear(6, 3), Linear(6, 3)))
    assert [name for name, _ in model.named_parameters()] == [
        f"heads.{name}.{kind}" for name in names for kind in ("weight", "bias")
    ]
    assert all(p.name == name for name, p in model.named_parameters())
    model(Tensor(np.ones((2, 6), np.float32))).backward()
    assert all(p.grad is not None for p in model.parameters())
    first, second = (p for p in model.parameters() if p.name.endswith("weight"))
    assert not np.array_equal(first.data, second.data)
    model.load_state_dict(model.state_dict())


def test_modules_in_nested_containers_are_found_and_those_in_sets_refused():
    class Nested(Module):
        def __init__(self):
            self.rows = [[Linear(2, 2), Dropout(0.5)], {"x": (Linear(2, 2),)}]

    assert [name for name, _ in Nested().named_modules()] == ["", "rows.0.0", "rows.0.1", "rows.1.x.0"]
    model = Nested()
    model.rows = {Linear(2, 2)}
    with pytest.raises(UsageError, match=r"the modules in the set 'rows' have no order.*put them into a list"):
        list(model.parameters())


def test_a_hook_that_is_a_module_is_no_part_of_the_model():
    model = MLP([3, 2])
    model.register_forward_hook(lambda *_: None)
    model.register_forward_pre_hook(Linear(3, 3), with_kwargs=True)
    assert len(list(model.parameters())) == 2


def test_the_container_has_the_methods_of_a_list_or_dict():
    layers, heads = ModuleList([Linear(2, 2)]), ModuleDict()
    heads["x"] = layers[0]
    assert (len(layers), len(heads), "x" in heads, list(heads), list(layers)) == (1, 1, True, ["x"], [layers[0]])
    assert [list(heads.keys()), list(heads.values()), list(heads.items())] == [["x"], [layers[0]], [("x", layers[0])]]


def test_two_layers_of_one_name_are_refused_with_the_remedy():
    class Net(Module):
        def __init__(self, named=False):
            self.first, self.second = Linear(4, 4), Linear(4, 4)
            if named:
                self.initialize(1)

    with pytest.raises(UsageError, match=r"two parameters are called 'weight'.*initialize\(seed\) at the end of"):
        SGD(Net().parameters())
    SGD(Net(named=True).parameters())
    SGD([Parameter(np.zeros(2)), Parameter(np.zeros(2))])  # without names they are numbered
