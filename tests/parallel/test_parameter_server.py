"""The parameter server: bsp is one device, the others are a replay of their order, for every order there is.

The gradient is nonlinear in the weights and unlike for every (worker, clock), so that a stale read, a lost, doubled or
misplaced update changes bits.
"""

import itertools
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.comm.sim.choosers import earliest, explore, seeded
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import MismatchError, RankDeadError, UsageError
from minidist.optim import SGD, ParameterSlice
from minidist.optim.adam import Adam
from minidist.parallel.assignment import assign_keys
from minidist.techniques import parameter_server as ps
from minidist.techniques.parameter_server.server import Server
from tests.cases import each
from tests.collectives.cases import primes

SHAPES = {"a": (3, 2), "b": (5,), "table": (7, 2), "d": ()}
OPTIMIZERS = {
    "sgd": lambda slices: SGD(slices, lr=0.05),
    "momentum": lambda slices: SGD(slices, lr=0.05, momentum=0.75),
    "adam": lambda slices: Adam(slices, lr=0.01),
}
SENDS = [0, 1 << 20]
FLOATS = np.float32
PRIMES = primes(4000)


def initial(shapes=SHAPES):
    numbers = iter(PRIMES[:100] / 31)
    return {k: np.array([next(numbers) for _ in range(int(np.prod(s)))], FLOATS).reshape(s) for k, s in shapes.items()}


def factors(key, worker, clock, shape):
    """Numbers that no other (key, worker, clock) has."""
    first = 1 + sum(map(ord, key)) % 7 + 11 * worker + 53 * clock
    return (PRIMES[first : first + int(np.prod(shape))].reshape(shape) % 97 / FLOATS(83)).astype(FLOATS)


def gradient(worker, clock, weights):
    return {k: np.sin(w + factors(k, worker, clock, w.shape)).astype(FLOATS) for k, w in weights.items()}


def touched(worker, clock):
    """Rows of the table; none for some clocks, one of them twice for others."""
    return np.array([[], [1, 4, 1], [0], [6, 2]][(worker + clock) % 4], np.int64)


def sparse_gradient(worker, clock, weights):
    result = gradient(worker, clock, weights)
    ids = touched(worker, clock)
    values = np.cos(weights["table"][ids] + factors("v", worker, clock, (ids.size, 2))).astype(FLOATS)
    return {**result, "table": ps.Rows(ids, values)}


def densified(worker, clock, weights):
    result = sparse_gradient(worker, clock, weights)
    dense = np.zeros_like(weights["table"])
    for i, row in enumerate(result["table"].ids):  # in the order of the rows given
        dense[row] += result["table"].values[i]
    return {**result, "table": dense}


def config(servers, consistency, optimizer="momentum", **options):
    return ps.ServerConfig(servers, consistency, OPTIMIZERS[optimizer], **options)


def drawn(data):
    """A chooser that lets hypothesis draw and shrink the order: `data` is a `hypothesis.strategies.data()`."""
    return lambda candidates: data.draw(st.integers(0, len(candidates) - 1), label="wildcard choice")


def same(a, b):
    return list(a) == list(b) and all(a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a)


def one_device(workers, steps, optimizer, compute=gradient, shapes=SHAPES):
    """No server, no shard: sums in worker order, one optimizer over everything."""
    weights = initial(shapes)
    slices = [ParameterSlice(w.reshape(-1), None, k) for k, w in weights.items()]
    update = OPTIMIZERS[optimizer](slices)
    for clock in range(steps):
        parts = [compute(worker, clock, weights) for worker in range(workers)]
        for piece in slices:
            total = parts[0][piece.name]
            for part in parts[1:]:
                total = total + part[piece.name]
            piece.grad = np.asarray(total).reshape(-1)
        update.step()
    return weights


# --- assignment ---


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_keys_are_balanced_within_the_largest(sizes, servers):
    held = assign_keys(sizes, servers)
    assert sorted(itertools.chain(*held)) == list(range(len(sizes)))
    loads = [sum(sizes[key] for key in keys) for keys in held]
    assert max(loads) - min(loads) <= max(sizes, default=0)


# --- bsp ---


