"""Wrong answers to every exercise, each with words of the hint that it must get.

Many are our solution with one change.
"""

import copy
import inspect

import numpy as np

from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from minidist.core.comm import ANY
from minidist.course.lesson import solution

_with_gaps = inspect.getmodule(solution("19b.building_block"))._with_gaps
our_cross_entropy_backward = solution("00b.cross_entropy_backward")
our_ring_all_reduce = solution("04.ring_all_reduce")
our_stages_by_time = solution("10c.stages_by_time")
our_halving_doubling = solution("05.halving_doubling")
our_ssp = solution("06c.ssp")
our_pick_segments = solution("10.pick_segments")
our_split_cross_entropy = solution("14b.split_cross_entropy")
our_gpipe = solution("16.gpipe")
our_one_f_one_b = solution("17.one_f_one_b")
our_stashing = solution("17b.stashing")
our_two_versions = solution("17c.two_versions")
our_place_ranks = solution("20.place_ranks")
our_visible = solution("22.visible")
our_in_order = solution("06f.in_order")


def no_rank_waits(comm, say):
    say("here")


def token_before_the_sentence(comm, say):
    token = np.zeros(1)
    if comm.rank > 0:
        comm.recv(token, comm.rank - 1)
    if comm.rank < comm.size - 1:
        comm.send(token, comm.rank + 1)
    say("here")


def a_barrier_per_turn(comm, say):
    for turn in range(comm.size):
        if turn == comm.rank:
            say("here")
        comm.barrier()


def leading_axes_only(gradient, shape_a, shape_b):
    return tuple(gradient.sum(axis=tuple(range(gradient.ndim - len(shape)))) for shape in (shape_a, shape_b))


def no_broadcasting(gradient, shape_a, shape_b):
    return gradient, gradient


def times_rows(logits, targets):
    return our_cross_entropy_backward(logits, targets) * len(targets)


def forgotten_target(logits, targets):
    return our_cross_entropy_backward(logits, targets) + np.eye(5)[targets] / len(targets)


def forward_keeping(layers, x):
    kept = [x]
    for layer in layers:
        kept.append(layer.forward(kept[-1]))
    return kept


def updates_too_early(layers, x, loss_gradient):
    kept = forward_keeping(layers, x)
    g = loss_gradient(kept.pop())
    for layer in reversed(layers):
        layer.update(layer.weight_gradient(kept.pop(), g))
        g = layer.input_gradient(g)


def input_gradient_first(layers, x, loss_gradient):
    kept = forward_keeping(layers, x)
    g = loss_gradient(kept.pop())
    for layer in reversed(layers):
        below = layer.input_gradient(g) if kept[1:] else None
        layer.update(layer.weight_gradient(kept.pop(), g))
        g = below
        del below


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def all_send_first(comm, outgoing):
    right, left = neighbours(comm)
    incoming = np.empty_like(outgoing)
    if comm.size == 1:
        return outgoing.copy()
    comm.send(outgoing, right)
    comm.recv(incoming, left)
    return incoming


def all_receive_first(comm, outgoing):
    right, left = neighbours(comm)
    incoming = np.empty_like(outgoing)
    if comm.size == 1:
        return outgoing.copy()
    comm.recv(incoming, left)
    comm.send(outgoing, right)
    return incoming


def the_wrong_way_round(comm, outgoing):
    right, left = neighbours(comm)
    incoming = np.empty_like(outgoing)
    comm.sendrecv(outgoing, left, incoming, right)
    return incoming


def forgotten_wait(comm, outgoing):
    right, left = neighbours(comm)
    incoming = np.empty_like(outgoing)
    comm.isend(outgoing, right)
    comm.irecv(incoming, left).wait()
    return incoming


def own_numbers(comm, outgoing):
    right, left = neighbours(comm)
    requests = [comm.irecv(np.empty_like(outgoing), left), comm.isend(outgoing, right)]
    comm.waitall(requests)
    return outgoing


def no_modulo(comm, array):
    for _ in range(comm.size - 1):
        comm.sendrecv(array.copy(), comm.rank + 1, array, comm.rank - 1)


def whole_arrays_travel(comm, array):
    right, left = neighbours(comm)
    travelling, total = array.copy(), array.copy()
    for _ in range(comm.size - 1):
        incoming = np.empty_like(array)
        comm.sendrecv(travelling, right, incoming, left)
        total, travelling = total + incoming, incoming
    array[...] = total


def passes_on_its_own_part(comm, array):
    right, left = neighbours(comm)
    chunks, originals = np.array_split(array, comm.size), np.array_split(array.copy(), comm.size)
    for step in range(comm.size - 1):
        leaving, arriving = originals[(comm.rank - step) % comm.size], chunks[(comm.rank - step - 1) % comm.size]
        incoming = np.empty_like(arriving)
        comm.sendrecv(leaving, right, incoming, left)
        arriving += incoming
    for step in range(comm.size - 1):
        leaving, arriving = chunks[(comm.rank - step + 1) % comm.size], chunks[(comm.rank - step) % comm.size]
        comm.sendrecv(leaving, right, arriving, left)


def sums_whole_arrays(comm, array):
    parts = [np.empty_like(array) for _ in range(comm.size)]
    parts[comm.rank] = array.copy()
    for distance in range(1, comm.size):
        source = (comm.rank - distance) % comm.size
        comm.sendrecv(array, (comm.rank + distance) % comm.size, parts[source], source)
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return np.array_split(total, comm.size)[comm.rank]


def forgets_the_extra_ranks(comm, array):
    power = 1 << (comm.size.bit_length() - 1)
    if comm.rank < power:
        our_halving_doubling(comm.group(range(power), "power"), array)
    else:
        comm._children += 1


def folded_whole_arrays(comm, array):
    n, rank = comm.size, comm.rank
    power = 1 << (n.bit_length() - 1)
    if rank >= power:
        comm.send(array, rank - power)
        comm.recv(array, rank - power)
        return
    incoming = np.empty_like(array)
    if rank < n - power:
        comm.recv(incoming, rank + power)
        array += incoming
    distance = 1
    while distance < power:
        comm.sendrecv(array.copy(), rank ^ distance, incoming, rank ^ distance)
        array += incoming
        distance *= 2
    if rank < n - power:
        comm.send(array, rank + power)


def result_thrown_away(comm, array):
    our_halving_doubling(comm, array.copy())


def mean_of_means(comm, gradient, count):
    return all_reduce(comm, gradient.copy(), op="avg")


def divided_by_ranks(comm, gradient, count):
    weighted = gradient * count if count else np.zeros_like(gradient)
    return all_reduce(comm, weighted, op="avg")


