"""The optimizers against their papers, against PyTorch, and against themselves on any cut of the parameters."""

import copy
import pickle
from itertools import pairwise

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.base.memory import account_memory
from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError
from minidist.core.nn import MLP
from minidist.core.nn.flat import FlatParameters
from minidist.core.optim import AdamW, FlatSlice, Group, flat_slices
from minidist.core.optim.optimizer import BLOCK
from minidist.optim import LAMB, LARS, NO_DECAY, SGD, Adagrad, Muon, ParameterSlice, RMSProp, is_bias_or_norm
from minidist.optim.adam import Adam
from tests.cases import each
from tests.optim import papers

CASES = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (Adagrad, {"lr": 0.1}),
    (Adagrad, {"lr": 0.1, "lr_decay": 0.3, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3}),
    (RMSProp, {"lr": 0.01}),
    (RMSProp, {"lr": 0.01, "alpha": 0.8, "eps": 1e-3, "weight_decay": 0.1, "momentum": 0.9}),
    (RMSProp, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    (Adam, {"lr": 0.01}),
    (Adam, {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    (AdamW, {"lr": 0.01}),
    (AdamW, {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3}),
]
all_cases = pytest.mark.parametrize(("optimizer", "settings"), CASES, ids=lambda value: getattr(value, "__name__", ""))
STEPS = 5


def numbers(size, seed=0, dtype=np.float64):
    """Start values and a list of gradients for each step."""
    generator = np.random.default_rng(seed)
    return generator.standard_normal(size).astype(dtype), generator.standard_normal((STEPS, size)).astype(dtype)


def train(optimizer, settings, start, gradients, cuts=()):
    """Parameters and state after all steps, with the parameter cut into slices at `cuts`."""
    data = start.copy()
    edges = [0, *sorted(cuts), data.size]
    slices = [ParameterSlice(data[a:b], None, f"{a:06d}") for a, b in pairwise(edges)]
    chosen = optimizer(slices, **settings)
    for gradient in gradients:
        for piece, (a, b) in zip(slices, pairwise(edges), strict=True):
            piece.grad = gradient[a:b]
        chosen.step()
    keys = next(iter(chosen.state.values())).keys()
    return data, {key: np.concatenate([chosen.state[piece.name][key] for piece in slices]) for key in keys}


@all_cases
def test_equals_the_algorithm_of_the_paper(optimizer, settings):
    start, gradients = numbers(7)
    data, _ = train(optimizer, settings, start, gradients)
    for i, first in enumerate(start.tolist()):
        paper = getattr(papers, optimizer.__name__.lower())(first, **settings)
        next(paper)
        for gradient in gradients:
            value = paper.send(float(gradient[i]))
        assert abs(data[i] - value) <= 1e-14 * max(1, abs(value))


@pytest.mark.peers
@all_cases
def test_equals_pytorch(optimizer, settings):
    """Parameters and every state, by PyTorch's names, in float64."""
    torch = pytest.importorskip("torch")
    start, gradients = numbers(50)
    data, state = train(optimizer, settings, start, gradients)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    peer = getattr(torch.optim, optimizer.__name__.replace("RMSProp", "RMSprop"))([parameter], **settings)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        peer.step()
    np.testing.assert_allclose(data, parameter.detach().numpy(), rtol=1e-12, atol=1e-12)
    for key, value in state.items():
        np.testing.assert_allclose(value, peer.state[parameter][key].numpy(), rtol=1e-12, atol=1e-12)


@all_cases
@hypothesis.settings(max_examples=30)
@given(st.data())
def test_shards_give_the_bits_of_the_whole(optimizer, settings, data):
    """In float32, for any cut points and any size: what ZeRO relies on."""
    size = data.draw(st.integers(1, 300), label="size")
    cuts = data.draw(st.sets(st.integers(1, size), max_size=5), label="cuts") - {size}
    start, gradients = numbers(size, seed=size, dtype=np.float32)
    whole, whole_state = train(optimizer, settings, start, gradients)
    sharded, sharded_state = train(optimizer, settings, start, gradients, cuts)
    np.testing.assert_array_equal(whole, sharded)
    for key, value in whole_state.items():
        np.testing.assert_array_equal(value, sharded_state[key])


@all_cases
def test_blocks_do_not_change_bits(optimizer, settings, monkeypatch):
    start, gradients = numbers(1000, dtype=np.float32)
    whole, _ = train(optimizer, settings, start, gradients)
    monkeypatch.setattr("minidist.core.optim.optimizer.BLOCK", 64)
    blocks, _ = train(optimizer, settings, start, gradients)
    np.testing.assert_array_equal(whole, blocks)


@all_cases
def test_float32_stays_float32_and_gradients_stay(optimizer, settings):
    """A rate that is a NumPy float64 must not promote weights that are then received into a float32 buffer."""
    start, gradients = numbers(10, dtype=np.float32)
    kept = gradients.copy()
    plain, _ = train(optimizer, settings, start, gradients)
    settings = {name: np.float64(value) if isinstance(value, float) else value for name, value in settings.items()}
    data, state = train(optimizer, settings, start, gradients)
    np.testing.assert_array_equal(data, plain)  # bits: nothing was computed in float64 either
    assert data.dtype == np.float32
    assert all(value.dtype == np.float32 for value in state.values())
    np.testing.assert_array_equal(gradients, kept)


def test_one_counter_for_all_parameters():
    """Museum bug 6: with three parameters a counter advanced by each would be at 3 after one step."""
    slices = [ParameterSlice(np.zeros(2), np.ones(2), name) for name in "abc"]
    optimizer = Adam(slices, lr=0.5, eps=1e-300)
    optimizer.step()
    assert optimizer.step_count == 1
    for piece in slices:
        np.testing.assert_allclose(piece.data, -0.5, rtol=1e-15)  # Adam's first step is lr times the sign


# Which of four parameters have a gradient, step by step: late, unfrozen, now and then, and a step in which none has.
LATE = [(1, 0, 0, 1), (0, 0, 0, 0), (1, 0, 1, 1), (0, 1, 1, 0), (1, 1, 0, 1)]


@each("form", ["parameters", "flat", "loaded"])
@each(
    ("optimizer", "settings"), [*CASES, (LAMB, {"lr": 0.01}), (LARS, {"lr": 0.1, "momentum": 0.9}), (Muon, {"lr": 0.1})]
)
def test_a_parameter_is_stepped_by_its_own_gradients_and_count_alone(optimizer, settings, form):
    """Adam's correction of a parameter that is used late is that of a first step, as in PyTorch."""

    def fresh(seed):
        return Parameter(np.random.default_rng(seed).standard_normal((3, 2)), name=f"w{seed}")

    def step(chosen, parameters, step, flat=None):
        for parameter in parameters:
            parameter.zero_grad()
            if LATE[step][int(parameter.name[1:])]:
                parameter.accumulate(np.random.default_rng(100 * step + int(parameter.name[1:])).random((3, 2)))
        if flat is not None and step % 2:
            assert not flat.grad[flat.numel :].size  # whoever reads the whole gradient, to clip it, makes zeros of none
        chosen.step()

    together = [fresh(i) for i in range(4)]
    flat = None if form == "parameters" else FlatParameters(together)
    chosen = optimizer(flat or together, **settings)
    for i in range(STEPS):
        step(chosen, together, i, flat)
        if form == "loaded":
            saved, chosen = chosen.state_dict(), optimizer(flat, **settings)
            chosen.load_state_dict(saved)
    assert chosen.step_count == 4
    for i in range(4):
        alone = fresh(i)
        own = optimizer([alone], **settings)
        for j in range(STEPS):
            step(own, [alone], j)
        np.testing.assert_array_equal(together[i].data, alone.data)
        assert own.state.get(alone.name, {}).keys() == chosen.state.get(alone.name, {}).keys()
        assert chosen.counts.get(alone.name, 4) == own.step_count == sum(row[i] for row in LATE)


def test_a_late_first_step_of_adam_is_as_long_as_any_first_step():
    """Closed form: lr times the sign of the gradient, after 1,000 steps of another and one before any backward."""
    late, other = (Parameter(np.zeros(3), name=name) for name in ("late", "other"))
    flat = FlatParameters([late, other])
    optimizer = Adam(flat, lr=0.5, eps=1e-300)
    optimizer.step()
    assert optimizer.step_count == flat.version == 0
    for _ in range(1000):
        other.grad = np.ones(3)
        optimizer.step()
    np.testing.assert_array_equal(late.data, 0.0)
    late.grad = np.full(3, -7.0)
    optimizer.step()
    np.testing.assert_allclose(late.data, 0.5, rtol=1e-14)


def test_equal_counts_stay_one_update_and_old_states_have_one_count():
    """What is updated as one array stays so; a saved state without counts is that of parameters with equal ones."""
    _, flat = model()
    optimizer = Adam(flat, lr=0.1)
    for _ in range(3):
        flat.grad[...] = 1
        optimizer.step()
    assert [len(run.pieces) for run in optimizer._runs] == [1, 2]  # a frozen parameter lies between them
    saved = optimizer.state_dict()
    assert list(saved) == ["step", "state"]
    again = Adam(flat, lr=0.1)
    again.load_state_dict(saved)
    assert [(len(run.pieces), run.count) for run in again._runs] == [(1, 3), (2, 3)]
    with pytest.raises(UsageError, match=r"optimizer state of 'head.weight' is missing; that of 'ln_f.weight' is"):
        again.load_state_dict({"step": 3, "state": {k: a for k, a in saved["state"].items() if k != "head.weight"}})
    with pytest.raises(UsageError, match=r"optimizer state of 'hed.weight': no such parameter"):
        again.load_state_dict({**saved, "counts": {"hed.weight": 1}})


@all_cases
def test_a_saved_state_continues_with_the_same_bits(optimizer, settings):
    start, gradients = numbers(20, dtype=np.float32)
    straight, _ = train(optimizer, settings, start, gradients)
    piece = ParameterSlice(start.copy(), None, "w")
    saved = {"step": 0, "state": {}}
    for gradient in gradients:
        chosen = optimizer([piece], **settings)
        chosen.load_state_dict(saved)
        piece.grad = gradient
        chosen.step()
        saved = chosen.state_dict()
    assert saved["step"] == STEPS
    np.testing.assert_array_equal(piece.data, straight)


def model():
    """A flat unit of four parameters, the second one frozen."""
    parameters = [
        Parameter(np.full((2, 3), 1.0, np.float32), name="h.0.fc.weight"),
        Parameter(np.full(3, 2.0, np.float32), name="h.0.fc.bias", requires_grad=False),
        Parameter(np.full(4, 3.0, np.float32), name="ln_f.weight"),
        Parameter(np.full(5, 4.0, np.float32), name="head.weight"),
    ]
    return parameters, FlatParameters(parameters)


def test_flat_parameters_are_updated_by_name_and_frozen_ones_are_not():
    parameters, flat = model()
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.accumulate(np.ones(parameter.shape, np.float32))
    head = Group(lambda name: "head" in name, lr_scale=2)
    optimizer = AdamW(flat, lr=0.25, weight_decay=0.5, groups=[NO_DECAY, head])
    optimizer.step()
    assert flat.version == 1
    assert list(optimizer.state) == ["h.0.fc.weight", "ln_f.weight", "head.weight"]
    assert optimizer.state["h.0.fc.weight"]["exp_avg"].shape == (6,)
    np.testing.assert_array_equal(parameters[1].data, 2.0)
    np.testing.assert_allclose(parameters[0].data, 1 - 0.25 * 0.5 * 1 - 0.25, rtol=1e-6)
    np.testing.assert_allclose(parameters[2].data, 3 - 0.25, rtol=1e-6)  # not decayed
    np.testing.assert_allclose(parameters[3].data, 4 - 0.5 * 0.5 * 4 - 0.5, rtol=1e-6)  # twice the rate
    optimizer.lr_factor = 0.0
    before = flat.data.copy()
    optimizer.step()
    np.testing.assert_array_equal(flat.data, before)


def test_slices_of_different_units_stay_apart():
    """The second slice begins where the first one ends, but in another unit."""
    (_, one), (_, other) = model(), model()
    for flat in (one, other):
        flat.grad[:] = 1
    other_slices = [FlatSlice(other, 6, 8, "other")]
    SGD([*flat_slices(one, 0, 6), *other_slices], lr=1.0).step()
    np.testing.assert_array_equal(one.data, [0] * 6 + [2] * 3 + [3] * 4 + [4] * 5)
    np.testing.assert_array_equal(other.data, [1] * 6 + [1] * 2 + [2] + [3] * 4 + [4] * 5)


def test_a_rebound_array_is_the_one_updated():
    """Weight stashing binds a copy and keeps the older array: the optimizer must not remember that one."""
    _, flat = model()
    optimizer = SGD(flat, lr=1.0)
    older = flat.data
    flat.bind(older.copy())
    flat.grad[:] = 1
    optimizer.step()
    assert older[0] == 1.0
    assert flat.data[0] == 0.0


def test_state_and_workspace_are_accounted():
    """Two arrays of state a parameter, and temporaries of one block however large the parameter."""
    size = 3 * BLOCK
    piece = ParameterSlice(np.zeros(size, np.float32), np.ones(size, np.float32), "w")
    with account_memory() as account:
        optimizer = AdamW([piece])
        assert account.current == 0  # nothing before the first step
        optimizer.step()
    assert account.peak_by_purpose == {"optimizer": 2 * 4 * size, "workspace": 4 * BLOCK}


def test_parameters_may_be_given_directly_and_one_without_gradient_is_left_alone():
    used = Parameter(np.ones((2, 2)), name="used")
    unused = Parameter(np.ones(2), name="unused")
    used.accumulate(np.ones((2, 2)))
    optimizer = SGD([used, unused], lr=0.5, momentum=0.9)
    optimizer.step()
    np.testing.assert_array_equal(used.data, 0.5)
    np.testing.assert_array_equal(unused.data, 1.0)
    assert (used.version, unused.version) == (1, 0)
    assert list(optimizer.state) == ["used"]


@each(
    ("name", "expected"),
    [
        ("transformer.h.0.attn.c_attn.bias", True),
        ("transformer.h.11.ln_1.weight", True),
        ("transformer.ln_f.weight", True),
        ("layers.3.norm.weight", True),
        ("layers.3.layer_norm.weight", True),
        ("transformer.wte.weight", False),
        ("transformer.h.0.attn.c_attn.weight", False),
        ("normalizer.biased.weight", False),
    ],
)
def test_what_counts_as_bias_or_norm(name, expected):
    assert is_bias_or_norm(name) is expected


def adam_with_state(names=("weight", "bias"), dtype=np.float32, size=3):
    optimizer = Adam([ParameterSlice(np.zeros(size, dtype), np.ones(size, dtype), name) for name in names])
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (adam_with_state(["weigth", "bias"]), r"'weigth': no such parameter here \(did you mean 'weight'\?\)"),
        (adam_with_state(size=4), r"'exp_avg' of 'weight' is \(4,\) float32; this optimizer needs \(3,\) float32"),
        (adam_with_state(dtype=np.float64), r"is \(3,\) float64"),
    ],
)
def test_a_wrong_state_is_named(saved, message):
    with pytest.raises(UsageError, match=message):
        adam_with_state().load_state_dict(saved.state_dict())


