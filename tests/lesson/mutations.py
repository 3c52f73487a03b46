"""Wrong answers to every exercise: our solutions with one text replaced, as a slip of the pen would.

Each has words of the hint that it must get. Where these are empty, it is refused without a hint that says why: the bank
counts them, see bank.py.
"""

MUTATIONS = {
    "00.in_rank_order": [
        (
            "comm.send(token, comm.rank + 1)",
            "comm.send(comm.rank, comm.rank + 1)",
            "a message is an array: np.array([value])",
        ),
        ("comm.recv(token, comm.rank - 1)", "comm.recv(token, 0)", "a token is sent that no rank receives, or"),
        ("if comm.rank < comm.size - 1:", "if comm.rank < comm.size - 2:", "a token is sent that no rank receives, or"),
        ("if comm.rank > 0:", "if comm.rank > 1:", "a token is sent that no rank receives, or"),
    ],
    "00b.add_backward": [
        (
            "return new.sum(axis=stretched, keepdims=True)",
            "return new.reshape(shape)",
            "reshape and broadcast_to add nothing up:",
        ),
        (
            "return fold(shape_a), fold(shape_b)",
            "return np.broadcast_to(gradient, shape_a), np.broadcast_to(gradient, shape_b)",
            "reshape and broadcast_to add nothing up:",
        ),
        (
            "new = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))",
            "new = gradient.mean(axis=tuple(range(gradient.ndim - len(shape))))",
            "the shape is right and the values are not:",
        ),
        (
            "range(gradient.ndim - len(shape))",
            "range(len(shape), gradient.ndim)",
            "a gradient has the shape of its tensor:",
        ),
    ],
    "00b.cross_entropy_backward": [
        ("targets] -= 1", "targets] -= len(targets)", "the 1 at the target is divided by the"),
        (
            "probabilities[np.arange(len(targets)), targets] -= 1",
            "probabilities[:, targets] -= 1",
            "1 is subtracted from whole columns: each",
        ),
        (
            "np.exp(logits - logits.max(axis=1, keepdims=True))",
            "np.exp(np.clip(logits, -30, 30))",
            "right for small logits, wrong for those in",
        ),
        (
            "return probabilities / len(targets)",
            "return probabilities / probabilities.size",
            "every number is 0.2 times the expected one:",
        ),
        ("targets] -= 1", "targets] += 1", "1 is added at the target; the gradient is"),
    ],
    "02.free_in_order": [
        (
            "        layer.update(weight_gradient)\n",
            "        layer.update(weight_gradient)\n        layer.update(weight_gradient)\n",
            "each layer makes its step twice: call",
        ),
        ("layer.update(weight_gradient)", "layer.update(-weight_gradient)", "each step goes the wrong way: update"),
        ("    del x  # the last output: no layer needs it\n", "", "activations are alive after their last use:"),
        ("        del weight_gradient\n", "", "two weight gradients are alive at once:"),
    ],
    "03.by_order": [
        ("if comm.rank % 2 == 0:", "if comm.rank == 0:", "correct, but slower than two rounds: some"),
        (
            "        comm.send(outgoing, right)\n    return incoming",
            "        comm.send(incoming, right)\n    return incoming",
            "",
        ),
        ("    if comm.size == 1:\n        return outgoing.copy()\n", "", "with one rank the right neighbour is the"),
        (
            "        comm.recv(incoming, left)\n        comm.send(outgoing, right)",
            "        comm.recv(incoming, right)\n        comm.send(outgoing, left)",
            "follow the circle in the report: which of",
        ),
        ("if comm.rank % 2 == 0:", "if comm.rank % 2:", "slower than two rounds"),
    ],
    "03.by_sendrecv": [
        (
            "comm.sendrecv(outgoing, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)",
            "comm.sendrecv(outgoing, (comm.rank + 1) % comm.size, incoming, (comm.rank + 1) % comm.size)",
            "every rank waits in its receive, and no",
        ),
        ("    return incoming", "    return outgoing + incoming", "every number is 2 times the expected one:"),
    ],
    "03.by_requests": [],
    "02b.adam": [
        ("m / (1 - 0.9**t), v / (1 - 0.999**t)", "m, v", "both averages begin at 0 and are too small"),
        ("v / (1 - 0.999**t)", "v", "the average of the squares begins at 0, too"),
        ("enumerate(gradients, 1)", "enumerate(gradients)", "the first step has t = 1"),
        (" + 1e-8", "", "add 1e-8 to the root"),
        ("lr * mean", "lr * g", "this steps by the gradient itself"),
        ("np.sqrt(square)", "square", "divide by the root of the average"),
    ],
    "04.ring_all_reduce": [
        (
            "comm.sendrecv(leaving, right, arriving, left)",
            "own = arriving.copy()\n        comm.sendrecv(leaving, right, arriving, left)\n        arriving += own",
            "the second half adds: a complete chunk",
        ),
        (
            "incoming = np.empty_like(arriving)",
            "incoming = np.empty(arriving.size, np.float32)",
            "the two sides of a message have different",
        ),
        ("arriving += incoming", "arriving -= incoming", "in the first half what comes in is added to"),
        (
            "(rank - 1 - step) % n], chunks[(rank - 2 - step) % n]",
            "(rank - step) % n], chunks[(rank - 1 - step) % n]",
            "every number is that of one rank: nothing is",
        ),
    ],
    "05.halving_doubling": [
        (
            "    if rank < extra:\n        comm.send(array, rank + power)\n",
            "",
            "a rank beyond the largest power of two",
        ),
        ("keep += part", "keep += give", "two arrays do not fit together: print the"),
        ("while distance < power:", "while distance < power // 2:", "in the halving what comes in is added to"),
        ("power = 1 << (n.bit_length() - 1)", "power = n", "rank xor distance is a rank only when n is"),
        ("keep += part", "keep -= part", "in the halving what comes in is added to"),
    ],
    "05.choose": [
        ("2 * rounds * alpha + 2 * share", "3 * rounds * alpha + 2 * share", "here bytes decide"),
        ("(n - 1) / n", "(n + 1) / n", "here bytes decide"),
        ('"binomial": 2 * rounds', '"binomial": rounds', "a tree up and a tree down take 2 log2 n"),
        (
            "2 * rounds * alpha + 2 * share * beta * size",
            "rounds * alpha + 2 * share * beta * size",
            "here latency decides: rabenseifner has",
        ),
        ("2 * (n - 1) * alpha", "(n - 1) / n * alpha", "a ring sends as few bytes as rabenseifner,"),
        ("return min(costs", "return max(costs", "a tree up and a tree down take 2 log2 n"),
    ],
    "06.weighted_average": [
        (
            "    all_reduce(comm, weighted)\n",
            "    if count > 0:\n        all_reduce(comm, weighted)\n",
            "every rank takes part in a collective: one",
        ),
        ("gradient * count, count", "gradient, count", "these are means divided by the rows once"),
        (
            "return weighted[:-1] / weighted[-1]",
            "return weighted[:-1] / weighted[-1] / comm.size",
            "every number is 1/n times the expected one:",
        ),
        (
            "return weighted[:-1] / weighted[-1]",
            "return weighted / weighted[-1]",
            "the answer has one number too many: the",
        ),
    ],
    "06b.bucketed_reducer": [
        ("and not any(", "and not all(", "a bucket left before it was whole: all of"),
        (
            "    launch_complete_buckets()  # a bucket in which no parameter is used is complete at once\n",
            "",
            "some rank never launched a bucket that the",
        ),
        ("left[parameter] -= 1", "left[parameter] = 0", "a bucket left before it was whole: a"),
        ("    for work in works:\n        work.wait()\n", "", "a sum was launched and never waited for:"),
    ],
    "06c.ssp": [
        ("<= bound]", "< bound]", "a worker waits although the bound lets it"),
        ("<= bound]", "<= bound + 1]", "off by one: a worker may start clock c when"),
        ("if done[worker] < steps:", "if done[worker] <= steps:", "the server replies to a worker that has"),
        ("        weights += gradient\n", "        weights = gradient\n", "the weights are the sum of all gradients:"),
    ],
    "09.scaled_training": [
        ("scale / 2, 0", "scale / 4, 0", "an overflow halves the scale, three good"),
        (
            "gradient.astype(np.float32) / np.float32(scale)",
            "gradient.astype(np.float32)",
            "the step takes the gradient divided by the",
        ),
        (
            "            scale, good = scale * 2, 0\n",
            "            scale = scale * 2\n",
            "an overflow halves the scale, three good",
        ),
        ('        all_reduce(comm, overflow, "max")\n', "", "one rank saw an overflow and skipped the"),
    ],
    "10.pick_segments": [
        ("room = budget - count * boundary", "room = budget", "even more and smaller segments may fit: try"),
        ("range(1, len(saved) + 1)", "range(1, len(saved))", "even more and smaller segments may fit: try"),
        ("[*segments, 0], 0", "[*segments, 0], filled", "even more and smaller segments may fit: try"),
        (
            "if filled + nbytes > room and",
            "if filled + nbytes >= room and",
            "it fits, and larger segments fit too: try 1",
        ),
    ],
    "10.recompute": [
        ("segment.gradient(x, g,", "segment.gradient(x, g * 2,", "the mask is right and the gradient is twice"),
        ("copy.deepcopy(before))", "before)", "the second backward differs from the first:"),
        (
            "    before = copy.deepcopy(rng)\n    y = segment.forward(x, rng)\n",
            "    y = segment.forward(x, rng)\n    before = copy.deepcopy(rng)\n",
            "the gradient belongs to another mask than",
        ),
    ],
    "11.zero_step": [
        (
            "update(mine, reduce_scatter(comm, gradient))",
            "update(mine, reduce_scatter(comm, gradient) / comm.size)",
            "this is a step by the mean of the ranks'",
        ),
        ("        start += array.size\n", "", "each array gets back its own part of the"),
        (
            "update(mine, reduce_scatter(comm, gradient))",
            "update(mine, gradient[comm.rank * size : (comm.rank + 1) * size])",
            "each shard steps by the gradient of one rank",
        ),
        (
            "[*(array.reshape(-1) for array in weights), padding]",
            "[array.reshape(-1) for array in weights] + [padding][: len(weights) * 0]",
            "the list of weights may be empty:",
        ),
    ],
    "12.prefetch": [
        (
            "coming: Any = gather(0) if layers else None",
            "coming: Any = gather(0)",
            "there may be no layer at all: gather none",
        ),
        ("x = compute(layer, weights, x)", "compute(layer, weights, x)", "x is what came in: each layer replaces it,"),
        ("coming = gather(layer + 1)", "coming = gather(layer)", "layer i is computed from its own weights"),
    ],
    "12b.offloaded_step": [
        (
            "        if going is not None:\n            going.wait()\n        going = up",
            "        going = up",
            "something was sent over the link and never",
        ),
        (
            "    if going is not None:\n        going.wait()\n\n\nSOL",
            "\n\nSOL",
            "something was sent over the link and never",
        ),
        (
            "coming = down(piece + 1) if piece + 1 < pieces else None",
            "coming = down(piece + 1)",
            "after the last piece there is none to bring",
        ),
    ],
    "14.parallel_mlp": [
        ("(gradient @ b.T) * (hidden > 0)", "gradient @ b.T", "y is right, x's gradient is without the"),
        (
            "return y, all_reduce(comm, d_hidden @ a.T)",
            "return y, all_reduce(comm, d_hidden @ a.T) / comm.size",
            "result 1: every number is 1/n times the",
        ),
        ("hidden = np.maximum(x @ a, 0)", "hidden = x @ a", "y is without the ReLU between A and B:"),
        (
            "all_reduce(comm, hidden @ b) + bias",
            "all_reduce(comm, hidden @ b)",
            "the right numbers minus the fourth argument",
        ),
        (
            "return y, all_reduce(comm, d_hidden @ a.T)",
            "return all_reduce(comm, d_hidden @ a.T), y",
            "the results are right and exchanged: return",
        ),
        (
            "all_reduce(comm, hidden @ b) + bias",
            'all_reduce(comm, hidden @ b, "avg") + bias',
            "the ranks' parts of y are averaged: each is",
        ),
        ("return y, all_reduce(comm, d_hidden @ a.T)", "return y", "2 values are asked for: return them as a"),
    ],
    "14.parallel_attention": [
        (
            "mine = slice(comm.rank * size, (comm.rank + 1) * size)",
            "mine = slice(comm.rank, width, comm.size)",
            "rank r has whole heads, heads / n of them:",
        ),
        ("@ projection[mine])", "@ projection[:size])", "rank r has whole heads, heads / n of them:"),
        ("heads // comm.size)", "1)", "rank r has whole heads, heads / n of them:"),
        (
            "all_reduce(comm, attention(",
            'all_reduce(comm, op="avg", array=attention(',
            "every number is 1/n times the expected one:",
        ),
        (
            "np.split(qkv, 3, axis=1)], axis=1)",
            "np.split(qkv, 3, axis=1)[::-1]], axis=1)",
            "rank r has whole heads, heads / n of them:",
        ),
    ],
    "14b.split_cross_entropy": [
        ('"max")', '"avg")', "overflows exp, or its logarithm"),
        (
            "gradient[rows[mine], targets[mine] - first] -= 1",
            "gradient[rows[mine], targets[mine] - first] -= 0",
            "the losses are right, the gradient is not:",
        ),
        (
            "return np.log(total) - target, gradient",
            "return np.log(total) + target, gradient",
            "a loss is never negative: it is the",
        ),
        (
            "return np.log(total) - target, gradient",
            "return np.log(total) - target, gradient / len(targets)",
            "the losses are of single rows, not their",
        ),
        (
            "return np.log(total) - target, gradient",
            "return (np.log(total) - target).mean(), gradient",
            "there is a loss for each row: they are not",
        ),
        (
            "gradient[rows[mine], targets[mine] - first] -= 1",
            "gradient[rows[mine], targets[mine] % logits.shape[1]] -= 1",
            "the losses are right, the gradient is not:",
        ),
    ],
    "16.gpipe": [
        ("forwards + backwards", "backwards + forwards", "a stage waits for something that comes"),
        ("range(stages)]", "range(stages - 1)]", "the answer is a list with one list of names"),
        (
            "forwards + backwards",
            "[action for pair in zip(forwards, reversed(backwards)) for action in pair]",
            "stages wait for each other: let a stage",
        ),
    ],
    "17.one_f_one_b": [
        ("min(microbatches, stages - 1 - stage)", "stages - 1 - stage", "micro-batches are numbered from 0 to m-1;"),
        ("min(microbatches, stages - 1 - stage)", "min(microbatches, stage)", "a stage waits for something that comes"),
    ],
    "17b.stashing": [
        ("RATE = 0.25", "RATE = 0.1", "the first update has the right direction"),
        (
            "RATE * gradient(i, begun.pop(i))",
            "RATE * RATE * gradient(i, begun.pop(i))",
            "the first update has the right direction",
        ),
        ("gradient(i, begun.pop(i))", "gradient(i - 1, begun.pop(i))", "the B of mini-batch i takes gradient(i,"),
        ("weights = weights - RATE", "weights -= RATE", "the history is the same array many times:"),
    ],
    "19.zero_bubble": [
        (
            'if i >= stage:\n                order.append(f"W{i - stage}")',
            'order.append(f"W{i}")',
            "a micro-batch is once F, once I and once W",
        ),
        ("max(0, microbatches - stage)", "microbatches - stage", "an action is a text of a letter and a"),
        (
            "min(microbatches, stages - 1 - stage)",
            "min(microbatches, stages - stage)",
            "a micro-batch is alive until its W: put W",
        ),
        ('order.append(f"I{i}")', 'order.append(f"B{i}")', "W needs the gradient that has arrived: on"),
    ],
    "20.place_ranks": [
        (
            "order = sorted(range(len(shape)), key=lambda axis: traffic[axis])",
            "order = range(len(shape))",
            "the order in which you number the ranks may",
        ),
        ("number // node_size", "number % node_size", "every node holds node_size ranks: number"),
        ("number // node_size", "number", "every node holds node_size ranks: number"),
    ],
    "14c.slots_and_balance": [
        (
            "share = np.bincount(choice, minlength=experts) / tokens",
            "share = np.bincount(choice[slots >= 0], minlength=experts) / tokens",
            "f counts the tokens that found a slot; it",
        ),
        (
            "experts * share / tokens, probabilities.shape)",
            "share / tokens, probabilities.shape)",
            "only the gradient is wrong: it runs through",
        ),
        (
            "experts * share / tokens, probabilities.shape)",
            "experts * share, probabilities.shape)",
            "only the gradient is wrong: it runs through",
        ),
    ],
    "14c.dispatch": [
        ("arrived[:, local]", "arrived[:, 0]", "each expert here computes its own rows,"),
        (
            "return all_to_all(comm, done.reshape(-1)).reshape",
            "return done.reshape",
            "a second all-to-all must bring them back",
        ),
        (
            "run_expert(comm.rank * here + local, rows)",
            "run_expert(local, rows)",
            "that expert's weights are on another rank:",
        ),
        (
            "arrived = all_to_all(comm, slots.reshape(-1)).reshape(comm.size, here, capacity, width)",
            "arrived = all_to_all(comm, slots.reshape(-1)).reshape(here, comm.size, capacity, width).swapaxes(0, 1)",
            "compare with the picture: from rank r you",
        ),
    ],
    "22.visible": [
        ("places <= mine[:, None]", "places < mine[:, None]", "a query sees its own key, too: <=, not <"),
        ("2 * ranks - 1 - rank", "2 * ranks - rank", "rank r holds chunk r and chunk 2P-1-r of"),
        ("places <= mine[:, None]", "places >= mine[:, None]", "the right numbers, transposed: rows and"),
        ("return result", "return result.T", "the right numbers, transposed: rows and"),
    ],
    "22.ring_attention": [
        ("q @ keys.T / np.sqrt(q.shape[1])", "q @ keys.T", "the scores are q k^T / sqrt(d), d being the"),
        ("q @ keys.T / np.sqrt(q.shape[1])", "q @ keys.T / q.shape[1]", "the scores are q k^T / sqrt(d), d being the"),
        (
            "out = out * old[:, None] + now @ values",
            "out = out + now @ values",
            "when the maximum grows, what was summed",
        ),
        (
            "total = total * old + now.sum(axis=1)",
            "total = total + now.sum(axis=1)",
            "when the maximum grows, what was summed",
        ),
        ("np.stack([k, v])", "np.stack([v, k])", "keys and values are exchanged: scores are"),
    ],
    "06d.error_feedback": [
        ("residual += gradient", "residual[:] = gradient", "each step sends the largest elements of this"),
        ("np.argsort(-np.abs(residual))", "np.argsort(-residual)", "the largest elements are those of the largest"),
        ("np.argsort(-np.abs(residual))", "np.argsort(-np.abs(gradient))", "the elements are chosen by the gradient"),
        ("total[of_rank.astype(int)] += values", "total[of_rank.astype(int)] += values / comm.size", "these are means"),
        (
            "residual[places] = 0.0",
            "residual = gradient - np.bincount(places, residual[places], len(gradient))",
            "the residual has what this step left",
        ),
    ],
    "09b.one_grid": [
        ("largest[0] / 127 or 1.0", "largest[0] / 128 or 1.0", "every value is rounded to the nearest of"),
        ("np.round(x / scale)", "np.floor(x / scale)", "each value goes to the nearest level,"),
        ("largest[0] / 127 or 1.0", "largest[0] / 127", "a rank without values still takes part"),
        ('"max")', '"avg")', "the mean of the ranks' largest values is"),
        ("-127, 127) * scale", "-127, 127)", "these are the levels, whole numbers: times"),
        ("np.round(x / scale)", "np.trunc(x / scale)", "each value goes to the nearest level,"),
    ],
    "09c.kept_all_reduce": [
        (
            "all_reduce(comm, gradient[mask])",
            'all_reduce(comm, gradient[mask], "avg")',
            "the ranks' entries are averaged, or the",
        ),
        (
            "all_reduce(comm, gradient[mask])",
            "gradient[mask] * comm.size",
            "this is this rank's own gradient: take the",
        ),
        (
            "all_reduce(comm, gradient[mask])",
            'all_reduce(comm, gradient[mask], "max")',
            "the ranks' entries are averaged, or the",
        ),
        ("result = np.zeros_like(gradient)", "result = gradient.copy()", "what is pruned keeps this rank's own"),
    ],
    "09d.distil": [
        (
            "scores / scores.sum(axis=1, keepdims=True), teachers",
            "scores * 0 + 0.25, teachers",
            "as if nothing had come from its teacher",
        ),
        (
            "scores.sum(axis=1, keepdims=True)",
            "scores.sum(axis=0, keepdims=True)",
            "these are not the probabilities of rows: a",
        ),
        ("logits(student) / temperature", "logits(student) * temperature", "the logits are multiplied by the"),
        (
            "scores / scores.sum(axis=1, keepdims=True), teachers",
            "scores, teachers",
            "these are exponentials: divide those of a",
        ),
        ("teachers + student)", "student)", "who sends to whom must be said in the same"),
    ],
    "20b.min_max_split": [
        ("if slowest < row[n]:", "if slowest > row[n]:", "every layer is in one stage and every stage"),
        (
            "max(best[-1][j], ends[n] - ends[j])",
            "best[-1][j] + ends[n] - ends[j]",
            "stages with as many layers each do not take",
        ),
        ("for _ in range(stages):", "for _ in range(stages - 1):", "every layer is in one stage and every stage"),
        (
            "max(best[-1][j], ends[n] - ends[j])",
            "max(best[-1][j], n - j)",
            "stages with as many layers each do not take",
        ),
    ],
    "26.save": [
        (
            '    while disk.exists(free):\n        number += 1\n        free = f"{name}.{number}"\n',
            "    if disk.exists(free):\n        disk.remove(free)\n",
            "the name was taken by the only checkpoint",
        ),
        (
            '    disk.write("latest.new", free.encode())\n    disk.rename("latest.new", "latest")\n',
            '    disk.write("latest", free.encode())\n',
            "writing `latest` is not atomic, and half of",
        ),
        (
            '    while disk.exists(free):\n        number += 1\n        free = f"{name}.{number}"\n',
            "",
            "a rename does not replace a folder with",
        ),
    ],
    "26.load": [
        (
            "mine = np.empty(stop - start)",
            "mine = np.concatenate([read(number) for number in range(len(pieces))])[start:stop]",
            "no piece may overlap",
        ),
        (
            "begin, end = max(first, start), min(last, stop)",
            "begin, end = first, last",
            "a piece may begin before your chunk or end",
        ),
        (
            "read(number)[begin - first : end - first]",
            "read(number)[: end - begin]",
            "a piece may begin before your chunk or end",
        ),
        ("if begin < end:", "if begin + 1 < end:", "a piece may begin before your chunk or end"),
        ("if begin < end:", "if True:", "a rank reads pieces in which it has no"),
    ],
    "28.first_difference": [
        (
            "np.flatnonzero((digests != digests[0]).any(axis=1))",
            "np.flatnonzero((digests != digests[-1]).any(axis=1))",
            "the lowest rank that differs from rank 0,",
        ),
        ("int(different[0])", "int(different[-1])", "the lowest rank that differs from rank 0,"),
        ("weights.tobytes()", "np.float32(weights).tobytes()", "the lowest rank that differs from rank 0,"),
        ("weights.tobytes()", "np.sort(weights).tobytes()", "two entries were exchanged: their sum is"),
    ],
    "28.read_once": [
        ("digest(numbers)], np.uint64)", "numbers.sum()], np.uint64)", "1 when all ranks together have read each of"),
        (
            "counts.sum() == samples and digests.sum() == whole",
            "counts.sum() == samples",
            "1 when all ranks together have read each of",
        ),
        ("np.arange(samples)", "np.arange(1, samples + 1)", "1 when all ranks together have read each of"),
        ("int(counts.sum()", "1 - int(counts.sum()", "1 when all ranks together have read each of"),
    ],
    "11b.trust_ratio_step": [
        (
            "squares[0] / np.where(both, squares[1], 1)",
            "squares[1] / np.where(both, squares[0], 1)",
            "the ratio is upside down: the norm of the",
        ),
        ("weights**2)", "np.abs(weights))", "the norm of a layer is the root of the sum"),
        ("ratios = np.where(both, np.sqrt(", "ratios = np.where(both, (", "this is the ratio of the sums of squares;"),
        (
            "    all_reduce(comm, squares)\n",
            '    all_reduce(comm, squares, "avg")\n    squares[0] = squares[0] * comm.size\n',
            "the norm of a layer is the root of the sum",
        ),
    ],
    "11c.owners_compute": [
        (
            "for k in range(len(parts))]\n\n\nSOL",
            "for k in order]\n\n\nSOL",
            "a matrix is the rows of rank 0, then those",
        ),
        (
            "orthogonalize(np.concatenate(block))",
            "orthogonalize(np.concatenate(block[::-1]))",
            "a matrix is the rows of rank 0, then those",
        ),
        ("orthogonalize(np.concatenate(block))", "np.concatenate(block)", "these are the rows that came in; return"),
    ],
    "06f.in_order": [
        ("make(i), 0)", "make(i) + 1, 0)", ""),
        ("return result[:0]", "return result", "a loader returns no batches: an array of"),
        ("1 + i % loaders", "i % loaders", "a loader sends a batch that the trainer"),
        (
            "range(comm.rank - 1, batches, loaders)",
            "range(comm.rank, batches, loaders)",
            "a loader sends a batch that the trainer",
        ),
    ],
    "10b.gradient_and_noise": [
        ("noise = (small - big)", "noise = (big - small)", "the gradient is right and the noise is not:"),
        ("[big - noise / batch, noise]", "[big + noise / batch, noise]", "the square without noise alone is wrong: it"),
        ("rows.sum(axis=0) / batch", "rows.mean(axis=0)", "the gradient is wrong: divide each rank's"),
        ("[big - noise / batch, noise]", "[big, noise]", "the square without noise alone is wrong: it"),
        ("(1 / (s * batch) - 1 / batch)", "(1 / s - 1)", "the gradient is right and the noise is not:"),
    ],
    "10c.stages_by_time": [
        (
            "float(times.sum() / operations.sum())",
            "float(operations.sum() / times.sum())",
            "on another rank a layer takes other",
        ),
        ("(times / paces[-1]).tolist()", "times.tolist()", "on another rank a layer takes other"),
        (
            "by_slowest(work, comm.size, paces)",
            "by_slowest(work, comm.size, [1.0] * comm.size)",
            "on another rank a layer takes other",
        ),
        ("stage.last - stage.first + 1", "stage.last - stage.first", "every layer is in one stage, and every"),
    ],
    "16b.sync_batch_norm": [
        ("np.sqrt(variance + eps)", "(variance + eps)", "the rows are divided by the variance;"),
        ("(x - mean) / np.sqrt", "x / np.sqrt", "the mean of all rows is not subtracted: (x"),
        ("(rows * means).sum(axis=0) / total", "means.mean(axis=0)", "mean and variance are those of the rows of"),
        (
            "((x - mean) ** 2).sum(axis=0) / max(1, count)",
            "((x - mean) ** 2).sum(axis=0) / max(1, count - 1)",
            "batch norm normalises by the variance of",
        ),
    ],
    "05b.ring_order": [
        ("key=lambda rank: nodes[rank]", "key=lambda rank: -rank", "visit all ranks of a node before the next"),
        (
            "sorted(range(len(nodes)), key=lambda rank: nodes[rank])",
            "sorted(nodes)",
            "return every rank once, in the order in",
        ),
        ("sorted(range(len(nodes))", "sorted(range(len(nodes) - 1)", "return every rank once, in the order in"),
        (
            "key=lambda rank: nodes[rank]",
            "key=lambda rank: nodes[rank] % 2",
            "visit all ranks of a node before the next",
        ),
    ],
    "04b.ordered_reduce_scatter": [
        ("    return total\n", "    return total / n\n", "every number is 1/n times the expected one:"),
        (
            "    total = parts[0].copy()\n    for part in parts[1:]:",
            "    total = parts[-1].copy()\n    for part in parts[-2::-1]:",
            "right up to rounding, and wrong in the last",
        ),
        (
            "    total = parts[0].copy()\n    for part in parts[1:]:",
            "    total = parts[rank].copy()\n    for part in parts[:rank] + parts[rank + 1 :]:",
            "right up to rounding, and wrong in the last",
        ),
        ("total += part\n", "total -= part\n", "is it the rank's own chunk that is"),
    ],
    "17c.two_versions": [
        ("- RATE * total", "+ RATE * total", "the weights move up the gradient: subtract"),
        ("if k % m == m - 1:", "if k % m == 0:", "a version is not there: an update makes the"),
        ("max(k // m - 1, 0)])", "k // m])", "batch b used version b, which is not there"),
        (
            "            total = np.zeros_like(weights)\n            yield",
            "            yield",
            "is the sum of gradients set back to zero",
        ),
    ],
    "19b.building_block": [
        ("top = f0 * (p - 1) + first", "top = f0 * p + first", ""),
        ("f1 * (p - 1 - r)", "f1 * r", "F and I of the first chunk: F starts later"),
        ("== 4 for row in rows)", ">= 3 for row in rows)", "a rank has 6 units per micro-batch: wait"),
        ("i1 * (p - 1) + third", "i1 * (p - 1) - third", "each turn takes at least the one unit of"),
    ],
    "06e.outer_step": [
        ('"avg")', '"sum")', "the weights of the ranks are added; their"),
        (
            "return common - lr * (gradient + mu * momentum), momentum",
            "return common - lr * (gradient + mu * momentum)",
            "2 values are asked for: return them as a",
        ),
        (
            "lr * (gradient + mu * momentum), momentum",
            "lr * (gradient + mu * momentum), gradient",
            "the second result is the new momentum, not",
        ),
        (
            "momentum = mu * momentum + gradient",
            "momentum = mu * momentum + (1 - mu) * gradient",
            "the gradient is added whole: the momentum",
        ),
        ("return common - lr", "return weights - lr", "the step begins at the rank's own weights;"),
    ],
}
