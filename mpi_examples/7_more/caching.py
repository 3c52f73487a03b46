"""What is made once: tokens, features and a teacher's logits in a shared cache; keys and values while text is written.

mpiexec -n 2 python mpi_examples/7_more/caching.py
python mpi_examples/7_more/caching.py --ranks 2

Rank 0 makes each array, the others find it: an entry's key is the SHA-256 of its content, of what is made of it, and of
the parameters. Another parameter is another entry, a damaged entry is said and made again. Then a GPT writes text with
and without a cache of keys and values: the same tokens, and the work for each.
"""

import tempfile
from pathlib import Path

import numpy as np

from minidist import GPT, MLP, FlopCounter, GPTConfig, Tensor, broadcast, glyphs, launch, no_grad
from minidist.commands.generation import generate
from minidist.core.base import arrays as xp
from minidist.data import cached, pydoc_text


def words(text, most):
    """Return the words of a text as numbers: its `most` frequent ones, and 0 for all others."""
    split = bytes(text).decode().split()
    names, counts = np.unique(split, return_counts=True)
    known = {name: number for number, name in enumerate(names[np.argsort(-counts, kind="stable")][: most - 1], 1)}
    return np.array([known.get(word, 0) for word in split], np.uint16)


def shared_folder(comm):
    """Return a new folder that all ranks know, and that rank 0 deletes at the end."""
    folder = tempfile.TemporaryDirectory() if comm.rank == 0 else None
    name = np.zeros(256, np.uint8)
    if folder is not None:
        name[: len(folder.name)] = np.frombuffer(folder.name.encode(), np.uint8)
    broadcast(comm, name, 0)
    return Path(bytes(name).rstrip(b"\0").decode()), folder


def main(comm):
    place, folder = shared_folder(comm)
    text, images = pydoc_text().tokens[:40_000], glyphs().rows(np.arange(256))[0]
    teacher, made = MLP([images.shape[1], 64, 10]), []

    def logits():
        with no_grad():
            return teacher(Tensor(images)).data

    def arrays():
        """Return all three, from the cache where they are in it."""
        tokens = cached(text, "words", lambda: made.append("words") or words(text, 1000), place, most=1000)
        inputs = cached(images, "centred", lambda: made.append("centred") or images - images.mean(0), place)
        taught = cached(images, "logits", lambda: made.append("logits") or logits(), place, teacher="seed 0")
        return tokens, inputs, taught

    for rank in range(comm.size):
        comm.barrier()
        if comm.rank == rank:
            tokens, _, taught = arrays()
            print(f"rank {rank} made {', '.join(made) or 'nothing'}: {tokens.size:,} words, {taught.shape}", flush=True)
    comm.barrier()
    if comm.rank == 0:
        fewer = cached(text, "words", lambda: made.append("words") or words(text, 50), place, most=50)
        entry = next(place.glob("logits-*.npy"))
        entry.write_bytes(entry.read_bytes()[:-1] + b"?")
        again = arrays()[2]
        print(f"rank 0 made {', '.join(made)}; {fewer.max() + 1} words; equal: {np.array_equal(again, logits())}")
        folder.cleanup()

    # Every rank writes: a token costs one token's work, or that of all tokens before it.
    model = GPT(GPTConfig(256, 64, 32, 2, 4), dtype=xp.float32).eval()
    results = {}
    for cache in (True, False):
        with FlopCounter() as counter:
            steps = generate(model, text[:8], 40, 64, temperature=0.0, kv_cache=cache)
            results[cache] = [(token, sum(flops for flops, _ in counter.take())) for token in steps]
    same = [token for token, _ in results[True]] == [token for token, _ in results[False]]
    if comm.rank == 0:
        flops = f"{results[True][-1][1]:,} FLOPs with keys and values, {results[False][-1][1]:,} without"
        print(f"40 tokens, the same: {same}; the last one took {flops}", flush=True)


if __name__ == "__main__":
    launch(main)
