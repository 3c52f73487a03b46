"""What a person types: one file per command, `options.py` with shared flags, `app.py` with the program."""
