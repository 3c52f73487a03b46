"""How fast is it? One harness, and one file per comparison.

harness.py        sides measured in turn, and ratios     environment.py    processor, BLAS, and other processes
workloads.py      the models and batches that are measured    torch_peer.py    the same models in PyTorch
step.py           a training step next to PyTorch's      products.py       its matrix products, and their floor
collectives.py    collectives next to MPI's and gloo's   virtual_collectives.py    the same on the virtual clock
network.py        the virtual clock next to slow links   staleness.py    a parameter server with slow workers
parallel.py, tensor_parallel.py, pipeline.py    data-parallel, tensor-parallel and pipeline steps next to PyTorch's
hybrid.py         what is neither arithmetic nor messages
"""
