"""Programs that use weights.

generate.py  answers prompts
chat.py      a conversation
serve.py     the server
bench/       compares drafts; what all below measure with
drift/       drafts by depth
tune/        the fastest draft trees
lossless.py  whether texts are equal
roofline.py  rates of this device, and the floor of every phase
aot/         compiles for devices that are not there
"""
