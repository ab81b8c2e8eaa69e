"""Converting the checkpoints people have into our model folders, and back.

source.py      a folder or Hub id as a table of tensors that are read on demand
gguf_file.py   a GGUF file: its metadata, and its tensors, which are dequantised
gguf_source.py   such a file in Hugging Face's terms: config and weights
gguf_tokenizer.py  and its tokenizer
formats.py     the registry of formats: recognising, refusing and checking a checkpoint
signs.py       what formats are recognised by
reading.py     what a reader makes of a checkpoint
eagle3.py      EAGLE-3: its signs and its reader
hf.py          config.json of Hugging Face and of the original code -> our configs
rope.py        its rope settings, read and written
names.py       PyTorch key <-> our item and path
published.py   drafts on the Hub, and the positions of a draft's specialists
plan.py        what a conversion writes: targets, drafts, and PosS starts from trained drafts
export.py      a model folder as a PyTorch checkpoint
layouts.py     the layouts that drafts are written in
eagle3_layouts.py  those of EAGLE-3
config_json.py config.json as we write it
card.py        the model card of an exported draft
inspection.py  what a source holds
__main__.py  the program: python -m poss_jax.convert
"""
