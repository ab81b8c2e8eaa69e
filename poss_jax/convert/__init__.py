"""Converting the checkpoints people have into our model folders.

source.py        a folder or Hub id as a table of tensors that are read on demand
hub.py           fetching from the Hub
hf_config.py     config.json in Hugging Face's words -> LlamaConfig
refusals.py      what we recognise and cannot convert
names.py         PyTorch key <-> our item and path
plan.py          checking every key against the table; streaming items
table.py         printing what goes where
target.py        targets
draft_source.py  a draft's files, whatever their layout
draft_config.py  what a draft is, by its tensors, its config.json and its name
published.py     what the published drafts do not say about themselves
draft.py         EAGLE, HASS and PosS drafts
specialists.py   a PosS start from a trained draft
config_json.py   our configs -> config.json
export.py        a model folder as a PyTorch checkpoint
inspection.py    what a source holds
__main__.py      the program: python -m poss_jax.convert
"""
