"""Data sets in, rows of tokens out; the tokenizer too.

Everything here is deterministic: the same source gives the same split, tokenizer and rows.

records.py        files -> records -> documents; counts of used and dropped ones, the held-out split
conversations.py  records of every format -> texts, chats, tokens
rendering.py      chats -> text -> tokens by a template; no message writes a special token
templates.py      chat templates, and which characters of a chat are trained
tokenizer.py      the embedded tokenizer; loading any
rows.py           documents -> tokens and loss masks -> rows; the batch of a step
prepared.py       the rows of a run, kept in its folder
progress.py       progress bars
"""
