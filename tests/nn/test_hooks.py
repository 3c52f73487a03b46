"""Forward hooks behave as PyTorch's: what they are called with, what they may replace, in which order they run."""

import numpy as np
import pytest

from minidist.core.autograd import AutogradError, Tensor, cross_entropy, no_grad
from minidist.core.nn import GPT, MLP, Block, GPTConfig, Linear, Module
from minidist.nn import Llama, LlamaConfig
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


ARRAYS = {
    "a forward hook": lambda model: model.layers[0].register_forward_hook(lambda module, args, output: output.data * 2),
    "a hook with a name": lambda model: model.layers[0].register_forward_hook(doubles),
    "a pre-hook": lambda model: model.layers[1].register_forward_pre_hook(lambda module, args: args[0].data),
    "a forward": lambda model: setattr(model.layers[1], "forward", lambda x: x.data[:, :2] * 1.0),
}


def doubles(module, args, output):
    return output.data * 2


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_in_the_place_of_a_tensor_is_refused_where_it_is_made(kind):
    """No gradient gets through it, and a parameter that has none is reported far from here, or not at all."""
    model = MLP([3, 4, 2]).initialize(0)
    ARRAYS[kind](model)
    x = Tensor(np.ones((2, 3), np.float32))
    layer = 0 if kind in ("a forward hook", "a hook with a name") else 1
    words = {"a forward": "forward", "a hook with a name": "the forward hook doubles"}
    words = words.get(kind, r"the forward .*hook .*")
    with pytest.raises(AutogradError, match=rf"^{words} of Linear 'layers.{layer}' returns an array where a Tensor"):
        model(x)
    with no_grad():
        model(x)


@pytest.mark.parametrize("hook", [False, True])
def test_a_first_module_that_returns_an_array_is_refused_while_it_trains(hook):
    """Its input needs no gradient, the modules after it have one, and the loss says nothing of it."""
    model = MLP([3, 4, 2]).initialize(0)
    first, x = model.layers[0], np.ones((2, 3), np.float32)
    right = first.forward
    first.forward = lambda x: right(x).data
    if hook:
        first.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(
        AutogradError, match=r"^forward of Linear 'layers.0' returns an array, so its parameter 'weight'"
    ):
        model(x)

    # Where nothing is trained, arrays are as good.
    with no_grad():
        model(x)
    model.eval()(x)
    model.train()
    for parameter in first.parameters():
        parameter.requires_grad = False
    model(x).sum().backward()
    first.forward = lambda x: np.argmax(right(x).data, axis=1)
    first(x)


def test_an_array_in_another_place_is_passed_on():
    """Masks and indices are arrays; a detached tensor is meant to end the graph."""
    model = MLP([3, 4, 2]).initialize(0)
    model.layers[0].register_forward_hook(lambda module, args, output: output.detach())
    model.layers[1].register_forward_pre_hook(lambda module, args: (*args, np.ones(2)))
    model.layers[1].forward = lambda x, mask: (x, mask)
    x, mask = model.layers[1](Tensor(np.ones((2, 4)), requires_grad=True))
    assert isinstance(x, Tensor)
    assert isinstance(mask, np.ndarray)


def test_logits_that_are_an_array_are_refused():
    with pytest.raises(AutogradError, match=r"^cross_entropy: the logits are a value of type ndarray"):
        cross_entropy(np.ones((2, 3)), np.zeros(2, int))
