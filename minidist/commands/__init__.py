"""What a person types: one file per command, and `app.py` with the program.

`command.py` reads a command line, `flags.py` has the flags that any command shares, `options.py` those of a training
job.
"""