@each("consistency", ["bsp", "delay:0"])
@each("optimizer", OPTIMIZERS)
@each(("servers", "workers"), [(2, 3), (3, 2), (1, 1), (1, 3), (5, 3), (3, 5)], sampled=6)
def test_bsp_is_one_device_bit_for_bit(consistency, optimizer, servers, workers):
    for eager_bytes, chooser in itertools.product(SENDS, (earliest, seeded(1), seeded(2))):
        world = SimWorld(servers + workers, eager_bytes=eager_bytes, chooser=chooser)
        results = world.run(ps.run, config(servers, consistency, optimizer), initial(), gradient, 4)
        expected = one_device(workers, 4, optimizer)
        assert all(same(result.weights, expected) for result in results)
        assert not same(expected, initial())


def test_bsp_with_sparse_keys_is_one_device():
    world = SimWorld(5)
    result = world.run(ps.run, config(2, "bsp", "adam", sparse=frozenset(["table"])), initial(), sparse_gradient, 5)[0]
    assert same(result.weights, one_device(3, 5, "adam", densified))


def test_only_rank_0s_initial_weights_count():
    def program(comm):
        start = initial() if comm.rank == 0 else {k: w + 1 for k, w in initial().items()}
        return ps.run(comm, config(1, "bsp"), start, gradient, 2).weights

    assert all(same(weights, one_device(2, 2, "momentum")) for weights in SimWorld(3).run(program))


# --- every interleaving ---


def ahead(worker, updates, pushes):
    """How many pushes a worker is ahead of the slowest one that has not finished."""
    done = Counter(w for ((w, _),) in updates)
    return done[worker] - min((done[w] for w, n in pushes.items() if done[w] < n), default=done[worker])


def check_run(world, results, cfg, compute=gradient, shapes=SHAPES):
    """The replay has the run's bits, and the invariants of its consistency hold at every read."""
    records = ps.read_records(world.traces, cfg)
    assert all(same(r.weights, results[0].weights) for r in results)
    assert same(ps.replay(records, cfg, initial(shapes), compute), results[0].weights)
    bound, aggregate = ps.parse_consistency(cfg.consistency)
    pushes = {worker: results[cfg.servers + worker].pushes for worker in range(world.size - cfg.servers)}
    for record in records:
        applied = [part for update in record.updates for part in update]
        assert sorted(applied) == sorted((w, c) for w, n in pushes.items() for c in range(n))  # none lost, none twice
        assert max(record.gaps, default=0) <= (bound if not aggregate else bound + 1)
        if not aggregate:
            pulls = list(record.versions.items())[len(pushes) :]
            assert record.gaps == [ahead(worker, record.updates[:version], pushes) for (worker, _), version in pulls]
        for (worker, clock), version in record.versions.items():
            seen = [part for update in record.updates[:version] for part in update]
            assert all((w, c) in seen for w, n in pushes.items() for c in range(n) if c <= clock - bound - 1)
            if not aggregate:
                assert all((worker, c) in seen for c in range(clock))  # and its own
    return records


ORDERS = {"asp": 90, "ssp:2": 90, "ssp:1": 90, "ssp:0": 36, "bsp": 36}


@each(("consistency", "eager_bytes"), list(itertools.product(ORDERS, SENDS)), sampled=10)
def test_every_order_of_3_workers_and_2_pushes(consistency, eager_bytes):
    """6! / (2! 2! 2!) orders of pushes, or (3!)^2 where every clock waits for all."""
    cfg, seen, finals, gaps = config(1, consistency), [], set(), []

    def one(chooser):
        world = SimWorld(4, chooser=chooser, eager_bytes=eager_bytes)
        results = world.run(ps.run, cfg, initial(), gradient, 2)
        (record,) = check_run(world, results, cfg)
        gaps.extend(record.gaps)
        finals.add(b"".join(w.tobytes() for w in results[0].weights.values()))
        return tuple(m.peer for m in world.traces[0].messages if m.wildcard), record

    for order, _ in explore(one):
        seen.append(order)
    assert len(seen) == len(set(seen)) == ORDERS[consistency]
    assert (len(finals) == 1) == (consistency == "bsp")
    assert max(gaps) == (consistency not in ("ssp:0", "bsp"))  # the bound is reached, and 1 is all that 2 pushes allow


