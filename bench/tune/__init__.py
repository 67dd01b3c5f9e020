"""The tuner: finds a faster configuration than the heuristics' for one class of problems on one card.

problems.py   what is tuned: a line of text, as kernel facts and as tensors
space.py      genes and their values; which genomes are legal
search.py     the evolutionary search; knows neither torch nor GPUs
build.py      compiles candidates in processes, or takes them from a bundle
race.py       heats with early abandonment; knows neither torch nor GPUs
fitness.py    is a candidate right, and how fast: what needs the GPU
command.py    python -m bench tune
"""
