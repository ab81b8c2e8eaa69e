"""Code that all programs share.

running.py    one-line errors, exit codes, compilation cache, marked text
completion.py scripts that complete `poss` in a shell
processes.py  joining several processes
commands.py   the commands of `poss`, and what programs are called
arguments.py  command lines: a config's keys as options
options.py    loading the engine of a config
output.py     results for people or programs; what takes a while; checks of outputs
tables.py     Markdown tables
ahead.py      compiling for TPU slices that are not there
"""