def test_a_state_of_another_optimizer_is_named():
    slices = [ParameterSlice(np.zeros(3), np.ones(3), "weight")]
    other = SGD(slices, momentum=0.9)
    other.step()
    with pytest.raises(UsageError, match=r"has \['momentum_buffer'\]; Adam needs \['exp_avg', 'exp_avg_sq'\]"):
        Adam(slices).load_state_dict(other.state_dict())


def test_wrong_arguments_are_one_sentence():
    same = [ParameterSlice(np.zeros(1), None, "w"), ParameterSlice(np.zeros(1), None, "w")]
    with pytest.raises(UsageError, match="two parameters are called 'w'"):
        SGD(same)
    with pytest.raises(UsageError, match="no trainable parameter"):
        SGD([])
    with pytest.raises(UsageError, match=r"got a value of type int among its parameters; pass model.parameters\(\)"):
        SGD([3])
    with pytest.raises(UsageError, match="Nesterov needs momentum"):
        SGD(same[:1], nesterov=True)
    with pytest.raises(UsageError, match=r"data \(1,\) float64 and gradient \(1,\) float32"):
        SGD([ParameterSlice(np.zeros(1), np.zeros(1, np.float32), "w")]).step()


NAN, INF = float("nan"), float("inf")
BELOW_1 = "it must be at least 0 and below 1"
WRONG = [
    *((kind, {"lr": lr}, "it must be a finite number of at least 0") for kind in (SGD, Adam) for lr in (NAN, INF, -1)),
    *((SGD, {"lr": lr}, "it must be a finite number") for lr in (True, "0.1", None, [0.1], 1j, 10**400)),
    *((SGD, {"momentum": momentum}, BELOW_1) for momentum in (1, 1.5, -0.1, NAN, True)),
    (SGD, {"momentum": 0.9, "dampening": INF}, "it must be a finite number"),
    (SGD, {"momentum": 0.9, "nesterov": "no"}, "it must be True or False"),
    *((RMSProp, {name: 1.0}, BELOW_1) for name in ("alpha", "momentum")),
    *(
        (kind, {"eps": eps}, "it must be a finite number above 0")
        for kind in (Adam, Adagrad, RMSProp)
        for eps in (0, -1)
    ),
    *((kind, {"weight_decay": -0.1}, "of at least 0") for kind in (SGD, Adagrad, RMSProp, Adam, AdamW)),
    (Adam, {"betas": (0.9,)}, "give two numbers"),
    (Adam, {"betas": 0.9}, "give two numbers"),
    (Adam, {"betas": (0.9, 1.0)}, BELOW_1),
    (Adagrad, {"lr_decay": -1}, "of at least 0"),
]


