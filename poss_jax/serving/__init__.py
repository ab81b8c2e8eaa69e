"""The OpenAI-compatible server; `python -m infer.serve` runs it.

app.py         the ASGI application: endpoints, life cycle
bodies.py      bodies of requests: received, bounded, parsed
requests.py    requests -> jobs for the scheduler; errors of the API
replies.py     chunks of answers -> bodies and events
guard.py       checks of every request: key, size, id, access log, slow readers
server.py      uvicorn's server: draining, slow clients
metrics.py     what /metrics shows
chat.html      the page at /
"""
