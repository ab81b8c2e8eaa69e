"""Compiles decoding for devices that are not there.

config.py    models, request and programs to compile
gpus.py      GPUs as XLA's compiler wants them described
programs.py  the programs, from shapes alone
hlo.py       a compiled program as text, read
findings.py  what it moves, copies, casts and exchanges
report.py    all that as numbers and tables
"""
