"""Compiles decoding for devices that this machine does not have.

config.py    models, request and programs to compile
gpus.py      descriptions of GPUs for XLA's compiler
programs.py  the programs, from shapes alone
report.py    compiles, measures, prints
"""
