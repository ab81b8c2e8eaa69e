"""The engine of the library's users: a target, optionally a draft; `generate` and `stream`.

engine.py     Engine: loading, preparing prompts, decoding on the device or round by round
prompts.py    text, token ids or chat messages -> PreparedPrompt; settings of a batch as arrays
answers.py    Generation and Chunk; decoding round by round from the host
leader.py     one model on several hosts: process 0 decides the steps, the others repeat them
text.py       tokens -> text that may be shown; stop strings
dialogue.py   prompt files, and conversations whose every turn the target answers
device.py     defaults of the device; draft trees per batch size; memory
trees.py      files of draft trees per batch size, those that were tuned for a draft among them
steps.py      compiled calls: whole batches, and some rounds at a time
slots.py      a batch whose texts come and go; scheduler.py fills it, streams.py is what comes out
"""
