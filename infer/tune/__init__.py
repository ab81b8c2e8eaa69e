"""Finds the fastest draft trees: `search.py` predicts and measures them."""
