"""How much gradients and the layers of model parallelism send: the closed form of each, in elements.

    tensor      column and row parallel layers, key-value heads that ranks share, norms on a part of the sequence,
                embedding, head and loss of a split vocabulary
    context     ring attention, Ulysses, both together, all-gather attention
    expert      the slots' way to the experts and back, and experts whose matrices are split, too

`planning/layer_volumes.py` sums them over a model's layers, and the tests compare the sum with the trace of a run, byte
for byte.

Proved by: tests/planning/test_volumes.py
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Volume:
    """Return the elements that all ranks of an axis together send for one layer in one micro-batch, per pass.

    regather: what backward gathers a second time because forward kept the shard only.
    """

    forward: int = 0
    backward: int = 0
    regather: int = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(self.forward + other.forward, self.backward + other.backward, self.regather + other.regather)

    def __mul__(self, layers: int) -> "Volume":
        return Volume(self.forward * layers, self.backward * layers, self.regather * layers)


def gradient_volume(zero: int, elements: int, ranks: int, copies: int = 1) -> int:
    """Return the elements that all `ranks` together send per reduction of a gradient of `elements` elements.

    zero: the stage of ZeRO; 0 is an all-reduce, the others a reduce-scatter. copies: of each shard (hybrid sharding),
    over which it is all-reduced then.
    """
    if zero == 0:
        return 2 * (ranks - 1) * elements
    return (ranks - copies) * elements + 2 * (copies - 1) * elements


def column_parallel_volume(inputs: int, outputs: int, ranks: int, gather_output: bool = False) -> Volume:
    """Return the elements sent by a `ColumnParallelLinear`: an all-reduce in backward, perhaps a gather.

    Backward all-reduces the gradient of the input; with gather_output forward gathers the output.
    inputs, outputs: elements of x and of y, all ranks' columns together. A layer whose input needs no gradient sends
    nothing in backward: pass inputs=0.
    """
    return Volume(forward=(ranks - 1) * outputs if gather_output else 0, backward=2 * (ranks - 1) * inputs)


def row_parallel_volume(outputs: int, ranks: int) -> Volume:
    """Return the elements sent by a `RowParallelLinear`: its output, of `outputs` elements, is all-reduced."""
    return Volume(forward=2 * (ranks - 1) * outputs)


def column_row_volume(activation: int, ranks: int, sequence_parallel: bool) -> Volume:
    """Return the elements sent by a column-parallel layer and the row-parallel one after it.

    activation: elements of x, and of y. Megatron's f and g send 2 (t-1) x activation each. With sequence_parallel they
    are a gather and a reduce-scatter in both passes, the same number, and the column-parallel layer gathers its input
    once more in backward.
    """
    both = column_parallel_volume(activation, activation, ranks) + row_parallel_volume(activation, ranks)
    return both + Volume(regather=(ranks - 1) * activation if sequence_parallel else 0)


def kv_replicas_volume(parameters: int, replicas: int) -> Volume:
    """Return the elements sent to sum the gradient of `parameters` elements over groups of `replicas` ranks."""
    return Volume(backward=2 * (replicas - 1) * parameters)


def sequence_parallel_volume(parameters: int, ranks: int) -> Volume:
    """Return the elements sent to sum the gradients of `parameters` elements, each used on 1/t of the sequence."""
    return Volume(backward=2 * (ranks - 1) * parameters)


def embedding_volume(activation: int, ranks: int, sequence_parallel: bool) -> Volume:
    """Return the elements sent by a `VocabParallelEmbedding` whose result has `activation` elements."""
    if sequence_parallel:  # a reduce-scatter, and backward gathers
        return Volume(forward=(ranks - 1) * activation, backward=(ranks - 1) * activation)
    return Volume(forward=2 * (ranks - 1) * activation)


def head_volume(activation: int, ranks: int, sequence_parallel: bool) -> Volume:
    """Return the elements sent by a `VocabParallelHead` whose input has `activation` elements."""
    if sequence_parallel:
        gathered = (ranks - 1) * activation
        return Volume(forward=gathered, backward=gathered, regather=gathered)
    return Volume(backward=2 * (ranks - 1) * activation)


def cross_entropy_volume(tokens: int, ranks: int) -> Volume:
    """Return the elements sent by `vocab_parallel_cross_entropy`: three all-reduces of one number per token."""
    return Volume(forward=3 * 2 * (ranks - 1) * tokens)


def ring_attention_volume(keys: int, ranks: int) -> Volume:
    """Return the elements that a layer's ring attention sends.

    keys: elements of K (as many as of V) of the whole sequence. Forward: K and V make P-1 hops. Backward: K and V make
    P-1 hops again, and their gradients P, the last one to the owner.
    """
    return Volume(forward=2 * keys * (ranks - 1), backward=2 * keys * (2 * ranks - 1) if ranks > 1 else 0)


def ulysses_volume(queries: int, keys: int, ranks: int) -> Volume:
    """Return the elements that a layer's four all-to-alls send per pass: q, k, v in and the output out.

    queries, keys: elements of Q and of K of the whole sequence; (P-1)/P of each is for another rank.
    """
    # Q and the output have `queries` elements, K and V `keys`.
    sent = (2 * queries + 2 * keys) // ranks * (ranks - 1)
    return Volume(forward=sent, backward=sent)


def ulysses_ring_volume(queries: int, keys: int, ranks: int, ulysses: int) -> Volume:
    """Return the elements that a layer sends; queries, keys: elements of Q and of K of the whole sequence."""
    return ulysses_volume(queries, keys, ulysses) + ring_attention_volume(keys, ranks // ulysses)


def all_gather_attention_volume(keys: int, ranks: int) -> Volume:
    """Return the elements that a layer's all-gather attention sends; keys: elements of K (as many as of V)."""
    return Volume(forward=2 * keys * (ranks - 1), backward=2 * keys * (ranks - 1))


def dispatch_volume(slots: int, ranks: int) -> Volume:
    """Return the elements that a layer's two all-to-alls send per pass.

    slots: elements in all slots (experts, capacity, D). (P-1)/P of them go to another rank, there and back, whether the
    slots are full or not.
    """
    sent = 2 * slots * (ranks - 1) // ranks
    return Volume(forward=sent, backward=sent)


def capacities_volume(ranks: int) -> int:
    """Return the bytes that a rank sends for the capacities of a layer's forward pass, where they differ."""
    return 8 * (ranks - 1)


def expert_tensor_volume(slots: int, activation: int, ranks: int, sequence_parallel: bool) -> Volume:
    """Return the elements that `ExpertTensorParallel` sends: an all-reduce of the slots, and a gather of split tokens.

    slots: elements in the slots of the experts of one tensor-parallel group; activation: elements of the tokens.
    """
    sent = (ranks - 1) * (2 * slots + (activation if sequence_parallel else 0))
    return Volume(forward=sent, backward=sent)