def out_of_order(comm, backward, uses, buckets, launch):
    left, works = list(uses), {}
    for parameter in backward:
        left[parameter] -= 1
        for b in range(len(buckets)):
            if b not in works and not any(left[p] for p in buckets[b]):
                works[b] = launch(b)
    for b in range(len(buckets)):
        if b not in works:
            works[b] = launch(b)
    for work in works.values():
        work.wait()


def all_at_the_end(comm, backward, uses, buckets, launch):
    list(backward)
    for work in [launch(b) for b in range(len(buckets))]:
        work.wait()


def ignores_the_inputs(saved, boundary, budget):
    return our_pick_segments(saved, 0, budget)


def root_of_the_depth(saved, boundary, budget):
    count = max(1, round(len(saved) ** 0.5))
    return [len(part) for part in np.array_split(saved, count)]


def never_gives_up(saved, boundary, budget):
    return our_pick_segments(saved, boundary, budget) or [len(saved)]


def draws_anew(segment, x, rng):
    return segment.forward(x, rng), lambda g: segment.gradient(x, g, rng)


def forward_on_a_copy(segment, x, rng):
    y = segment.forward(x, copy.deepcopy(rng))
    return y, lambda g: segment.gradient(x, g, copy.deepcopy(rng))


def flattened(arrays, comm, pad=True):
    padding = np.zeros(-sum(a.size for a in arrays) % comm.size * pad)
    return np.concatenate([*(a.reshape(-1) for a in arrays), padding])


def unflatten(whole, arrays):
    start = 0
    for a in arrays:
        a[...] = whole[start : start + a.size].reshape(a.shape)
        start += a.size


def scaled(comm, steps, backward, step, flag=None, wide=True, grow=True, reset=True, look=True):
    """A loop with a loss scale, or one that lacks something. flag(gradient): did anybody overflow?"""
    scale, good = 2.0**16, 0
    for _ in range(steps):
        gradient = backward(scale)
        bad = np.array([not np.isfinite(gradient).all()], np.uint8)
        overflow = all_reduce(comm, bad, "max")[0] if flag is None else flag(gradient)
        if overflow and look:
            scale, good = scale / 2, 0 if reset else good
            continue
        step(gradient.astype(np.float32) / scale if wide else gradient / np.float16(min(scale, 65504)))
        good += 1
        if grow and good == 3:
            scale, good = scale * 2, 0
    return scale


def divides_in_float16(*arguments):
    return scaled(*arguments, wide=False)


def never_grows(*arguments):
    return scaled(*arguments, grow=False)


def counts_on(*arguments):
    return scaled(*arguments, reset=False)


def steps_anyway(*arguments):
    return scaled(*arguments, look=False)


def shows_everything(comm, *arguments):
    return scaled(comm, *arguments, flag=lambda gradient: not np.isfinite(all_gather(comm, gradient)).all())


def without_a_gather(comm, weights, gradients, update):
    w = flattened(weights, comm)
    size = w.size // comm.size
    update(w[comm.rank * size : (comm.rank + 1) * size], reduce_scatter(comm, flattened(gradients, comm)))
    unflatten(w, weights)


def forgets_the_rest(comm, weights, gradients, update):
    w, g = flattened(weights, comm, pad=False), flattened(gradients, comm, pad=False)
    size = w.size // comm.size
    mine = w[comm.rank * size : (comm.rank + 1) * size]
    update(mine, reduce_scatter(comm, g[: size * comm.size]))
    w[: size * comm.size] = all_gather(comm, mine.copy())
    unflatten(w, weights)


def every_rank_updates_everything(comm, weights, gradients, update):
    w = flattened(weights, comm, pad=False)
    update(w, all_reduce(comm, flattened(gradients, comm, pad=False)))
    unflatten(w, weights)


def sums_everything_first(comm, weights, gradients, update):
    w, g = flattened(weights, comm), all_reduce(comm, flattened(gradients, comm))
    size = w.size // comm.size
    own = slice(comm.rank * size, (comm.rank + 1) * size)
    update(w[own], g[own])
    unflatten(all_gather(comm, w[own].copy()), weights)


def result_not_written_back(comm, weights, gradients, update):
    w = flattened(weights, comm)
    size = w.size // comm.size
    mine = w[comm.rank * size : (comm.rank + 1) * size]
    update(mine, reduce_scatter(comm, flattened(gradients, comm)))
    all_gather(comm, mine.copy())


def no_prefetch(comm, layers, x, gather, compute):
    for layer in range(layers):
        x = compute(layer, gather(layer).wait(), x)
    return x


def gathers_everything_first(comm, layers, x, gather, compute):
    coming = [gather(layer) for layer in range(layers)]
    for layer in range(layers):
        x = compute(layer, coming[layer].wait(), x)
    return x


def one_too_many(comm, layers, x, gather, compute):
    coming = gather(0) if layers else None
    for layer in range(layers):
        weights, coming = coming.wait(), gather(layer + 1)
        x = compute(layer, weights, x)
    return x


def no_backward(p, m):
    return [[f"F{i}" for i in range(m)] for _ in range(p)]


def one_list_for_all(p, m):
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)]


def one_forward_too_many(p, m):
    return [one_stage(m, min(m, p - stage)) for stage in range(p)]


def one_stage(m, ahead):
    order = [f"F{i}" for i in range(ahead)]
    for i in range(m):
        order += [f"F{ahead + i}"] * (ahead + i < m) + [f"B{i}"]
    return order


def nothing_ahead(p, m):
    return [one_stage(m, 0) for _ in range(p)]


def ssp_worker(comm, steps, compute):
    weights = np.zeros(comm.size - 1)
    for clock in range(steps):
        comm.send(compute(clock, weights), 0)
        if clock + 1 < steps:
            comm.recv(weights, 0)


def ssp_server(comm, steps, may_go, looks_at=lambda waiting, rank: waiting, adds="before"):
    weights, gradient = np.zeros(comm.size - 1), np.zeros(comm.size - 1)
    done, waiting = np.zeros(comm.size, int), []
    done[0] = steps
    for _ in range(steps * (comm.size - 1)):
        rank = comm.recv(gradient, ANY)
        weights += gradient * (adds == "before")
        done[rank] += 1
        if done[rank] < steps:
            waiting.append(rank)
        for ready in [w for w in looks_at(waiting, rank) if may_go(done[w], done.min())]:
            waiting.remove(ready)
            comm.send(weights, ready)
        weights += gradient * (adds == "after")
    return weights


def no_worker_is_held_back(comm, steps, bound, compute):
    return ssp_worker(comm, steps, compute) if comm.rank else ssp_server(comm, steps, lambda mine, slowest: True)


