"""Programs that were not written for minidist, their logs, and the gradients of other frameworks.

torch_ranks/        `minidist torch`: programs of torch.distributed on simulated ranks
flight_recorder/    the logs that PyTorch writes when a job hangs
dumps/              gradients of another framework, beside those of minidist
"""
