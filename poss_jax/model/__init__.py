"""Networks: the target, the draft families, their layers, caches and shardings.

target.py       the target: prefill, decoding, verification of a tree
families/       the draft families
specialists.py  what a draft family is, and what all of them share
layers.py       norms, rope, attention, MLP, the decoder layer
cache.py        keys and values while decoding, and attention over them
used_rows.py    the same attention by kernels for NVIDIA GPUs
documents.py    rows of several documents, as training reads them
blockwise.py    attention over long ones
parameters.py   items, shapes, PyTorch names and shardings of all parameters
sharding.py     the grid of devices
quantise.py     matrices of 8 bits
linear.py       products with a weight, per backend
ranking.py      the highest scores of a vocabulary, per backend
"""
