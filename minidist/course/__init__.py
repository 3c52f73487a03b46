"""What a course needs: lessons with exercises that are judged, puzzles, and the museum of famous bugs.

lesson/      what a notebook calls, the judge of answers, and the builder of notebooks
puzzle.py    puzzles of a few lines, and the pictures of answers to them
progress.py  which puzzles and exercises are solved, and which answers were tried
story.py     one job through the core of the course, and what changes in it from lesson to lesson
museum/      bugs of real training code, each with its repair
"""
