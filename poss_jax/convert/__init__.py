"""Converting the checkpoints people have into our model folders, and back.

source.py      a folder or Hub id as a table of tensors that are read on demand
formats.py     the registry of formats: recognising, refusing and checking a checkpoint
hf.py          config.json of Hugging Face and of the original code -> our configs
rope.py        its rope settings, read and written
names.py       PyTorch key <-> our item and path
plan.py        what a conversion writes: targets, drafts, and PosS starts from trained drafts
export.py      a model folder as a PyTorch checkpoint
inspection.py  what a source holds
__main__.py  the program: python -m poss_jax.convert
"""
