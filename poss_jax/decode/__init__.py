"""Speculative decoding: draft a tree, verify it, accept a path, commit.

state.py      inputs and state of a round: static shape, weights, request, output
speculate.py  the prefill, the round, and the loop around it
drafting.py   the draft's cache and its search: committed pairs, levels, candidates
lookup.py     candidates copied from prompt and answer
tree.py       candidates -> tree
sampling.py   the target's choice of a token: processed scores, and noise from the request's seed
rejection.py  sampled drafts, and the choice after them
verify.py     the accepted path, and the log-probabilities of its tokens
"""
