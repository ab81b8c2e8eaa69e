"""Every setting of the project as a frozen dataclass, and strict YAML loading with overrides.

models.py        shapes of target, draft, tree and mesh (hashable: static arguments of jit)
training.py      training runs and their data
decoding.py      runs of the programs that decode; sampling
numbers.py       types of their numbers, with bounds
reading.py       YAML files, `base:`, dotted overrides, keys and their help, messages
yaml_text.py     YAML within limits
json_reading.py  JSON that others wrote
paths.py         what users write for a path: local ones, and URIs of object stores
"""
