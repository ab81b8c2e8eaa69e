"""The model folder, our format on disk: `model.json`, the tokenizer's files, and the weights.

record.py      contents of model.json: config, target identity, provenance; draft vocabularies
sums.py        checksums of arrays and of files
folder.py      reading: records, and weights to the device, item by item
writing.py     writing a model through Orbax, and verifying it
whole.py       folders and files written whole, by one process at a time
torch_io.py    PyTorch's `.bin` files; the only file that imports torch
"""
