"""What an assignment expects and counts, without a submission: numbers by their formulas, and whole sentences."""

import inspect
from itertools import product

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.autograd import Parameter
from minidist.course.lesson.catalogue import exercises
from minidist.course.lesson.exercise import Case, Failure, Least
from minidist.optim import SGD
from tests.cases import each

EVERY = exercises("assignments")
cs336, cse234, llmsys = (
    inspect.getmodule(EVERY[name].adapter) for name in ("cs336.ddp", "cse234.get_info", "llmsys.clock_cycles")
)
CASES = [Case(ranks, size, seed) for ranks, size, seed in product((1, 2, 4), (0, 3), (0, 5))]


# CS336 ----------------------------------------------------------------------------------------------------------------


def descended(case):
    """The weights after gradient descent on the whole batches, with the gradients of a two-layer MLP written out."""
    w1, b1, w2, b2 = cs336.weights(cs336.model_of(case, 0))
    for x, y in cs336.batches(case):
        hidden = np.maximum(x @ w1.T + b1, 0)
        error = 2 * (hidden @ w2.T + b2 - y) / y.size
        inner = error @ w2 * (hidden > 0)
        w1, b1 = w1 - 0.1 * inner.T @ x, b1 - 0.1 * inner.sum(axis=0)
        w2, b2 = w2 - 0.1 * error.T @ hidden, b2 - 0.1 * error.sum(axis=0)
    return w1, b1, w2, b2