def forgets_who_waits(comm, steps, bound, compute):
    if comm.rank:
        return ssp_worker(comm, steps, compute)
    only_the_last = lambda waiting, rank: [w for w in waiting if w == rank]  # noqa: E731
    return ssp_server(comm, steps, lambda mine, slowest: mine - slowest <= bound, only_the_last)


def answers_before_it_adds(comm, steps, bound, compute):
    if comm.rank:
        return ssp_worker(comm, steps, compute)
    return ssp_server(comm, steps, lambda mine, slowest: mine - slowest <= bound, adds="after")


def pulls_once_more(comm, steps, bound, compute):
    weights = our_ssp(comm, steps, bound, compute)
    return (
        broadcast(comm, np.zeros(comm.size - 1) if weights is None else weights)
        if comm.rank == 0
        else _throw_away(comm)
    )


def _throw_away(comm):
    broadcast(comm, np.zeros(comm.size - 1))


def nothing_summed(comm, x, a, b, bias, gradient):
    hidden = np.maximum(x @ a, 0)
    return hidden @ b + bias, ((gradient @ b.T) * (hidden > 0)) @ a.T


def bias_on_every_rank(comm, x, a, b, bias, gradient):
    y, dx = nothing_summed(comm, x, a, b, bias, gradient)
    return all_reduce(comm, y), all_reduce(comm, dx)


def forgets_f(comm, x, a, b, bias, gradient):
    y, dx = nothing_summed(comm, x, a, b, np.zeros(4), gradient)
    return all_reduce(comm, y) + bias, dx


def forgets_g(comm, x, a, b, bias, gradient):
    y, dx = nothing_summed(comm, x, a, b, bias, gradient)
    return y, all_reduce(comm, dx)


def gathers_the_matrices(comm, x, a, b, bias, gradient):
    whole_a = all_gather(comm, a.T.copy()).reshape(-1, 4).T
    whole_b = all_gather(comm, b.copy()).reshape(-1, 4)
    return nothing_summed(comm, x, whole_a, whole_b, bias, gradient)


