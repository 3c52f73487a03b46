"""One way to start a program in any world.

    python program.py --ranks 4            four virtual ranks in this process
    mpiexec -n 4 python program.py         four processes, this one a rank of them
"""


def launch(main):  # replaced below
    raise NotImplementedError
