"""Converting the checkpoints people have into our model folders.

source.py       a folder or Hub id as a table of tensors that are read on demand
hf_config.py    config.json in Hugging Face's words -> LlamaConfig
names.py        PyTorch key <-> our item and path
plan.py         checking every key against the table; streaming items
target.py       Llama-family targets
draft.py        EAGLE, HASS and PosS drafts
specialists.py  a PosS start from a trained draft
__main__.py     the program: python -m poss_jax.convert
"""
