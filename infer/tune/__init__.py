"""Finds the fastest draft trees.

run.py     tunes every draft, prints and keeps the trees
search.py  predicts and measures them
"""
