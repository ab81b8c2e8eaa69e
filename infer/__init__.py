"""Programs that use weights.

generate.py  answers prompts; generate_run.py does it
chat.py      a conversation; chat_session.py holds it
serve.py     the server
bench/       compares drafts; the programs below measure with it
tune/        finds the fastest draft trees
lossless.py  checks that speculative and plain texts are equal; lossless_run.py compares them
"""
