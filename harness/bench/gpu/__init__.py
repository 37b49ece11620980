"""`make gpu`: acceptance of this project on a GPU, in parts that run, fail and are timed separately.

Needs torch and numpy; matplotlib draws the figures of the report if it is there. Nothing is downloaded.
"""
