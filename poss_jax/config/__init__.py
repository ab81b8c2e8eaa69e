"""Every setting of the project as a frozen dataclass, and strict YAML loading with overrides.

models.py        shapes of target, draft, tree and mesh (hashable: static arguments of jit)
training.py      training runs
data.py          texts or chats, and rows of their tokens
regenerate.py    a target that writes chats
decoding.py      runs of the decoding programs; sampling
bench.py         comparisons of drafts
numbers.py       bounded types of numbers
processor.py     the products of int8 weights that a CPU is given
reading.py       YAML files, `base:`, dotted overrides, keys and their help, messages
json_reading.py  JSON from outside
paths.py         paths that users write: local ones, and URIs of object stores
"""

__version__ = "0.2.0"