@pytest.mark.parametrize(("kind", "settings", "words"), WRONG, ids=str)
def test_a_wrong_setting_is_one_sentence_when_it_is_given_and_when_it_is_set_later(kind, settings, words):
    slices = [ParameterSlice(np.zeros(1), np.zeros(1), "w")]
    (name, value), *_ = [*settings.items()][::-1]
    with pytest.raises(UsageError, match=rf"^{name}(\[\d\])?=.*; .*{words}"):
        kind(slices, **settings)
    optimizer = kind(slices)
    with pytest.raises(UsageError, match=words):
        setattr(optimizer, name, value)
    optimizer.step()  # by the settings that it had


def test_wrong_settings_of_a_group():
    for wrong in ({"lr_scale": NAN}, {"lr_scale": -1}, {"weight_decay": -1}, {"weight_decay": True}):
        with pytest.raises(UsageError, match="it must be a finite number of at least 0"):
            Group(is_bias_or_norm, **wrong)
    with pytest.raises(UsageError, match="matches='bias'; it must be a function of a parameter's name"):
        Group("bias")


def test_momentum_that_is_set_after_the_first_step():
    for kind, name in ((SGD, "momentum"), (RMSProp, "momentum")):
        optimizer = kind([ParameterSlice(np.zeros(1), np.ones(1), "w")])
        optimizer.step()
        setattr(optimizer, name, 0.9)
        with pytest.raises(
            UsageError, match=r"'w' has no state 'momentum_buffer', which this step needs; .* first step"
        ):
            optimizer.step()