@pytest.mark.sampled(3)
@pytest.mark.parametrize("consistency", ["asp", "ssp:0", "ssp:1", "ssp:3", "bsp", "delay:2"])
@given(data=st.data())
@settings(max_examples=15)
def test_random_orders_of_more_ranks(consistency, data):
    servers, workers, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    optimizer, aware = data.draw(st.sampled_from(sorted(OPTIMIZERS))), data.draw(st.booleans())
    aware = aware and not ps.parse_consistency(consistency).aggregate
    cfg = config(servers, consistency, optimizer, sparse=frozenset(["table"]), staleness_aware=aware)
    world = SimWorld(servers + workers, chooser=drawn(data), eager_bytes=data.draw(st.sampled_from(SENDS)))
    results = world.run(ps.run, cfg, initial(), sparse_gradient, steps)
    check_run(world, results, cfg, sparse_gradient)


def test_workers_that_stop_at_different_clocks():
    for consistency, seed in itertools.product(("asp", "ssp:1", "bsp", "delay:1"), range(5)):
        cfg, world = config(2, consistency), SimWorld(5, chooser=seeded(seed))
        results = world.run(ps.run, cfg, initial(), gradient, lambda comm, clock: clock + 1 == comm.rank)
        assert [r.pushes for r in results] == [0, 0, 2, 3, 4]
        check_run(world, results, cfg)


def test_asp_really_reads_stale_weights_and_a_replay_in_another_order_differs():
    cfg, world = config(2, "asp"), SimWorld(6, chooser=seeded(3))
    results = world.run(ps.run, cfg, initial(), gradient, 4)
    records = ps.read_records(world.traces, cfg)
    assert max(results[0].staleness) > 0
    records[0].updates[0], records[0].updates[1] = records[0].updates[1], records[0].updates[0]
    assert not same(ps.replay(records, cfg, initial(), gradient), results[0].weights)
    records[0].versions[0, 1] += 99
    with pytest.raises(UsageError, match="does not belong to a run"):
        ps.replay(records, cfg, initial(), gradient)