@each("case", CASES)
def test_weights_that_are_expected_are_those_of_gradient_descent_written_out(case):
    for got in (cs336.trained(case, SGD, lr=0.1), *EVERY["cs336.ddp"].expected(case)):
        for one, other in zip(got, descended(case), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    assert len(EVERY["cs336.ddp"].expected(case)) == case.ranks


@pytest.mark.parametrize("name", ["cs336.ddp", "cs336.fsdp"])
def test_each_rank_has_two_rows_of_the_batch_and_a_model_of_its_own(name):
    case = Case(3, 1)
    of_rank = [EVERY[name].arguments(case, rank)[:2] for rank in range(3)]
    for step, (x, y) in enumerate(cs336.batches(case)):
        assert [rows[step][0].shape for _, rows in of_rank] == [(2, 3)] * 3
        assert np.array_equal(np.concatenate([rows[step][0] for _, rows in of_rank]), x)
        assert np.array_equal(np.concatenate([rows[step][1] for _, rows in of_rank]), y)
    # Ranks that keep their own model are found, because no two models are equal.
    first = [cs336.weights(model)[-1] for model, *_ in of_rank]
    assert not any(np.array_equal(first[a], first[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def share(case):
    """The elements of the model with a layer that is used twice, and the most that a rank may have of them."""
    h = 2 + case.size
    sizes = [2, 3 * h, h, h * h, h, 2 * h, 2]
    return sum(sizes), (sum(sizes) + case.ranks - 1) // case.ranks + max(sizes)


def trained(optimizer, case):
    return cs336.trained(case, optimizer, cs336.tied_model_of, lr=0.1)


@pytest.mark.parametrize("case", [Case(2, 0), Case(3, 1), Case(4, 3)])
def test_an_optimizer_may_have_a_share_and_the_largest_parameter_and_no_element_more(case):
    whole, most = share(case)
    right = trained(cs336.AdamW, case)
    for rank in range(case.ranks):
        for more in (0, 1):
            answers = [(right, most + more * (other == rank)) for other in range(case.ranks)]
            assert cs336.check_sharded(case, answers) == more * (
                f"rank {rank} gives its optimizer {most + 1} of {whole} elements; with {case.ranks} ranks at most"
                f" {most} are its share"
            )


def test_one_rank_may_have_every_element_however_often():
    case = Case(1, 3)
    whole, _ = share(case)
    assert cs336.check_sharded(case, [(trained(cs336.AdamW, case), 10 * whole)]) == ""


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_weights_that_are_wrong_on_any_rank_are_named_with_the_rank(rank):
    case = Case(3, 1)
    right = trained(cs336.AdamW, case)
    wrong = (*right[:3], right[3] + 1e-6, *right[4:])
    answers = [(wrong if other == rank else right, 0) for other in range(3)]
    assert cs336.check_sharded(case, answers).startswith(f"rank {rank}: result 3: got ")
    assert cs336.apart(Failure("wrong", "", case, answers=[answer[0] for answer in answers]))
    assert not cs336.apart(Failure("wrong", "", case, answers=[wrong] * 3))


def test_the_elements_of_several_optimizers_of_a_rank_are_added():
    counter = [0]
    for size in (3, 4):
        cs336.CountedAdamW([Parameter(np.zeros(size), name="p"), Parameter(np.zeros(1), name="q")], counter, lr=0.1)
    assert counter == [3 + 1 + 4 + 1]


@each("case", CASES)
def test_the_least_that_is_sent_is_that_of_three_steps(case):
    """Between ranks go weights (6 h + 2 numbers for h hidden features, h^2 + h more for the layer that is used twice),
    and of gradients what two rows have: 10."""
    n, h = case.ranks, 2 + case.size
    trained = 6 * h + 2 + h * h + h
    assert share(case)[0] == trained + 2
    expected = {
        "cs336.ddp": 8 * (6 * h + 2 + 2 * 3 * 10),
        "cs336.sharded_optimizer": 8 * 3 * trained,
        "cs336.fsdp": 8 * 3 * (trained + 10),
        "cs336.fsdp_fp16": 2 * 3 * (trained + 10),
    }
    assert {name: EVERY[name].least(case) for name in expected} == {
        name: Least(3 * (n - 1), (n - 1) * nbytes) for name, nbytes in expected.items()
    }


def shards_of(case, rank):
    """What `use_fsdp` says of a rank that has an equal part of each parameter."""
    h = 2 + case.size
    sizes = (2, 3 * h, h, h * h, h, 2 * h, 2)
    return [(size // case.ranks + (rank < size % case.ranks), "float64", n > 0) for n, size in enumerate(sizes)]


@each(
    ("number", "own", "sentence"),
    [
        (3, (4, "float64", True), ""),
        (0, (1, "float64", True), ""),
        (0, (1, "float16", False), "shard 0 is float16 without a gradient; shards are float64, and those of trained"),
        (3, (4, "float64", False), "shard 3 is float64 without a gradient; shards are"),
        (3, (4, "float16", True), "shard 3 is float16 with a gradient; shards are"),
        (5, (14, "float64", True), ""),
        (5, (15, "float64", True), "has in its shards 27 of 34 elements; with 2 ranks at most 26 are its share"),
    ],
)
def test_shards_have_the_dtype_of_the_weights_and_a_gradient_and_are_a_share(number, own, sentence):
    case = Case(2, 1)
    right, forms = trained(SGD, case), [shards_of(case, rank) for rank in range(2)]
    forms[1][number] = own
    problem = cs336.check_fsdp(case, [(right, shards, "float16") for shards in forms], "float16")
    assert problem.startswith("rank 1") == bool(sentence)
    assert sentence in problem


def test_an_output_of_another_dtype_and_flat_shards_are_named():
    case = Case(2, 1)
    right, forms = trained(SGD, case), [shards_of(case, rank) for rank in range(2)]
    answers = [(right, own, dtype) for own, dtype in zip(forms, ("float16", "float64"), strict=True)]
    sentence = "rank 1: the output is float64; with compute_dtype float16 it is float16"
    assert cs336.check_fsdp(case, answers, "float16") == sentence
    sentence = "rank 0: the output is float16; with compute_dtype None it is float64"
    assert cs336.check_fsdp(case, answers, None) == sentence
    flat = [(right, own[:1], "float64") for own in forms]
    sentence = "rank 0: 1 shards, and the model has 7 parameters: one shard for each"
    assert cs336.check_fsdp(case, flat, None) == sentence
    # In float16 weights may differ as its numbers do, and not as a sum differs from a mean.
    for off, dtype, wrong in ((1e-3, "float16", False), (0.05, "float16", True), (1e-6, None, True)):
        moved = [(tuple(array + off for array in right), own, dtype or "float64") for own in forms]
        assert bool(cs336.check_fsdp(case, moved, dtype)) == wrong


# CSE 234 --------------------------------------------------------------------------------------------------------------


def test_operations_take_turns_and_each_is_folded_by_its_own_function():
    exercise, fold = EVERY["cse234.myAllreduce"], {"sum": sum, "min": min, "max": max}
    seen = set()
    for case in (Case(3, size, seed) for size in (1, 4, 5) for seed in (0, 1, 2)):
        given = [exercise.arguments(case, rank) for rank in range(3)]
        (op,) = {op for _, op in given}
        seen.add(op)
        assert op == ["sum", "min", "max"][(case.size + case.seed) % 3]
        wanted = [fold[op](column) for column in zip(*(array.tolist() for array, _ in given), strict=True)]
        assert [answer.tolist() for answer in exercise.expected(case)] == [wanted] * 3
    assert seen == {"sum", "min", "max"}


@pytest.mark.parametrize(("ranks", "size"), [(1, 3), (3, 2), (4, 1)])
def test_rank_r_receives_the_r_th_block_of_every_rank(ranks, size):
    case = Case(ranks, size)
    exercise = EVERY["cse234.myAlltoall"]
    sent = [exercise.arguments(case, rank)[0] for rank in range(ranks)]
    for rank, got in enumerate(exercise.expected(case)):
        assert got.tolist() == [sent[s][rank * size + i] for s in range(ranks) for i in range(size)]
    # A rank's own block does not travel; a message for each other rank on its way out and on its way in.
    assert exercise.least(case) == Least(2 * (ranks - 1), 8 * ranks * (ranks - 1) * size)
    assert exercise.least(Case(ranks, 0)) == Least(0, 0)


def test_the_groups_are_those_that_differ_in_one_coordinate():
    """Over the cases of the exercise and sixty drawn ones: tensor-parallel ranks are neighbours."""
    exercise = EVERY["cse234.get_info"]
    layers = set()
    for case in {*exercise.cases(), *exercise.pool()}:
        mp, dp, layer, in_dim, out_dim = exercise.arguments(case, 0)
        assert mp * dp == case.ranks
        layers.add(layer == "fc_o")
        places = [(m, d) for d in range(dp) for m in range(mp)]
        for (m, d), (numbers, mp_group, dp_group) in zip(places, exercise.expected(case), strict=True):
            parts = [in_dim / mp, out_dim] if layer == "fc_o" else [in_dim, out_dim / mp]
            assert numbers.tolist() == [m, d, *parts]
            assert mp_group.tolist() == [rank for rank, place in enumerate(places) if place[1] == d]
            assert dp_group.tolist() == [rank for rank, place in enumerate(places) if place[0] == m]
    assert layers == {False, True}


def test_the_ranks_of_a_model_parallel_group_train_on_the_rows_of_their_replica():
    exercise = EVERY["cse234.split_data"]
    for case in {*exercise.cases(), *exercise.pool()}:
        x, y, mp, dp = exercise.arguments(case, 0)
        assert (mp, dp) == EVERY["cse234.get_info"].arguments(case, 0)[:2]
        rows = len(y) // dp
        for rank, (own, labels) in enumerate(exercise.expected(case)):
            first = rank // mp * rows
            assert labels.tolist() == list(range(first, first + rows))
            assert own.tolist() == x[first : first + rows].tolist()


@each("case", CASES)
def test_a_mixture_of_experts_is_that_of_its_experts_one_row_at_a_time(case):
    exercise = EVERY["cse234.MoE_EP"]
    router, x, topk, _ = exercise.arguments(case, 0)
    experts = [exercise.arguments(case, rank)[3] for rank in range(case.ranks)]
    indices, gates = router(x, topk)
    assert topk == min(2, case.ranks)
    np.testing.assert_allclose(gates.sum(axis=1), 1)
    wanted, needed = [], [0] * case.ranks
    for row, numbers, weights in zip(x, indices, gates, strict=True):
        logits = [row @ column for column in router.weight.T]
        assert sorted(logits)[::-1][:topk] == [logits[number] for number in numbers]
        wanted.append(sum(w * experts[e](row[None])[0] for e, w in zip(numbers, weights, strict=True)))
        needed = [count + any(number != rank for number in numbers) for rank, count in enumerate(needed)]
    for answer in exercise.expected(case):
        np.testing.assert_allclose(answer, np.reshape(wanted, answer.shape), rtol=1e-12)
    # A rank must be told two numbers of every row whose experts are not all on that rank.
    assert exercise.least(case) == Least(sum(count > 0 for count in needed), 8 * 2 * sum(needed))


@each("case", CASES)
def test_parts_are_joined_along_the_last_axis(case):
    n, whole = case.ranks, cse234.whole(case)
    own = whole.shape[2] // n
    for name in ("naive_collect_forward_input", "naive_collect_forward_output"):
        exercise = EVERY[f"cse234.{name}"]
        parts = [exercise.arguments(case, rank)[0] for rank in range(n)]
        assert np.array_equal(np.concatenate(parts, axis=2), whole)
        assert [np.array_equal(answer, whole) for answer in exercise.expected(case)] == [True] * n
        assert exercise.least(case) == Least(2 * (n - 1), 8 * (n - 1) * whole.size)
    backward = EVERY["cse234.naive_collect_backward_output"].expected(case)
    exercise = EVERY["cse234.naive_collect_backward_x"]
    total = sum(exercise.arguments(case, rank)[0] for rank in range(n))
    for rank, (part, summed) in enumerate(zip(backward, exercise.expected(case), strict=True)):
        mine = slice(rank * own, (rank + 1) * own)
        assert np.array_equal(part, whole[:, :, mine])
        assert np.array_equal(summed, total[:, :, mine])


# CMU 11-868 -----------------------------------------------------------------------------------------------------------


@each(
    ("parts", "sentence"),
    [
        ([[[0, 3, 4]], [[1]], [[2, 5]]], "the parts have 3, 1, 2 samples; they may differ by one"),
        ([[[0, 3]], [[1, 4]], [[2, 5]]], ""),
        ([[[0, 3]], [[1, 4]], [[2, 4]]], "the 3 parts together are not the 6 samples, each once"),
        ([[[0, 3]], [[1, 4]], [[2]]], "the 3 parts together are not the 6 samples, each once"),
        ([[[0, 3, 4]], [[1, 4]], [[2, 5]]], "the 3 parts together are not the 6 samples, each once"),
        (
            [[[0, 3]], [[1, 4]], [[2], [5]]],
            "rank 2's batches have 1, 1 samples; 12 for all ranks is 4 for each, and fewer in the last batch only",
        ),
    ],
)
def test_parts_of_a_dataset_are_checked_in_order(parts, sentence):
    assert llmsys.check_partition(Case(3, 6), [parts]) == sentence


def test_a_batch_is_a_rank_s_share_of_the_whole_one():
    parts = [[list(range(rank, 15, 3))] for rank in range(3)]
    assert llmsys.check_partition(Case(3, 15), [parts]).startswith("rank 0's batches have 5 samples; 12 for all ranks")


def test_a_rank_more_takes_a_share_of_the_same_batch():
    exercise = EVERY["llmsys.partition_dataset"]
    ranks, samples, batch = exercise.arguments(Case(3, 7), 0)
    assert (ranks, samples, batch) == (3, [0, 1, 2, 3, 4, 5, 6], 12)
    # Samples 0, 3, 6; 1, 4; 2, 5, of a function that is told which rank it is; whatever yields batches is taken.
    run = exercise.adapter({"partition_dataset": lambda rank, n, data, size: iter([np.array(data[rank::n])])})
    assert run(ranks, samples, batch) == [[[0, 3, 6]], [[1, 4]], [[2, 5]]]
    assert llmsys.check_partition(Case(3, 7), [run(ranks, samples, batch)]) == ""


def test_a_layer_that_is_used_twice_and_a_parameter_that_is_not_trained_are_as_written_out():
    case = Case(2, 1)
    names = [name for name, _ in cs336.tied_model_of(case, 0).named_parameters()]
    assert names[0] == "fixed"
    assert [name.partition(".")[0] for name in names[1::2]] == ["first", "twice", "last"]
    fixed, w1, b1, w2, b2, w3, b3 = cs336.weights(cs336.tied_model_of(case, 0))
    assert cs336.numbers(case, cs336.tied_model_of) == sum(a.size for a in (w1, b1, w2, b2, w3, b3))
    for x, y in cs336.batches(case):
        one = np.maximum(x @ w1.T + b1, 0)
        two = np.maximum(one @ w2.T + b2, 0)
        three = np.maximum(two @ w2.T + b2, 0)
        g3 = 2 * (three @ w3.T + b3 - y) / y.size
        g2 = g3 @ w3 * (three > 0)
        g1 = g2 @ w2 * (two > 0)
        g0 = g1 @ w2 * (one > 0)
        w3, b3 = w3 - 0.1 * g3.T @ three, b3 - 0.1 * g3.sum(axis=0)
        w2, b2 = w2 - 0.1 * (g2.T @ two + g1.T @ one), b2 - 0.1 * (g2 + g1).sum(axis=0)
        w1, b1 = w1 - 0.1 * g0.T @ x, b1 - 0.1 * g0.sum(axis=0)
    for got, wanted in zip(EVERY["cs336.ddp_tied"].expected(case)[0], (fixed, w1, b1, w2, b2, w3, b3), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


def test_gradients_that_are_expected_are_those_of_the_ranks_added_and_divided():
    case = Case(3, 2)
    of_rank = [llmsys.gradients(llmsys.model_of(*llmsys.data(case, rank))) for rank in range(3)]
    for answer in EVERY["llmsys.average_gradients"].expected(case):
        for place, got in enumerate(answer):
            np.testing.assert_allclose(got, sum(parts[place] for parts in of_rank) / 3, rtol=1e-14)
    assert not np.allclose(of_rank[0][0], of_rank[1][0])

    # The adapter gives back what the function has left in the model.
    def halved(model, comm):
        for parameter in model.parameters():
            parameter.grad = np.array(parameter.grad) / 2

    run = EVERY["llmsys.average_gradients"].adapter({"average_gradients": halved})
    answer = SimWorld(1).run(lambda comm: run(comm, llmsys.model_of(*llmsys.data(case, 0))))[0]
    assert all(np.array_equal(got, whole / 2) for got, whole in zip(answer, of_rank[0], strict=True))


def clocks(m, p):
    return [[(i, j) for i in range(m) for j in range(p) if i + j == k] for k in range(m + p - 1)]


@pytest.mark.parametrize(("m", "p"), [(1, 1), (1, 3), (3, 1), (2, 3), (4, 2)])
def test_a_clock_that_differs_is_named(m, p):
    case = Case(1, m, p)
    right = clocks(m, p)
    assert llmsys.check_clock_cycles(case, [right]) == ""
    late = [*right, []]
    assert llmsys.check_clock_cycles(case, [late]) == (
        f"{m + p} clocks; {m} micro-batches on {p} partitions take {m + p - 1}"
    )
    for cells in ([(0, p - 1), (m - 1, p - 1)], [(m, p - 1)], []):
        assert llmsys.check_clock_cycles(case, [[*right[:-1], cells]]) == (
            f"clock {m + p - 2} runs {cells}; expected {[(m - 1, p - 1)]}"
        )
    # In which order the cells of a clock are yielded makes no difference.
    run = EVERY["llmsys.clock_cycles"].adapter({"_clock_cycles": lambda m, p: (c[::-1] for c in clocks(m, p))})
    assert run(*EVERY["llmsys.clock_cycles"].arguments(case, 0)) == right
