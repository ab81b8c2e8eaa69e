"""What programs share.

running.py  one-line errors, exit codes, compilation cache, marked text
options.py  options that several programs have
"""

from poss_jax.program.running import BRACKETS, COLOUR, Parser, run_program, text_marks

__all__ = ["BRACKETS", "COLOUR", "Parser", "run_program", "text_marks"]
