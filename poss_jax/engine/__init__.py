"""The library's interface: a target, optionally with a draft; `generate` and `stream`.

engine.py     Engine: preparing prompts, decoding on the device or round by round
models.py     the models of an engine: fused, placed, joined, replaced
prompts.py    text, token ids or chat messages -> PreparedPrompt; a batch of them as arrays
answers.py    Generation and Chunk; answers that grow round by round
grammar.py    what an answer must match: masks of an answer's next token, and of a tree's nodes
scoring.py    log-probabilities of prompts
leader.py     one model on several hosts: process 0 decides the steps, the others repeat them
text.py       tokens -> text that may be shown; stop strings
dialogue.py   prompt files, and conversations whose every turn the target answers
device.py     defaults of the device; memory
trees.py      draft trees per batch size: which apply; those written by hand or tuned
rounds.py     what runs on the devices: a whole batch, or a few rounds at a time
live.py       a batch answered step by step; rounds with grammars
steps.py      prompts into slots, chunk by chunk
slots.py      a batch whose requests come and go; scheduler.py fills it, streams.py has the tickets
"""