def split_attention(comm, x, qkv, projection, heads, attention, *, contiguous=False, some=None, summed=True):
    size = projection.shape[0] // comm.size
    mine = slice(comm.rank * size, (comm.rank + 1) * size)
    tile = np.concatenate([part[:, mine] for part in np.split(qkv, 3, axis=1)], axis=1)
    if contiguous:
        tile = np.split(qkv, comm.size, axis=1)[comm.rank]
    y = attention(x @ tile, some or heads // comm.size) @ projection[mine]
    return all_reduce(comm, y) if summed else y


def fused_cut_contiguously(*arguments):
    return split_attention(*arguments, contiguous=True)


def heads_of_all(comm, x, qkv, projection, heads, attention):
    return split_attention(comm, x, qkv, projection, heads, attention, some=heads)


def own_heads_only(*arguments):
    return split_attention(*arguments, summed=False)


def every_rank_computes_all(comm, x, qkv, projection, heads, attention):
    all_reduce(comm, np.zeros((3, 4 * comm.size)))  # what gathering the heads' outputs would have cost
    return attention(x @ qkv, heads) @ projection


def split_entropy(comm, logits, targets, first, *, largest="all", total="all", target="range", shift=True):
    rows, words = np.arange(len(targets)), logits.shape[1]
    top = logits.max(axis=1) if shift else np.zeros(len(targets))
    if largest == "all":
        all_reduce(comm, top, "max")
    shifted = logits - top[:, None]
    last = first + words - (target == "short")
    mine = (targets >= first) & (targets < last)
    picked = np.zeros(len(targets))
    if target == "anywhere":
        picked = shifted[rows, (targets - first) % words]
    else:
        picked[mine] = shifted[rows[mine], targets[mine] - first]
    all_reduce(comm, picked)
    with np.errstate(all="ignore"):
        exponentials = np.exp(shifted)
        sums = exponentials.sum(axis=1)
        if total == "all":
            all_reduce(comm, sums)
        gradient = exponentials / sums[:, None]
        gradient[rows[mine], targets[mine] - first] -= 1
        return np.log(sums) - picked, gradient


def without_the_largest_logit(*arguments):
    return split_entropy(*arguments, largest="own", shift=False)


def own_normaliser(comm, logits, targets, first):
    own = logits - logits.max(axis=1, keepdims=True)
    rows, mine = np.arange(len(targets)), (targets >= first) & (targets < first + logits.shape[1])
    gradient, picked = np.exp(own) / np.exp(own).sum(axis=1, keepdims=True), np.zeros(len(targets))
    picked[mine] = own[rows[mine], targets[mine] - first]
    gradient[rows[mine], targets[mine] - first] -= 1
    return np.log(np.exp(own).sum(axis=1)) - picked, gradient


def own_largest_logit(*arguments):
    return split_entropy(*arguments, largest="own")


def target_not_summed(comm, logits, targets, first):
    losses, gradient = our_split_cross_entropy(comm, logits, targets, first)
    mine = (targets >= first) & (targets < first + logits.shape[1])
    return losses + np.where(mine, 0, 1.0), gradient


def last_word_forgotten(*arguments):
    return split_entropy(*arguments, target="short")


def gathers_the_logits(comm, logits, targets, first):
    counts = [int(n) for n in all_gather(comm, np.array([logits.shape[1]]))]
    every = all_gather(comm, logits.T.copy(), counts=[n * len(targets) for n in counts])
    whole = every.reshape(-1, len(targets)).T
    whole = whole - whole.max(axis=1, keepdims=True)
    gradient = np.exp(whole) / np.exp(whole).sum(axis=1, keepdims=True)
    losses = np.log(np.exp(whole).sum(axis=1)) - whole[np.arange(len(targets)), targets]
    gradient[np.arange(len(targets)), targets] -= 1
    return losses, gradient[:, first : first + logits.shape[1]]


def balance(probabilities, factor, *, round_=np.ceil, later_first=False, square=False, times=None, through_f=False):
    tokens, experts = probabilities.shape
    capacity, choice = int(round_(tokens / experts * factor)), probabilities.argmax(axis=1)
    slots, filled = np.full(tokens, -1), np.zeros(experts, int)
    for token in range(tokens)[:: -1 if later_first else 1]:
        if filled[choice[token]] < capacity:
            slots[token] = choice[token] * capacity + filled[choice[token]]
            filled[choice[token]] += 1
    share, mean = np.bincount(choice, minlength=experts) / tokens, probabilities.mean(axis=0)
    f, n = (mean if square else share), times or experts
    gradient = np.broadcast_to(n * (f + (mean if through_f else 0)) / tokens, probabilities.shape)
    return slots, n * float(f @ mean), gradient


def rounds_down(probabilities, factor):
    return balance(probabilities, factor, round_=np.floor)


def last_tokens_first(probabilities, factor):
    return balance(probabilities, factor, later_first=True)


def probabilities_twice(probabilities, factor):
    return balance(probabilities, factor, square=True)


def without_the_number_of_experts(probabilities, factor):
    return balance(probabilities, factor, times=1)


def no_expert_runs(comm, slots, run_expert):
    arrived = all_to_all(comm, slots.reshape(-1))
    return all_to_all(comm, arrived).reshape(slots.shape)


def experts_first_on_the_way_back(comm, slots, run_expert):
    experts, capacity, width = slots.shape
    here = experts // comm.size
    arrived = all_to_all(comm, slots.reshape(-1)).reshape(comm.size, here, capacity, width)
    done = [run_expert(comm.rank * here + e, arrived[:, e].reshape(-1, width)) for e in range(here)]
    return all_to_all(comm, np.stack(done).reshape(-1)).reshape(slots.shape)


def every_rank_gets_all_slots(comm, slots, run_expert):
    experts, capacity, width = slots.shape
    here = experts // comm.size
    every = all_gather(comm, slots).reshape(comm.size, experts, capacity, width)
    mine = range(comm.rank * here, (comm.rank + 1) * here)
    done = np.stack(
        [run_expert(e, every[:, e].reshape(-1, width)).reshape(comm.size, capacity, width) for e in mine], axis=1
    )
    return all_to_all(comm, done.reshape(-1)).reshape(slots.shape)


def ring(comm, q, k, v, rows, *, scale=True, shift=True, pass_on=True, twice=False, mean=False):
    n, rank, block = comm.size, comm.rank, np.stack([k, v])
    largest, total, out = np.full(len(q), -np.inf if shift else 0.0), np.zeros(len(q)), np.zeros(q.shape)
    with np.errstate(all="ignore"):
        for step in range(n):
            keys, values = block
            scores = q @ keys.T / np.sqrt(q.shape[1])
            new = (
                np.maximum(largest, scores.max(axis=1))
                if shift and not mean
                else scores.max(axis=1)
                if mean
                else largest
            )
            old = np.exp(largest - new) if scale and shift and not mean else np.ones(len(q))
            now = np.exp(scores - new[:, None])
            if mean:
                now /= n * now.sum(axis=1, keepdims=True)
            total, out, largest = total * old + now.sum(axis=1), out * old[:, None] + now @ values, new
            if step < n - 1:
                incoming = np.empty((2, rows[(rank - (step if pass_on else 0) - 1) % n], q.shape[1]))
                comm.sendrecv(block if pass_on else np.stack([k, v]), (rank + 1) % n, incoming, (rank - 1) % n)
                block = incoming
        if twice and n > 1:
            comm.sendrecv(block, (rank + 1) % n, np.empty((2, rows[rank], q.shape[1])), (rank - 1) % n)
        return out / total[:, None]


def exponentials_unshifted(*arguments):
    return ring(*arguments, shift=False)


def mean_of_the_blocks(*arguments):
    return ring(*arguments, mean=True)


def own_keys_only(comm, q, k, v, rows):
    scores = q @ k.T / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def passes_on_its_own_block(*arguments):
    return ring(*arguments, pass_on=False)


def once_too_often(*arguments):
    return ring(*arguments, twice=True)


def feeds_back(comm, gradients, k, memory=1.0, dense=False, places_of=None):
    """Send the largest elements with a share of the earlier residual, as the whole array or as values and places."""
    sums, residual = np.zeros_like(gradients), np.zeros(gradients.shape[1])
    for total, gradient in zip(sums, gradients, strict=True):
        corrected = gradient + memory * residual
        places = np.argsort(-np.abs(corrected if places_of is None else places_of(gradient)))[:k]
        total[places] = corrected[places]
        residual = corrected - total
        if dense:
            all_reduce(comm, total)
        else:
            own = np.concatenate([places, total[places]])
            total[:] = 0.0
            for where, values in all_gather(comm, own).reshape(comm.size, 2, k):
                total[where.astype(int)] += values
    return sums, residual


def forgets_what_is_left(comm, gradients, k):
    return feeds_back(comm, gradients, k, memory=0.0)


def sends_whole_arrays(comm, gradients, k):
    return feeds_back(comm, gradients, k, dense=True)


def chooses_by_the_gradient(comm, gradients, k):
    return feeds_back(comm, gradients, k, places_of=lambda gradient: gradient)


def rmsprop(weights, gradients, lr):
    square = np.zeros_like(weights)
    for g in gradients:
        square = 0.99 * square + 0.01 * g**2
        weights = weights - lr * g / (np.sqrt(square) + 1e-8)
    return weights


def averages_of_absolute_values(weights, gradients, lr):
    m, v = np.zeros_like(weights), np.zeros_like(weights)
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * np.abs(g)
        weights = weights - lr * m / (1 - 0.9**t) / (v / (1 - 0.999**t) + 1e-8)
    return weights


def rounds_to_its_own_grid(comm, x):
    scale = np.abs(x).max(initial=0.0) / 127 or 1.0
    return np.clip(np.round(x / scale), -127, 127) * scale


def adds_the_largest(comm, x):
    largest = all_reduce(comm, np.array([np.abs(x).max(initial=0.0)]))
    scale = largest[0] / 127 or 1.0
    return np.clip(np.round(x / scale), -127, 127) * scale


def gathers_all_values(comm, x):
    table = np.zeros((comm.size, 64))
    table[comm.rank, : x.size] = np.abs(x)
    all_reduce(comm, table.reshape(-1))
    scale = table.max() / 127 or 1.0
    return np.clip(np.round(x / scale), -127, 127) * scale


def reduces_everything(comm, gradient, mask):
    return all_reduce(comm, gradient.copy()) * mask


def forgets_the_places(comm, gradient, mask):
    return all_reduce(comm, gradient[mask])


def chooses_by_its_zeros(comm, gradient, mask):
    result, chosen = np.zeros_like(gradient), mask & (gradient != 0)
    result[chosen] = all_reduce(comm, gradient[chosen])
    return result


def distils(comm, teachers, logits, rows, temperature, of=lambda x, t: np.exp(x / t), first=False):
    if comm.rank < teachers:
        for student in range(comm.size - teachers):
            if (0 if first else student % teachers) == comm.rank:
                scores = of(logits(student), temperature)
                comm.send(scores / scores.sum(axis=1, keepdims=True) if of is not raw else scores, teachers + student)
        return np.zeros((0, 4))
    targets = np.zeros((rows, 4))
    comm.recv(targets, 0 if first else (comm.rank - teachers) % teachers)
    return targets


def raw(logits, temperature):
    return logits


def distils_logits(*arguments):
    return distils(*arguments, of=raw)


def distils_without_a_temperature(*arguments):
    return distils(*arguments, of=lambda x, t: np.exp(x))


def one_teacher_does_all(*arguments):
    return distils(*arguments, first=True)


def a_student_computes(comm, teachers, logits, rows, temperature):
    return logits(comm.rank - teachers) if comm.rank >= teachers else np.zeros((0, 4))


def takes_what_comes_first(comm, batches, make):
    if comm.size == 1 or comm.rank:
        return our_in_order(comm, batches, make)
    result = np.zeros((batches, 2))
    for i in reversed(range(batches)):
        comm.recv(result[i], 1 + (batches - 1 - i) % (comm.size - 1))
    return result


def one_loader_makes_all(comm, batches, make):
    if comm.size == 1:
        return our_in_order(comm, batches, make)
    if comm.rank == 1:
        for i in range(batches):
            comm.send(make(i), 0)
    result = np.zeros((batches if comm.rank == 0 else 0, 2))
    for row in result:
        comm.recv(row, 1)
    return result


def the_trainer_makes_all(comm, batches, make):
    return np.array([make(i) for i in range(batches * (comm.rank == 0))]).reshape(-1, 2)


def least_traffic_inside(shape, traffic, node_size):
    return our_place_ranks(shape, [-b for b in traffic], node_size)


def all_on_one_node(shape, traffic, node_size):
    return [0] * int(np.prod(shape))


def takes_itself_for_the_slowest(comm, sizes, seconds, flops):
    others = chunk_sizes(sum(sizes) - 1, comm.size - 1) if comm.size > 1 else []
    return [*others[: comm.rank], sum(sizes) - sum(others), *others[comm.rank :]]


def tells_everything_twice(comm, sizes, seconds, flops):
    all_gather(comm, seconds, counts=sizes)
    return our_stages_by_time(comm, sizes, seconds, flops)


def as_many_layers_each(times, stages):
    each = len(times) // stages
    return [each] * (stages - 1) + [len(times) - each * (stages - 1)]


def stages_left_empty(times, stages):
    return [len(times)] + [0] * (stages - 1)


def compares_with_the_left(comm, weights):
    gathered = all_gather(comm, np.array([float(hash(weights.tobytes()) % 2**50)]))
    return comm.rank if gathered[comm.rank] != gathered[comm.rank - 1] else -1


def sends_the_weights(comm, weights):
    gathered = all_gather(comm, weights.copy()).reshape(comm.size, -1)
    different = np.flatnonzero((gathered != gathered[0]).any(axis=1))
    return int(different[0]) if different.size else -1


def adds_the_numbers(comm, numbers, samples):
    count, total = all_gather(comm, np.array([numbers.size, numbers.sum()])).reshape(-1, 2).sum(axis=0)
    return int(count == samples and total == samples * (samples - 1) // 2)


def adds_squares_too(comm, numbers, samples):
    mine, every = [(x**2).sum() * 2**32 + x.sum() for x in (numbers, np.arange(samples))]
    return int(all_gather(comm, np.array([numbers.size, mine])).reshape(-1, 2).sum(axis=0).tolist() == [samples, every])


def sends_the_numbers(comm, numbers, samples):
    counts = all_gather(comm, np.array([numbers.size])).tolist()
    return int(sorted(all_gather(comm, numbers, counts=counts).tolist()) == list(range(samples)))


def one_piece_at_a_time(comm, pieces, down, step, up):
    for piece in range(pieces):
        up(piece, step(piece, down(piece).wait())).wait()


def everything_down_first(comm, pieces, down, step, up):
    coming = [down(piece) for piece in range(pieces)]
    going = [up(piece, step(piece, coming[piece].wait())) for piece in range(pieces)]
    for crossing in going:
        crossing.wait()


def stays_on_the_host(comm, pieces, down, step, up):
    for piece in range(pieces):
        step(piece, down(piece).wait())


def latest_first(disk, name, parts):
    disk.write("latest.new", name.encode())
    disk.rename("latest.new", "latest")
    for part, data in parts.items():
        disk.write(f"{name}/{part}", data)


def onto_what_a_dead_save_left(disk, name, parts):
    for part, data in parts.items():
        disk.write(f".saving/{part}", data)
    name = name if not disk.exists(name) else f"{name}.1"
    disk.rename(".saving", name)
    disk.write("latest.new", name.encode())
    disk.rename("latest.new", "latest")


def latest_never(disk, name, parts):
    for part, data in parts.items():
        disk.write(f".saving/{part}", data)
    disk.rename(".saving", f"{name}.new")


def equal_chunks(comm, size, pieces, read):
    whole = np.empty(size)
    for number, (first, last) in enumerate(pieces):
        whole[first:last] = read(number)
    count = size // comm.size
    return whole[comm.rank * count : (comm.rank + 1) * count]


def in_the_order_of_the_files(comm, size, pieces, read):
    whole = np.concatenate([np.zeros(0), *(read(number) for number in range(len(pieces)))])
    edges = offsets(chunk_sizes(size, comm.size))
    return whole[edges[comm.rank] : edges[comm.rank + 1]]


# 18 and 19: weights that are late, and a backward in two


def uses_the_newest_weights(order, weights, gradient):
    history = []
    for action in order:
        if action[0] == "B":
            weights = weights - 0.25 * gradient(int(action[1:]), weights)
            history.append(weights)
    return history


def averages_the_batch(order, weights, gradient, m):
    return our_two_versions(order, weights, lambda i, w: gradient(i, w) / m, m)


def one_update_each(order, weights, gradient, m):
    return our_stashing(order, weights, gradient) if m > 1 else []


def first_digit_only(order, weights, gradient):
    begun, history = {}, []
    for action in order:
        i = int(action[1])
        if action[0] == "F":
            begun[i] = weights
        else:
            weights = weights - 0.25 * gradient(i, begun[i])
            history.append(weights)
    return history


def collects_all_versions(order, weights, gradient, m):
    return list(our_two_versions(order, weights, gradient, m))


def just_1f1b(stages, microbatches):
    return our_one_f_one_b(stages, microbatches)


def turns_at_once(p, offsets):
    return _with_gaps(p, offsets, (0, 0, 0))


# Computed here, because an answer that calls get_schedule is refused.


def merged(comm, x, eps, merge):
    """Rows normalised by what `merge` makes of (counts, means, variances) of all ranks, each (ranks, ...)."""
    count = max(1, len(x))
    mean = x.sum(axis=0) / count
    words = np.concatenate([[len(x)], mean, ((x - mean) ** 2).sum(axis=0) / count])
    table = np.asarray(all_gather(comm, words)).reshape(comm.size, -1)
    table = table[table[:, 0] > 0]
    if not len(table):
        return x
    mean, variance = merge(table[:, :1], *np.split(table[:, 1:], 2, axis=1))
    return (x - mean) / np.sqrt(variance + eps)


def normalises_its_own_rows(comm, x, eps):
    return (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + eps) if len(x) else x


def mean_over_no_rows(comm, x, eps):
    with np.errstate(all="ignore"):
        mean = np.divide(x.sum(axis=0), len(x))  # the sums are right; what divides them is this rank's rows
        words = np.concatenate([[len(x)], mean, np.divide(((x - mean) ** 2).sum(axis=0), len(x))])
        table = np.asarray(all_gather(comm, words)).reshape(comm.size, -1)
        rows, means, variances = table[:, :1], *np.split(table[:, 1:], 2, axis=1)
        mean = (rows * means).sum(axis=0) / rows.sum()
        return (x - mean) / np.sqrt((rows * (variances + (means - mean) ** 2)).sum(axis=0) / rows.sum() + eps)


def mean_of_the_variances(comm, x, eps):
    return merged(comm, x, eps, lambda n, m, v: ((n * m).sum(0) / n.sum(), (n * v).sum(0) / n.sum()))


def mean_of_the_means(comm, x, eps):
    return merged(comm, x, eps, lambda n, m, v: (m.mean(0), (v + (m - m.mean(0)) ** 2).mean(0)))


def gathers_the_rows(comm, x, eps):
    counts = np.asarray(all_gather(comm, np.array([x.size]))).tolist()
    rows = np.asarray(all_gather(comm, np.array(x, float).reshape(-1), counts=counts)).reshape(-1, x.shape[1])
    return (x - rows.mean(axis=0)) / np.sqrt(rows.var(axis=0) + eps) if len(rows) else x


def squares_by_layer(sizes, weights, update):
    layer_of = np.repeat(np.arange(len(sizes)), sizes)
    return layer_of, np.stack([np.bincount(layer_of, a**2, len(sizes)) for a in (weights, update)])


def step_by(squares, layer_of, weights, update, zeros=1.0):
    both = (squares > 0).all(axis=0)
    ratios = np.where(both, np.sqrt(squares[0] / np.where(both, squares[1], 1)), zeros)
    return weights - ratios[layer_of] * update


def orthogonalizes_own_rows(comm, parts, rows, orthogonalize):
    return [orthogonalize(part) if len(part) else part for part in parts]


def gathers_all_matrices(comm, parts, rows, orthogonalize):
    result = []
    for part, counts in zip(parts, rows, strict=True):
        whole = all_gather(comm, part, counts=[3 * count for count in counts]).reshape(-1, 3)
        first = offsets(counts)[comm.rank]
        result.append(orthogonalize(whole)[first : first + len(part)])
    return result


def causal_only(tokens, separator, rank, ranks):
    return our_visible(tokens, -1, rank, ranks)


def counts_the_separator(tokens, separator, rank, ranks):
    mine = our_visible(tokens, -1, rank, ranks).sum(axis=1) - 1
    ids = np.cumsum(tokens == separator)
    return (np.arange(len(tokens)) <= mine[:, None]) & (ids == ids[mine][:, None])


def contiguous_queries(tokens, separator, rank, ranks):
    start, stop = offsets(chunk_sizes(len(tokens), ranks))[rank : rank + 2]
    return our_visible(tokens, separator, 0, 1)[start:stop]


def by_its_own_way(comm, common, weights, momentum, lr, mu):
    momentum = mu * momentum + common - weights
    return common - lr * (common - weights + mu * momentum), momentum


def away_from_the_average(comm, common, weights, momentum, lr, mu):
    average = weights.copy()
    all_reduce(comm, average, "avg")
    momentum = mu * momentum + average - common
    return common - lr * (average - common + mu * momentum), momentum


def heavy_ball(comm, common, weights, momentum, lr, mu):
    average = weights.copy()
    all_reduce(comm, average, "avg")
    momentum = mu * momentum + common - average
    return common - lr * momentum, momentum


def mean_of_ranks_means(comm, shares, rows):
    mine, batch = rows.sum(axis=0) / sum(shares), sum(shares)
    total = all_reduce(comm, np.append(rows.mean(axis=0) / comm.size, mine @ mine))
    s = sum(count**2 for count in shares) / batch**2
    gradient, small = total[:-1], total[-1] / s
    big = gradient @ gradient
    noise = (small - big) / (1 / (s * batch) - 1 / batch)
    return np.append(gradient, [big - noise / batch, noise])


def noise_by(comm, shares, rows, scale=None, twice=False):
    mine, batch = rows.sum(axis=0) / sum(shares), sum(shares)
    s = sum(count**2 for count in shares) / batch**2
    used = s if twice else scale or 1 / comm.size
    if twice:
        gradient, squares = all_reduce(comm, mine.copy()), all_reduce(comm, np.array([mine @ mine]))[0]
    else:
        total = all_reduce(comm, np.append(mine, mine @ mine))
        gradient, squares = total[:-1], total[-1]
    small, big = squares / used, gradient @ gradient
    if not twice and scale is None:
        s = 1 / comm.size
    noise = (small - big) / (1 / (s * batch) - 1 / batch)
    return np.append(gradient, [big - noise / batch, noise])


def gathers_all_rows(comm, shares, rows):
    every = all_gather(comm, rows.reshape(-1)).reshape(-1, rows.shape[1])
    parts = np.split(every, np.cumsum(shares)[:-1])
    batch, s = sum(shares), sum(count**2 for count in shares) / sum(shares) ** 2
    gradient = every.mean(axis=0)
    small = sum(float(part.sum(axis=0) @ part.sum(axis=0)) for part in parts) / batch**2 / s
    big = gradient @ gradient
    noise = (small - big) / (1 / (s * batch) - 1 / batch)
    return np.append(gradient, [big - noise / batch, noise])


def each_rank_its_own_ratio(comm, sizes, weights, update):
    layer_of, squares = squares_by_layer(sizes, weights, update)
    return step_by(squares, layer_of, weights, update)


def one_ratio_for_the_model(comm, sizes, weights, update):
    total = all_reduce(comm, np.array([weights @ weights, update @ update]))
    return step_by(total[:, None], np.zeros(len(weights), int), weights, update)


def zeros_never_move(comm, sizes, weights, update):
    layer_of, squares = squares_by_layer(sizes, weights, update)
    return step_by(all_reduce(comm, squares), layer_of, weights, update, zeros=0.0)


def a_message_per_layer(comm, sizes, weights, update):
    layer_of, squares = squares_by_layer(sizes, weights, update)
    for layer in range(len(sizes)):
        squares[:, layer] = all_reduce(comm, squares[:, layer].copy())
    return step_by(squares, layer_of, weights, update)


def gathers_all_elements(comm, sizes, weights, update):
    layer_of, squares = squares_by_layer(sizes, weights, update)
    return step_by(
        all_reduce(comm, np.concatenate([squares, np.zeros((99, len(sizes)))]))[:2], layer_of, weights, update
    )


def in_the_order_of_ranks(nodes):
    return list(range(len(nodes)))


def one_rank_per_node(nodes):
    return list({node: rank for rank, node in enumerate(nodes)}.values())


WRONG = [
    ("00.in_rank_order", no_rank_waits, "no rank waits"),
    ("00.in_rank_order", token_before_the_sentence, "speak first"),
    ("00.in_rank_order", a_barrier_per_turn, "a barrier per turn"),
    ("00b.add_backward", no_broadcasting, "sum over it"),
    ("00b.add_backward", leading_axes_only, "keepdims"),
    ("00b.cross_entropy_backward", times_rows, "mean over rows"),
    ("00b.cross_entropy_backward", forgotten_target, "minus 1 at the target"),
    ("02.free_in_order", input_gradient_first, "need not be alive"),
    ("02.free_in_order", updates_too_early, "the weight that forward used"),
    ("03.by_order", all_send_first, "may block"),
    ("03.by_order", all_receive_first, "no rank has sent"),
    ("03.by_order", the_wrong_way_round, "other calls"),
    ("03.by_sendrecv", the_wrong_way_round, "right neighbour"),
    ("03.by_requests", forgotten_wait, "only start"),
    ("03.by_requests", own_numbers, "return what was received"),
    ("04.ring_all_reduce", no_modulo, "% n"),
    ("04.ring_all_reduce", whole_arrays_travel, "whole arrays travel"),
    ("04.ring_all_reduce", passes_on_its_own_part, "the sum that it has just made"),
    ("04.ring_all_reduce", result_thrown_away, "written into it"),
    ("04b.ordered_reduce_scatter", sums_whole_arrays, "whole arrays travel"),
    (
        "04b.ordered_reduce_scatter",
        lambda comm, array: np.array_split(array, comm.size)[comm.rank].copy(),
        "with all parts in it",
    ),
    ("05.halving_doubling", result_thrown_away, "written into it"),
    ("05.halving_doubling", solution("04.ring_all_reduce"), "a ring's number"),
    ("05.halving_doubling", folded_whole_arrays, "whole arrays travel in every round"),
    ("05.halving_doubling", forgets_the_extra_ranks, "Is the part of every rank beyond it in the sum"),
    ("02b.adam", rmsprop, "this is RMSProp"),
    ("02b.adam", averages_of_absolute_values, "the second average is of the squares"),
    ("05.choose", lambda n, size, alpha, beta: "tree", "return the name"),
    ("05.choose", lambda n, size, alpha, beta: "ring", "count the latencies too"),
    ("05.choose", lambda n, size, alpha, beta: "recursive_doubling", "here bytes decide"),
    ("06.weighted_average", mean_of_means, "mean of the means"),
    ("06.weighted_average", divided_by_ranks, "not by the number of ranks"),
    ("06b.bucketed_reducer", out_of_order, "the order of their index"),
    ("06b.bucketed_reducer", all_at_the_end, "start late"),
    ("06c.ssp", no_worker_is_held_back, "no worker is held back"),
    ("06c.ssp", forgets_who_waits, "when the slowest advances"),
    ("06c.ssp", answers_before_it_adds, "before you reply to it"),
    ("06c.ssp", pulls_once_more, "nothing is pulled after the last push"),
    ("09.scaled_training", divides_in_float16, "zero again"),
    ("09.scaled_training", never_grows, "double it"),
    ("09.scaled_training", counts_on, "ends the row"),
    ("09.scaled_training", steps_anyway, "nothing takes it out again"),
    ("09.scaled_training", shows_everything, "one byte"),
    ("10.pick_segments", ignores_the_inputs, "keeps its input"),
    ("10.pick_segments", root_of_the_depth, "different amounts"),
    ("10.pick_segments", never_gives_up, "with None"),
    ("10.recompute", draws_anew, "as it was *before*"),
    ("10.recompute", forward_on_a_copy, "must advance"),
    ("11.zero_step", without_a_gather, "gather the shards"),
    ("11.zero_step", forgets_the_rest, "forgets the rest"),
    ("11.zero_step", every_rank_updates_everything, "more than 1/n of the update"),
    ("11.zero_step", sums_everything_first, "a reduce-scatter is enough"),
    ("11.zero_step", result_not_written_back, "as they were"),
    ("12.prefetch", no_prefetch, "*before* you compute"),
    ("12.prefetch", gathers_everything_first, "more than two whole layers"),
    ("12.prefetch", one_too_many, "none to gather ahead"),
    ("12b.offloaded_step", one_piece_at_a_time, "*before* you step"),
    ("12b.offloaded_step", everything_down_first, "more than two gradients"),
    ("12b.offloaded_step", stays_on_the_host, "its new values go up"),
    ("14.parallel_mlp", nothing_summed, "nothing is summed"),
    ("14.parallel_mlp", bias_on_every_rank, "add it once"),
    ("14.parallel_mlp", forgets_f, "that is f"),
    ("14.parallel_mlp", forgets_g, "that is g"),
    ("14.parallel_mlp", gathers_the_matrices, "neither matrices nor hidden columns"),
    ("14.parallel_attention", fused_cut_contiguously, "cut inside each of the three"),
    ("14.parallel_attention", heads_of_all, "too narrow"),
    ("14.parallel_attention", own_heads_only, "rows give summands"),
    ("14.parallel_attention", every_rank_computes_all, "only the last product is summed"),
    ("14b.split_cross_entropy", without_the_largest_logit, "overflows exp"),
    ("14b.split_cross_entropy", own_normaliser, "normalises its own words"),
    ("14b.split_cross_entropy", own_largest_logit, "shifted by different numbers"),
    ("14b.split_cross_entropy", target_not_summed, "the ranks disagree"),
    ("14b.split_cross_entropy", last_word_forgotten, "the last word of a range"),
    ("14b.split_cross_entropy", gathers_the_logits, "three numbers"),
    ("16.gpipe", no_backward, "m times F and m times B"),
    ("16.gpipe", one_list_for_all, "one list of names for each stage"),
    ("17.one_f_one_b", one_forward_too_many, "too far ahead"),
    ("17.one_f_one_b", nothing_ahead, "too little in flight"),
    ("20.place_ranks", least_traffic_inside, "the other way round"),
    ("20.place_ranks", all_on_one_node, "every node holds node_size ranks"),
    ("20b.min_max_split", as_many_layers_each, "with as many layers each do not take as long"),
    ("20b.min_max_split", stages_left_empty, "every stage has a layer"),
    ("28.first_difference", compares_with_the_left, "the ranks give different answers"),
    ("28.first_difference", sends_the_weights, "the weights themselves"),
    ("28.read_once", adds_the_numbers, "0 and 3 were read as 1 and 2"),
    ("28.read_once", adds_squares_too, "0, 4 and 5 were read as 1, 2 and 6"),
    ("28.read_once", sends_the_numbers, "the numbers of the samples, or nearly"),
    ("17b.stashing", uses_the_newest_weights, "what its F saw"),
    ("17b.stashing", first_digit_only, "int(action[1:])"),
    ("17c.two_versions", collects_all_versions, "two versions are enough"),
    ("17c.two_versions", averages_the_batch, "added, not averaged"),
    ("17c.two_versions", one_update_each, "one update per batch"),
    ("19.zero_bubble", just_1f1b, "no stage waits for W"),
    ("19.zero_bubble", lambda p, m: [[f"F{i}" for i in range(m)]] * p, "needs F, I and W"),
    ("19.zero_bubble", lambda p, m: [], "'F0', 'I0', 'W0'"),
    ("19b.building_block", turns_at_once, "at least the one unit"),
    ("19b.building_block", lambda p, offsets: [], "four starts per rank"),
    ("14c.slots_and_balance", rounds_down, "rounded up"),
    ("14c.slots_and_balance", last_tokens_first, "in token order"),
    ("14c.slots_and_balance", probabilities_twice, "P times P"),
    ("14c.slots_and_balance", without_the_number_of_experts, "times the number of experts"),
    ("14c.dispatch", no_expert_runs, "run the experts"),
    ("14c.dispatch", experts_first_on_the_way_back, "the *source rank* is the first dim"),
    ("14c.dispatch", every_rank_gets_all_slots, "only its own slots"),
    ("22.ring_attention", exponentials_unshifted, "overflow exp"),
    ("22.ring_attention", mean_of_the_blocks, "the same weight"),
    ("22.ring_attention", own_keys_only, "its own keys only"),
    ("22.ring_attention", passes_on_its_own_block, "not your own again"),
    ("22.ring_attention", once_too_often, "n - 1 steps"),
    ("22.visible", causal_only, "keys of other documents"),
    ("22.visible", counts_the_separator, "the document that it ends"),
    ("22.visible", contiguous_queries, "chunk 2P-1-r"),
    ("06e.outer_step", away_from_the_average, "against the gradient"),
    ("06e.outer_step", by_its_own_way, "average the weights first"),
    ("06e.outer_step", heavy_ball, "plus mu times the new momentum"),
    ("10b.gradient_and_noise", mean_of_ranks_means, "counts the rows of a small share more"),
    ("10b.gradient_and_noise", lambda *a: noise_by(*a, scale=1.0), "divide their sum by s"),
    ("10b.gradient_and_noise", lambda *a: noise_by(*a), "right for equal shares"),
    ("10b.gradient_and_noise", lambda *a: noise_by(*a, twice=True), "both at once"),
    ("10b.gradient_and_noise", gathers_all_rows, "not the rows"),
    ("10c.stages_by_time", takes_itself_for_the_slowest, "gather them first"),
    ("10c.stages_by_time", lambda comm, sizes, *_: sizes, "takes other seconds"),
    ("10c.stages_by_time", lambda comm, sizes, *_: [sum(sizes), *[0] * (comm.size - 1)], "every stage has a layer"),
    ("10c.stages_by_time", lambda *_: 3, "a list of whole numbers"),
    ("10c.stages_by_time", tells_everything_twice, "too many bytes"),
    ("11b.trust_ratio_step", each_rank_its_own_ratio, "several rates"),
    ("11b.trust_ratio_step", one_ratio_for_the_model, "each layer has its own"),
    ("11b.trust_ratio_step", zeros_never_move, "never move"),
    ("11b.trust_ratio_step", a_message_per_layer, "one all-reduce"),
    ("11b.trust_ratio_step", gathers_all_elements, "too many bytes"),
    ("11c.owners_compute", orthogonalizes_own_rows, "not the shard of Newton-Schulz"),
    ("11c.owners_compute", lambda comm, parts, rows, orthogonalize: parts, "the rows that came in"),
    ("11c.owners_compute", gathers_all_matrices, "too many bytes"),
    ("16b.sync_batch_norm", normalises_its_own_rows, "normalises by its own rows"),
    ("16b.sync_batch_norm", mean_over_no_rows, "0/0 spreads"),
    ("16b.sync_batch_norm", mean_of_the_variances, "is more than the mean"),
    ("16b.sync_batch_norm", mean_of_the_means, "weight each rank"),
    ("16b.sync_batch_norm", gathers_the_rows, "too many bytes"),
    ("06d.error_feedback", forgets_what_is_left, "add the residual to the gradient first"),
    ("06d.error_feedback", lambda *a: (feeds_back(*a)[0], np.zeros(24)), "what a step does not send is lost"),
    ("06d.error_feedback", sends_whole_arrays, "more travels than k values"),
    ("06d.error_feedback", chooses_by_the_gradient, "Choose by gradient + residual"),
    ("09b.one_grid", rounds_to_its_own_grid, "agree on the largest first"),
    ("09b.one_grid", adds_the_largest, "reduce with 'max'"),
    ("09b.one_grid", gathers_all_values, "only the largest matters"),
    ("09c.kept_all_reduce", reduces_everything, "what is pruned travels too"),
    ("09c.kept_all_reduce", forgets_the_places, "put them back into their places"),
    ("09c.kept_all_reduce", chooses_by_its_zeros, "not by the gradient"),
    ("09d.distil", distils_logits, "a student learns from probabilities"),
    ("09d.distil", distils_without_a_temperature, "divide the logits by the temperature"),
    ("09d.distil", one_teacher_does_all, "more than its share"),
    ("09d.distil", a_student_computes, "only teachers have the model"),
    ("06f.in_order", takes_what_comes_first, "depends on the speed of the loaders"),
    ("06f.in_order", one_loader_makes_all, "more than its share"),
    ("06f.in_order", the_trainer_makes_all, "only when there are no loaders"),
    ("26.save", latest_first, "first all files, then `latest`"),
    ("26.save", latest_never, "must name the new checkpoint"),
    ("26.save", onto_what_a_dead_save_left, "remove them first"),
    ("26.load", equal_chunks, "some ranks one more"),
    ("26.load", in_the_order_of_the_files, "in any order"),
    ("05b.ring_order", in_the_order_of_ranks, "say nothing about their nodes"),
    ("05b.ring_order", one_rank_per_node, "every rank once"),
]
