"""Data sets in, rows of tokens out; the tokenizer.

Everything here is deterministic: the same source gives the same split, tokenizer and rows.

files.py          files found and read
records.py        records of a data set, one after the other
conversations.py  records of every format -> texts, chats, tokens
sources.py        what became of the records; training and held-out documents
rendering.py      chats written by a template, within limits (render_worker.py does it)
templates.py      chat templates, and which characters of a chat are trained on
tokenizer.py      the embedded tokenizer; loading any
encoding.py       documents -> tokens and loss masks
features.py       rows with features, which are read as they are needed
feature_cache.py  features kept on disk
feature_files.py  features that other programs stored
rows.py           sequences laid into rows; the batch of a step
prepared.py       the rows of a run, kept in its folder
"""
