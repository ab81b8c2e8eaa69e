"""Code that all programs share.

running.py    one-line errors, exit codes, compilation cache, marked text; joining processes
commands.py   the commands of `poss`, and what programs are called
arguments.py  command lines: a config's keys as options
options.py    loading the engine of a config
output.py     results for people or programs; tables; what takes a while; checks of outputs
"""
