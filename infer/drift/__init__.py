"""Measures drafts by depth.

study.py   follows drafts along answers
report.py  tables and the plot
spans.py   proposes how many positions each specialist drafts
"""
