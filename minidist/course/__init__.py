"""What a course needs: lessons with exercises that are judged, and the museum of famous bugs.

lesson/    what a notebook calls, the judge of answers, and the builder of notebooks
museum/    bugs of real training code, each beside its repair
"""
