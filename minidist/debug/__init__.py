"""Programs that were not written for minidist, their logs, and the gradients of other frameworks.

torch_ranks/        `minidist torch`: programs of torch.distributed on simulated ranks
mpi_ranks/          `minidist mpi`: programs of mpi4py on simulated ranks
flight_recorder/    the logs that PyTorch writes when a job hangs
dumps/              gradients of another framework, compared with those of minidist

rank_process.py     what a process has for itself and ranks of one process must not share: modules, variables, output
results.py          what ranks have printed and sent
user_program.py     a program as python FILE.py or python -m MODULE runs it
"""
