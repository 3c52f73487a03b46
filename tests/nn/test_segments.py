"""Segments change no bit; how often layers run, and how many bytes are alive at the peak, are closed forms."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.base.coordinates import batch_coordinates
from minidist.base.memory import account_memory
from minidist.core.autograd import Tensor, record
from minidist.core.base.errors import UsageError
from minidist.core.nn import GPT, MLP, GPTConfig
from minidist.nn.llama import Llama, LlamaConfig
from minidist.nn.recompute import recompute
from minidist.nn.revolve import revolve, revolve_advances
from minidist.nn.segments import budgeted_segments, run_segments, sqrt_segments
from tests.cases import each

N = 8  # elements of the chain's tensors
UNIT = 8 * N  # bytes


class Chain:
    """Layers y = sin x that keep their input (as a copy, so that who keeps what is plain) and count their runs."""

    def __init__(self, layers):
        self.runs = [0] * layers
        self.functions = [lambda x, i=i: self.layer(x, i) for i in range(layers)]

    def layer(self, x, number):
        self.runs[number] += 1
        slope = np.cos(x.data)
        return record("sin", np.sin(x.data), [(x, lambda g: g * slope)], saved=(slope,))

    def peak(self, run):
        """(bytes of activations at the peak of backward, gradient of the input), for run(functions, x) -> y."""
        x = Tensor(np.linspace(-1, 1, N), requires_grad=True)
        with account_memory() as account:
            y = run(self.functions, x)
            forward = account.by_purpose["activation"]
            account.peak_by_purpose.clear()
            y.backward(np.ones(N))
            return max(forward, account.peak_by_purpose.get("activation", 0)), x.grad


@each("layers", [1, 2, 3, 5, 9, 16, 17])
def test_square_root_segments_cost_one_more_forward_and_twice_the_root(layers):
    sizes = sqrt_segments(layers)
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    chain, plain = Chain(layers), Chain(layers)
    peak, gradient = chain.peak(lambda f, x: run_segments(f, x, sizes))
    whole, right = plain.peak(lambda f, x: run_segments(f, x, []))
    assert np.array_equal(gradient, right)
    assert chain.runs == [2] * layers
    assert plain.runs == [1] * layers
    assert whole == (layers + 1) * UNIT  # a slope a layer, and the result
    assert peak == peak_of(sizes) * UNIT


def peak_of(sizes, whole=0):
    """While segment j is run again: the inputs of segments 1..j (that of 0 is the caller's), the result, a slope for
    each layer of the segment, the output of its last layer, and what that layer reads. In forward: all inputs and the
    slopes kept.
    """
    replays = [j + 1 + size + 1 + (size > 1) for j, size in enumerate(sizes)]
    return max([max(0, len(sizes) - 1) + whole + 1, *replays])


def smallest_peak(inputs, insides, repeated):
    """Over all cuts in which exactly `repeated` layers at the front run twice: the least budget that is enough."""
    best = float("inf")
    for cuts in product([False, True], repeat=max(0, repeated - 1)):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), repeated] if repeated else [0]
        kept, peak = 0, 0
        for start, stop in pairwise(edges):
            kept += inputs[start]
            peak = max(peak, kept + sum(insides[start:stop]))
        tail = inputs[repeated] if repeated < len(inputs) else 0
        best = min(best, max(peak, kept + tail + sum(insides[repeated:])))
    return best


@given(st.data())
def test_a_budget_is_met_with_as_few_repeated_layers_as_there_can_be(data):
    layers = data.draw(st.integers(1, 7))
    inputs = data.draw(st.lists(st.integers(1, 5), min_size=layers, max_size=layers))
    insides = data.draw(st.lists(st.integers(1, 20), min_size=layers, max_size=layers))
    needed = [smallest_peak(inputs, insides, repeated) for repeated in range(layers + 1)]
    budget = data.draw(st.integers(1, sum(inputs) + sum(insides)))
    if min(needed) > budget:
        with pytest.raises(UsageError, match=f"segments need at least {min(needed)} B"):
            budgeted_segments(inputs, insides, budget)
        return
    sizes, whole = budgeted_segments(inputs, insides, budget)
    assert sum(sizes) + whole == layers
    assert sum(sizes) == next(repeated for repeated, bytes_ in enumerate(needed) if bytes_ <= budget)


@pytest.mark.parametrize("budget", [7, 8, 9, 12, 17])
def test_what_is_alive_stays_within_the_budget(budget):
    chain = Chain(16)
    sizes, whole = budgeted_segments([UNIT] * 16, [UNIT] * 16, budget * UNIT)
    peak, _ = chain.peak(lambda f, x: run_segments(f, x, sizes))
    assert peak == peak_of(sizes, whole) * UNIT
    # In addition to the budget there are the result, an output and a layer's input; the first input is the caller's.
    assert peak <= (budget - 1 + 3) * UNIT
    assert chain.runs == [2] * sum(sizes) + [1] * whole


@each("slots", [1, 2, 3, 5])
@each("layers", [1, 2, 3, 4, 7, 12])
def test_revolve_repeats_as_few_layers_as_the_binomial_says(layers, slots):
    chain, plain = Chain(layers), Chain(layers)
    peak, gradient = chain.peak(lambda f, x: revolve(f, x, slots))
    _, right = plain.peak(lambda f, x: run_segments(f, x, []))
    assert np.array_equal(gradient, right)
    assert sum(chain.runs) == layers + revolve_advances(layers, slots)
    # Kept inputs but the caller's; the slope, the output and the input of the layer that is recorded; the result.
    assert peak <= (slots - 1 + 3 + 1) * UNIT


def test_the_binomial_closed_form_is_the_best_of_all_cuts():
    """Griewank and Walther's recurrence, over every first cut."""
    best = {}
    for layers, slots in product(range(1, 25), range(1, 7)):
        if layers == 1:
            best[layers, slots] = 0
        elif slots == 1:
            best[layers, slots] = layers * (layers - 1) // 2
        else:
            best[layers, slots] = min(m + best[layers - m, slots - 1] + best[m, slots] for m in range(1, layers))
        assert best[layers, slots] == revolve_advances(layers, slots)


# models ---------------------------------------------------------------------------------------------------------------

SHAPE = (3, 8, 16)


def gpt(what):
    return recompute(GPT(GPTConfig(11, 8, 16, 5, 2, 0.1)), what, shape=SHAPE, dtype=np.float32)


def llama(what):
    config = LlamaConfig(11, 16, 24, 5, 2, max_position_embeddings=8)
    return recompute(Llama(config), what, shape=SHAPE, dtype=np.float32)


def gradients(model):
    tokens = np.random.default_rng(0).integers(0, 11, (3, 9))
    with account_memory() as account, batch_coordinates(0, 0):
        loss = model(tokens[:, :-1], tokens[:, 1:], 24.0)
        kept = account.by_purpose["activation"]
        loss.backward()
    return kept, [loss.data, *(parameter.grad for parameter in model.parameters())]


@each("make", [gpt, llama])
@each("what", ["sqrt", "budget:60000", "budget:90000"])
def test_models_train_to_the_same_bits_in_segments_and_keep_less(make, what):
    whole, right = gradients(make("none"))
    kept, got = gradients(make(what))
    assert kept < whole
    for one, other in zip(right, got, strict=True):
        assert np.array_equal(one, other)
    if what.startswith("budget"):
        head = gradients(make("full"))[0] - 5 * 4 * 3 * 8 * 16  # what is kept outside the blocks
        assert kept - head <= int(what.partition(":")[2])


def test_an_mlp_runs_in_segments_too():
    model = recompute(MLP([7] * 10), "sqrt")
    assert model.layers.sizes == [3, 3, 3]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("budget:much", "budget:BYTES"),
        ("budget", "budget:BYTES"),
        ("budget:100", "do not fit into 100 B; segments need at least"),
    ],
)
def test_wrong_choices_are_one_sentence(what, sentence):
    with pytest.raises(UsageError, match=sentence):
        gpt(what)


def test_wrong_chains_are_one_sentence():
    chain = Chain(3)
    with pytest.raises(UsageError, match="a chain of 3"):
        run_segments(chain.functions, Tensor(np.ones(N)), [2, 2])
    with pytest.raises(UsageError, match="with 0 slots"):
        revolve(chain.functions, Tensor(np.ones(N)), 0)
    with pytest.raises(UsageError, match="at least 1"):
        sqrt_segments(0)
    with pytest.raises(UsageError, match="one for each layer"):
        budgeted_segments([1], [], 1)
