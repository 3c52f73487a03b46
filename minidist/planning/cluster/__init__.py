"""Plans training jobs on clusters of GPUs: which layouts fit, how long a step takes, and which one is best.

gpus.py           what a GPU and its links can do
layout.py         how a job is divided, and which divisions are impossible
memory.py         the bytes of each pipeline rank
fit.py            whether they fit on a GPU: surely, perhaps, or not
step_time.py      the seconds of a step
calibration.py    the constants that no formula gives
host.py           what waits in host memory, and for how long GPUs wait for it
search.py         every layout, ranked
decision.py       several numbers of GPUs: days, GPU hours, costs, and one sentence
ready_commands.py the commands that try a layout with minidist itself
measured.py       the predictions next to runs that a user has measured; docs/planner_tables.py has those of papers
"""
