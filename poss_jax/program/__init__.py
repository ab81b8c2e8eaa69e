"""Code that all programs share.

running.py  one-line errors, exit codes, compilation cache, marked text
options.py  command lines: a config's keys as options; loading an engine
"""

from poss_jax.program.running import BRACKETS, COLOUR, Parser, run_program, text_marks

__all__ = ["BRACKETS", "COLOUR", "Parser", "run_program", "text_marks"]
