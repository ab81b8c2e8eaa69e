"""Compiles decoding for devices that this machine does not have.

config.py    models, request and programs to compile
gpus.py      descriptions of GPUs for XLA's compiler
programs.py  the programs, from shapes alone
hlo.py       reads the text of a compiled program
findings.py  what it moves, copies, casts and exchanges
report.py    compiles, measures, prints
"""
