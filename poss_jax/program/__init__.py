"""Code that all programs share.

running.py    one-line errors, exit codes, compilation cache, marked text
processes.py  several processes of one program
options.py    command lines: a config's keys as options; loading an engine
tables.py     Markdown tables
ahead.py      compiling for TPU slices that are not there
"""
