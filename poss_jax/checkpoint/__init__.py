"""The model folder, our format on disk: `model.json`, the tokenizer's files, and the weights.

record.py      contents of model.json: config, target identity, provenance; draft vocabularies
folder.py      reading: records, and weights to the device, item by item
writing.py     writing a model through Orbax, its checksums, and verifying them
whole.py       folders and files written whole, by one process at a time
torch_io.py    PyTorch's `.bin` files; the only file that imports torch
"""
