"""Context parallelism: the sequence is split over ranks, attention included (ring attention).

Weights are replicated over the context axis and every rank sees a part of the tokens, so each gradient is a summand:
it is summed over the context axis *and* the data axis, also when there is one replica only. `gradient_axes` of
`minidist/parallel/fitting_dims.py` returns the communicator for `DistributedDataParallel(..., reduction="sum")`.

ring_attention.py         ring attention, and the global positions of a rank's tokens
"""
