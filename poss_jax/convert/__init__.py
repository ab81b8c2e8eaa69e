"""Converting the checkpoints people have into our model folders, and back.

source.py      a folder or Hub id as a table of tensors that are read on demand
tensors.py     PyTorch key <-> our item and path; tensors that are read when they are wanted
gguf_file.py   a GGUF file: its metadata, and its tensors, which are dequantised
gguf_source.py   such a file in Hugging Face's terms: config and weights
gguf_tokenizer.py  and its tokenizer
formats.py     the registry of formats, by their signs: recognising and refusing a checkpoint
reading.py     what a reader makes of a checkpoint; drafts on the Hub
hf.py          readers of targets and EAGLE-2 drafts: config.json -> our configs
eagle3.py      EAGLE-3: its signs and its reader
rope.py        the rope of config.json, read and written
plan.py        what a conversion writes: targets and drafts
export.py      a model folder as a PyTorch checkpoint; the model card of a draft
layouts.py     the layouts that models are written in, and their config.json
inspection.py  what a source holds
__main__.py  the program: poss convert
"""