def test_the_rate_is_divided_by_the_staleness():
    """4 workers in turn: the first four updates are 0, 1, 2 and 3 versions behind; all later ones 3."""
    cfg = ps.ServerConfig(1, "asp", OPTIMIZERS["sgd"], staleness_aware=True)
    shapes = {"b": (1,)}
    world = SimWorld(5)
    results = world.run(ps.run, cfg, initial(shapes), lambda worker, clock, weights: {"b": np.ones(1, FLOATS)}, 3)
    assert results[0].staleness == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    expected = initial(shapes)["b"][0]
    for staleness in results[0].staleness:
        expected -= FLOATS(0.05 * (1 / max(1, staleness)))
    assert results[0].weights["b"][0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("consistency", ["ssp:1", "asp"])
def test_the_rate_is_that_of_the_pushs_clock(consistency):
    """Not that of the update's number: three workers' pushes of one clock count equally."""
    shapes, seen = {"b": (1,)}, []
    cfg = ps.ServerConfig(1, consistency, OPTIMIZERS["sgd"], rate=lambda clock: 0.5**clock)
    world = SimWorld(4, chooser=seeded(1))
    results = world.run(
        ps.run,
        cfg,
        initial(shapes),
        lambda *_: {"b": np.ones(1, FLOATS)},
        4,
        observe=lambda u: seen.append(u.shard.flat[0]),
    )
    (record,) = check_run(world, results, cfg, lambda *_: {"b": np.ones(1, FLOATS)}, shapes)
    moved = -np.diff([initial(shapes)["b"][0], *seen])
    assert moved == pytest.approx([0.05 * 0.5**clock for ((_, clock),) in record.updates], rel=1e-4)
    assert sorted(clock for ((_, clock),) in record.updates) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


# --- traffic and time ---


@pytest.mark.parametrize("consistency", ["bsp", "ssp:1", "asp"])
def test_messages_and_bytes(consistency):
    servers, workers, steps = 2, 3, 4
    cfg, world = config(servers, consistency, sparse=frozenset(["table"])), SimWorld(servers + workers)
    world.run(ps.run, cfg, initial(), sparse_gradient, steps)
    shards = ps.make_shards(cfg.servers, initial(), cfg.sparse)
    assert sorted(shard.flat.size for shard in shards) == [12, 14]  # a, b and d; the table
    for worker in range(workers):
        sent = world.traces[servers + worker].sent("parameter_push")
        rows = [touched(worker, clock).size for clock in range(steps)]
        heads = steps * (2 * 8 + 3 * 8)
        assert sum(m.nbytes for m in sent) == heads + steps * 12 * 4 + sum(rows) * (8 + 2 * 4)
        assert len(sent) == steps * 3 + 2 * sum(n > 0 for n in rows)
    for server, shard in enumerate(shards):
        pulls = world.traces[server].sent("parameter_pull")
        assert [m.nbytes for m in pulls] == [shard.flat.nbytes] * (workers * (steps - 1) + servers + workers - 1)


def test_a_push_has_the_dense_keys_first_and_then_the_sparse_ones_in_the_order_of_the_weights():
    """The sizes of the messages tell them apart: ids (8 B a row) and rows of 5, 2 and 3 floats."""
    weights = {name: np.ones((4, width), FLOATS) for name, width in (("c", 5), ("a", 2), ("b", 3))}
    weights["dense"] = np.ones(7, FLOATS)

    def compute(worker, clock, weights):
        rows = {name: np.arange(touched) for name, touched in (("c", 1), ("a", 2), ("b", 3))}
        sparse = {name: ps.Rows(ids, weights[name][ids]) for name, ids in rows.items()}
        return {"dense": weights["dense"], **sparse}

    world = SimWorld(2)
    world.run(ps.run, config(1, "bsp", sparse=frozenset("abc")), weights, compute, 1)
    sizes = [message.nbytes for message in world.traces[1].sent("parameter_push")]
    assert sizes == [5 * 8, 7 * 4, 1 * 8, 1 * 5 * 4, 2 * 8, 2 * 2 * 4, 3 * 8, 3 * 3 * 4]


def test_a_dead_worker_waits_for_nothing():
    """Also one that had asked for its next weights: nothing is sent to it any more, and no other waits for it."""

    def main(comm):
        shard = ps.make_shards(1, initial())[0]
        server = Server(comm, config(1, "asp"), shard)
        server.waiting.update({0: 3, 1: 3})
        server.remove_worker(RankDeadError("rank 1 is dead", 1))
        return server.waiting, server.done

    waiting, done = SimWorld(3).run(main)[0]
    assert waiting == {1: 3}
    assert done == {0: float("inf"), 1: 0}


def test_bsp_takes_the_closed_form_time():
    """A clock: compute, head and gradient up (one latency), weights down (another)."""
    alpha, beta, steps = 2.0**-10, 2.0**-20, 5
    world = SimWorld(2, links=LinkModel(alpha=alpha, beta=beta))
    cfg = config(1, "bsp", "sgd")
    world.run(ps.run, cfg, initial(), gradient, steps, lambda worker, clock: 1.0)
    nbytes = sum(w.nbytes for w in initial().values())
    start = alpha + beta * nbytes
    step = 1.0 + alpha + beta * (16 + nbytes)
    assert world.end_time == pytest.approx(start + steps * (step + alpha + beta * nbytes), rel=1e-12)


# --- bad input ---


def _row(ids):
    return lambda worker, clock, weights: {
        **gradient(worker, clock, weights),
        "table": ps.Rows(ids, np.ones((1, 2), FLOATS)),
    }


def wrong(servers=1, consistency="asp", weights=None, compute=gradient, steps=1, **options):
    """The arguments of a run of a server, two workers and one step, but for what is given."""
    return config(servers, consistency, **options), initial() if weights is None else weights, compute, steps


TABLE = {"sparse": frozenset(["table"])}
NOT_ROWS = r"'table' need a 1-D array of integer"
BAD = {
    "no worker": (wrong(3, "bsp"), "3 servers among 3 ranks"),
    "no server": (wrong(0, "bsp"), "0 servers among 3 ranks"),
    "a negative bound": (wrong(1, "ssp:-1"), "bound -1; it must be at least 0"),
    "no bound": (wrong(1, "ssp"), "'ssp'; it must be bsp, asp, ssp:S or delay:T"),
    "a bound that is no number": (wrong(1, "ssp:--2"), "'ssp:--2'; it must be bsp"),
    "a bound in another script": (wrong(1, "delay:²"), "'delay:²'; it must be bsp"),
    "no step": (wrong(steps=0), "rank 0: 0 steps"),
    "an unknown key": (wrong(sparse=frozenset("z")), "sparse key 'z'"),
    "a sparse vector": (wrong(sparse=frozenset("b")), "must be a matrix"),
    "two dtypes": (wrong(weights={"a": np.ones(1), "b": np.ones(1, "f4")}), "float32, float64"),
    "no weights": (wrong(weights={}), "no weights"),
    "staleness in bsp": (wrong(1, "bsp", staleness_aware=True), "use ssp or asp"),
    "a dense gradient": (wrong(**TABLE), r"worker \d, clock 0: .* Rows"),
    "a row that is not there": (wrong(compute=_row(np.array([7])), **TABLE), r"each id must be in 0\.\.6"),
    "rows by a fraction": (wrong(compute=_row(np.array([0.7])), **TABLE), NOT_ROWS),
    "rows in a table": (wrong(compute=_row(np.array([[1]])), **TABLE), NOT_ROWS),
    "rows in a list": (wrong(compute=_row([1]), **TABLE), NOT_ROWS),
    "a gradient that is missing": (
        wrong(compute=lambda w, k, x: {"a": x["a"]}),
        r"worker \d, clock 0: no gradient of 'b'",
    ),
    "rows that are missing": (
        wrong(compute=lambda w, k, x: {name: x[name] for name in "abd"}, **TABLE),
        "no gradient of 'table'",
    ),
    "a gradient in a list": (
        wrong(compute=lambda w, k, x: {**x, "b": [1.0] * 5}),
        "'b' has shape none, being no array",
    ),
    "weights that are integers": (wrong(weights={"a": np.ones(1, int)}), "weights are int64.* pass floats"),
    "a gradient of another shape": (
        wrong(compute=lambda w, k, x: {**gradient(w, k, x), "b": np.ones(4, FLOATS)}),
        r"'b' has shape \(4,\)",
    ),
}


UNLIKE = {
    "servers": (lambda rank: (config(1 + (rank == 1), "asp"), initial()), "servers/2 asp"),
    "consistency": (lambda rank: (config(2, ["asp", "bsp"][rank == 1]), initial()), "servers/2 bsp"),
    "sparse keys": (
        lambda rank: (config(1, "asp", sparse=frozenset(["table"] * (rank == 1))), initial()),
        "table.*table.* sparse",
    ),
    "shapes": (lambda rank: (config(1, "asp"), {"a": np.ones([(3, 2), (2, 3)][rank == 1])}), r"a\[3, 2\].*a\[2, 3\]"),
    "names": (lambda rank: (config(1, "asp"), {"ab"[rank == 1]: np.ones(3)}), r"a\[3\].*b\[3\]"),
}


@each("what", UNLIKE)
@each("eager_bytes", SENDS)
def test_ranks_that_do_not_agree_are_told_before_the_first_push(what, eager_bytes):
    arguments, words = UNLIKE[what]
    with pytest.raises(MismatchError, match=r"call 0 of world.* on ranks? 0.* and .* on rank 1, at") as error:
        SimWorld(4, eager_bytes=eager_bytes).run(lambda comm: ps.run(comm, *arguments(comm.rank), gradient, 2))
    assert re.search(words, str(error.value))


@each("what", BAD)
def test_wrong_input_is_one_sentence(what):
    arguments, words = BAD[what]
    with pytest.raises(UsageError, match=words):
        SimWorld(3).run(ps.run, *arguments)


# --- MPI ---


@pytest.mark.mpi(4)
@pytest.mark.parametrize("consistency", ["bsp", "ssp:1", "asp"])
def test_an_mpi_run_is_replayed_on_one_device(comm, consistency):
    """Whatever order MPI had: the traces are gathered, and the replay has the same bits on every rank."""
    cfg = config(2, consistency, sparse=frozenset(["table"]))
    start = len(comm.trace.messages)
    result = ps.run(comm, cfg, initial(), sparse_gradient, 6)
    mine = type(comm.trace)(comm.rank, comm.size, comm.trace.messages[start:])
    traces = [mine]
    for rank in range(1, comm.size):
        if comm.rank == rank:
            comm.send_object(mine, 0)
        elif comm.rank == 0:
            traces.append(comm.recv_object(rank))
    if comm.rank == 0:
        replayed = ps.replay(ps.read_records(traces, cfg), cfg, initial(), sparse_gradient)
        assert same(replayed, result.weights)
    if consistency == "bsp":
        assert same(result.weights, one_device(2, 6, "momentum", densified))
