"""Converting the checkpoints people have into our model folders, and back.

source.py      a folder, GGUF file or Hub id as a table of tensors that are read on demand
gguf_source.py   a GGUF file, in Hugging Face's terms: config, and dequantised weights
gguf_tokenizer.py  and its tokenizer
formats.py     the registry of formats, by their signs: recognising and refusing a checkpoint
reading.py     what a reader makes of a checkpoint, by PyTorch key; drafts on the Hub
hf.py          the reader of targets: config.json -> our configs; the rope, read and written
drafts.py      the readers of drafts: EAGLE-2, EAGLE-3 and its signs
plan.py        what a source holds, and what converting it writes
export.py      a model folder as a PyTorch checkpoint; the model card of a draft
layouts.py     the layouts that models are written in, and their config.json
__main__.py  the program: poss convert
"""
