"""The tuner: finds a faster configuration than the heuristics' for one class of problems on one card.

problems.py   what is tuned: a line of text, as kernel facts
space.py      candidates, and how one is made from another
search.py     the evolutionary search, and races with early abandonment; knows neither torch nor GPUs
build.py      compiles candidates in processes
fitness.py    is a candidate right, and how fast: what needs the GPU
command.py    python -m bench tune
"""
