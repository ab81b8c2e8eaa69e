"""Converting the checkpoints people have into our model folders, and back.

source.py      a folder or Hub id as a table of tensors that are read on demand
gguf_file.py   a GGUF file: its metadata, and its tensors, which are dequantised
gguf_source.py   such a file in Hugging Face's terms: config and weights
gguf_tokenizer.py  and its tokenizer
formats.py     the registry of formats: recognising, refusing and checking a checkpoint
reading.py     signs of a format; what a reader makes of a checkpoint; drafts on the Hub
eagle3.py      EAGLE-3: its signs and its reader
hf.py          config.json of Hugging Face and of the original code -> our configs
names.py       PyTorch key <-> our item and path
plan.py        what a conversion writes: targets, drafts, and PosS starts from trained drafts
export.py      a model folder as a PyTorch checkpoint; the model card of a draft
layouts.py     the layouts that models are written in, and their config.json
inspection.py  what a source holds
__main__.py  the program: python -m poss_jax.convert
"""
