"""Compiles decoding for devices that this machine does not have.

config.py    models, request and programs to compile
programs.py  the programs, from shapes alone
report.py    describes GPUs to XLA's compiler, compiles, measures, prints
"""
