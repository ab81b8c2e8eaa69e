"""The OpenAI-compatible server; `poss serve` runs it.

app.py         the ASGI application: endpoints, life cycle
service.py     what the endpoints share: reads a request, submits it, answers; what /metrics shows
bodies.py      bodies of requests: their fields, received, bounded, parsed; errors of the API
requests.py    bodies -> jobs for the scheduler; fields that constrain an answer -> grammar
chats.py       messages and tools of a chat, and how its template is to write them
replies.py     chunks of answers -> bodies and events; what answers say about their drafts
tools.py       calls of tools in an answer's text
responses.py   /v1/responses, translated to chats and back
guard.py       checks of every request: key, size, id, access log
server.py      uvicorn's server: draining
chat.html      the page at /
"""
