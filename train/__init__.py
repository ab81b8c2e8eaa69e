"""Programs that make weights.

main.py          trains a target or a draft; training.py does it
stages.py        what a run is that trains a draft or a target
features.py      the frozen target's features: the cache on disk, rows that read it
loop.py          steps, validations, checkpoints, and what a run says
run_folder.py    who may write there, what a run leaves, and resuming from it
devices.py       processes and devices of a run
memory.py        what a step takes on each device
plot.py          compares runs
regenerate.py    lets a target write the answers to train on; regeneration.py does it
questions.py     what is asked: the questions of a source, and those that the target writes
server.py        a server that writes the answers
draft_vocab.py   the tokens that a draft may propose; vocabulary.py counts them
"""
