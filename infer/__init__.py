"""Programs that use weights.

generate.py  answers prompts
chat.py      a conversation
serve.py     the server
bench/       compares drafts; the programs below measure with it
drift/       measures drafts by depth
tune/        finds the fastest draft trees
lossless.py  checks that speculative and plain texts are equal
roofline.py  rates of this device, and the floor of every phase
aot/         compiles for other devices
"""