def test_what_a_step_says_of_itself_depends_on_every_setting():
    said = set()
    for settings in ({}, {"betas": (0.8, 0.999)}, {"eps": 1e-7}, {"weight_decay": 0.1}, {"groups": [NO_DECAY]}):
        _, flat = model()
        for _ in range(2):
            optimizer = Adam(flat, lr=0.25, **settings)
            optimizer.lr_factor = 0.5
            flat.grad[...] = 1
            optimizer.step()
            said.add(str(flat.updates))  # twice the same
            assert str(flat.updates).startswith("1 update with lr 0.125, checksum of the settings ")
    assert len(said) == 5
    optimizer.step()
    assert str(flat.updates).startswith("2 updates with lr 0.125")


@each("kind", [SGD, Adagrad, RMSProp, Adam, AdamW, LARS, LAMB, Muon])
@each("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_an_optimizer_is_copied_and_pickled_with_its_model(kind, copied):
    """Together, as a program that sends its state to another process does; both go on with the same bits."""
    model = MLP([4, 3])
    optimizer = kind(list(model.parameters()), lr=0.1)

    def step(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = np.full(parameter.shape, 0.5, np.float32)
        optimizer.step()

    step(model, optimizer)
    other = copied((model, optimizer))
    step(model, optimizer)
    step(*other)
    for one, two in zip(model.parameters(), other[0].parameters(), strict=True):
        assert one.data.tobytes() == two.data.tobytes()
