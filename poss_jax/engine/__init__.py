"""The library's interface: a target, optionally with a draft; `generate` and `stream`.

engine.py     Engine: preparing prompts, answering a batch of them or streaming one
models.py     the models of an engine: loaded, fused, placed, joined, replaced
prompts.py    text, token ids or chat messages -> PreparedPrompt; a batch of them as arrays
loop.py       the decoding loop: admit, start, finish, deliver
scheduler.py  the loop on a thread: requests come and go at any time
batch.py      a batch whose prompts begin together; rounds with and without grammars; scores
slots.py      a batch whose requests come and go; the cache of prompts' beginnings
warm_up.py    compiles the steps of slots in the order of use
steps.py      what runs on the devices: prefill, rounds, scores
rounds.py     new tokens on their way to the host; rounds per step
answers.py    Generation and Chunk; answers that grow round by round
streams.py    tickets: the queue of an answer between threads
grammar.py    what an answer must match, compiled for a target
grammar_trials.py  a process that tries grammars within limits
guides.py     a grammar's state in an answer: masks of the next token, and of a tree's nodes
leader.py     one model on several hosts: process 0 decides the steps, the others repeat them
text.py       tokens -> text that may be shown; stop strings
dialogue.py   prompt files, and conversations whose every turn the target answers
device.py     defaults of the device; memory
trees.py      draft trees per batch size: which apply; those written by hand or tuned
"""
