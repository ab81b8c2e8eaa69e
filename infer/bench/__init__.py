"""Compares drafts over the same questions.

settings.py    settings of tune and lossless
by_depth.py    drafts by depth (--drift)
questions.py   data sets -> questions -> prompts
measure.py     decoding methods, and their times
phases.py      times of the phases of a round
costs.py       bytes, FLOPs and floors of the phases; datasheets of devices
rates.py       measured rates of this device
journal.py     answers and other results, kept as they come; answers in the field's formats
compare.py     a benchmark: all questions with all methods
summary.py     answers -> numbers, with intervals and tests
report.py      numbers -> tables, a web page and files
"""
