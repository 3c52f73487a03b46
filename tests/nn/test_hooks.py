"""Forward hooks behave as PyTorch's: what they are called with, what they may replace, in which order they run."""

import numpy as np
import pytest

from minidist.autograd import Tensor
from minidist.base.errors import UsageError
from minidist.nn import GPT, MLP, Block, GPTConfig, Linear, Llama, LlamaConfig, Module
from minidist.nn.llama import LlamaBlock


class Affine(Module):
    def forward(self, x, scale=1.0):
        return scale * x + 1


def test_a_hook_that_returns_none_changes_nothing_and_sees_arguments_and_output():
    module, seen = Affine(), []
    module.register_forward_pre_hook(lambda *given: seen.append(given))
    module.register_forward_pre_hook(lambda *given: seen.append(given), with_kwargs=True)
    module.register_forward_hook(lambda *given: seen.append(given))
    module.register_forward_hook(lambda *given: seen.append(given), with_kwargs=True)

    assert module(2.0, scale=3.0) == 7.0

    arguments, keywords = (2.0,), {"scale": 3.0}
    assert seen == [
        (module, arguments),
        (module, arguments, keywords),
        (module, arguments, 7.0),
        (module, arguments, keywords, 7.0),
    ]


def test_pre_hooks_replace_arguments_and_forward_hooks_the_output():
    module = Affine()
    module.register_forward_pre_hook(lambda _, args: args[0] * 10)  # one value: the only argument
    module.register_forward_pre_hook(lambda _, args: (args[0], 2.0))
    module.register_forward_pre_hook(lambda _, args, kwargs: (args[:1], {"scale": args[1] + 1}), with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: (args, output))

    assert module(1.0) == ((10.0,), 31.0)


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
def test_hooks_run_in_the_order_of_registration_and_prepend_goes_first(kind):
    module, order = Affine(), []
    register = getattr(module, kind)
    register(lambda *_: order.append("first"))
    register(lambda *_: order.append("second"))
    register(lambda *_: order.append("prepended"), prepend=True)
    module(1.0)
    assert order == ["prepended", "first", "second"]


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
def test_a_removed_hook_runs_no_more_and_hooks_belong_to_one_instance(kind):
    module, other, calls = Affine(), Affine(), []
    handle = getattr(module, kind)(lambda *_: calls.append(1))
    getattr(module, kind)(lambda *_: calls.append(2))
    other(1.0)
    assert calls == []
    module(1.0)
    handle.remove()
    handle.remove()
    module(1.0)
    assert calls == [1, 2, 2]


def test_a_hook_may_remove_itself_while_it_runs():
    module, calls = Affine(), []

    def once(*_):
        calls.append(1)
        handle.remove()

    handle = module.register_forward_hook(once)
    module(1.0), module(1.0)
    assert calls == [1]


def test_hooks_are_no_part_of_the_tree():
    model = MLP([3, 4, 2])
    names = [name for name, _ in model.named_parameters()]
    model.register_forward_hook(lambda *_: None)
    model.layers[0].register_forward_pre_hook(lambda *_: None)
    assert [name for name, _ in model.named_parameters()] == names
    assert model(np.ones((1, 3), np.float32)).shape == (1, 2)


def test_blocks_are_the_repeated_layers():
    mlp = MLP([3, 4, 2])
    gpt = GPT(GPTConfig(vocab_size=11, n_positions=4, n_embd=8, n_layer=2, n_head=2))
    llama = Llama(LlamaConfig(11, 8, 16, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=4))
    assert [type(block) for block in mlp.blocks] == [Linear, Linear]
    assert [block.name for block in gpt.blocks] == ["transformer.h.0", "transformer.h.1"]
    assert [block.name for block in llama.blocks] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert {type(block) for block in gpt.blocks} == {Block}
    assert {type(block) for block in llama.blocks} == {LlamaBlock}


def test_a_forward_hook_that_returns_an_array_is_named():
    module = Affine()

    def normalised(module, args, output):
        return output.data / 2

    module.register_forward_hook(normalised)
    words = r"a forward hook of Affine, .*normalised, returned an array in place of a Tensor"
    with pytest.raises(UsageError, match=words):
        module(Tensor(np.ones((1, 3), np.float32)))
