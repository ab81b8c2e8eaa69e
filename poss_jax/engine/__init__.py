"""The library's interface: a target, optionally with a draft; `generate` and `stream`.

engine.py     Engine: loading, preparing prompts, decoding on the device or round by round
prompts.py    text, token ids or chat messages -> PreparedPrompt; settings of a batch as arrays
answers.py    Generation and Chunk; decoding round by round from the host
leader.py     one model on several hosts: process 0 decides the steps, the others repeat them
text.py       tokens -> text that may be shown; stop strings
dialogue.py   prompt files, and conversations whose every turn the target answers
device.py     defaults of the device; draft trees per batch size; memory
trees.py      draft trees per batch size, written by hand or tuned
steps.py      compiled calls: a whole batch, or a few rounds at a time
slots.py      a batch whose texts come and go; scheduler.py fills it, streams.py carries the answers
"""
