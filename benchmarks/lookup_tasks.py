"""Tasks of which much, something or nothing stands in the prompt already: 20 of each of five kinds.

Texts are made of a few sentences and lists below, so every task is our own. The same number gives
the same task.
"""

import random
from collections.abc import Callable

NUM_TASKS = 20

_FIRST = "Ada Boris Clara Dmitri Elena Farid Greta Hugo Ines Jonas Kaya Liam Mira Nils Olga".split()
_LAST = "Almeida Brandt Castillo Dahl Eriksen Fontaine Gruber Haddad Ivanova Jansen Keller".split()
_TOWNS = "Arlesund Brackwater Corvale Dunmere Eastholm Fernhill Glenrock Harrowgate Isleton".split()
_GOODS = "lamp kettle bicycle saddle notebook telescope rope lantern compass blanket hammer".split()
_THINGS = "account booking cart invoice letter order parcel player recipe sensor ticket".split()
_VERBS = "archive cancel confirm export inspect load merge print refresh rename schedule".split()

_METHOD = '''
    def {verb}_{thing}(self, {thing}, reason=""):
        """Handles one {thing}: {verb} it and write it to the log."""
        if {thing} is None:
            raise ValueError("no {thing} to {verb}")
        self.{thing}s[{thing}.number] = {thing}
        self.log.append(("{verb}", {thing}.number, reason))
        return {thing}.number
'''
_CLASS = '''class {Thing}Store:
    """Keeps every {thing} of a shop by its number."""

    def __init__(self, name, limit={limit}):
        self.name = name
        self.limit = limit
        self.{thing}s = {{}}
        self.log = []
'''
_EDITS = (
    "Rename the method {verb}_{thing} to {verb}_one_{thing}.",
    "Rename the attribute log to history.",
    "Change the default limit to {other}.",
    "Rename the class {Thing}Store to {Thing}Shelf.",
)
_ARTICLE = (
    "The town of {town} has decided to close the old bridge over the river from {month} on. "
    "{name}, who has led the council for {years} years, said that the bridge was built for "
    "carts and not for lorries. Engineers found {count} cracks in the northern arch last "
    "winter, and they expect the repair to take {weeks} weeks. Until then, buses will go "
    "round by the mill, which adds about {minutes} minutes to the way to the station. "
    "Shopkeepers in the lower town fear that they will lose customers, and they have asked "
    "the council for a ferry. {baker}, who owns the bakery next to the bridge, said that half"
    " of her customers come from the other side. The council will decide about the ferry in "
    "its next meeting. The repair will cost {cost} thousand crowns, of which the province "
    "pays one third."
)
_ORDER = (
    "Order number: {number}\nCustomer: {name}\nStreet: {street} Mill Road\nTown: {town}\n"
    "Ordered on: {day} {month}\nItem: {good}\nQuantity: {count}\nPrice per item: {cost} crowns\n"
    "Delivery: by boat, within {weeks} weeks\nRemark: please ring the bell twice"
)
_FIELDS = (
    "order_number, customer, street, town, ordered_on, item, quantity, price, delivery, remark"
)
_QUOTED = (
    ("Why is the bridge closed, in the words of {name}?"),
    ("What will happen to the buses?"),
    ("What do the shopkeepers fear?"),
    ("What will the repair cost, and who pays?"),
)
_CHAT = (
    "What is the difference between a lake and a pond?",
    "Give me three ideas for a rainy afternoon with children.",
    "How do I keep bread fresh for longer?",
    "Explain in simple words why the sky is blue.",
    "Write a short poem about a lighthouse.",
    "What should I pack for a weekend in the mountains?",
    "How does a bicycle stay upright?",
    "Tell me a short story about a fox who learns to swim.",
    "What are good habits for learning a language?",
    "How can I ask my neighbour to be quieter, politely?",
    "Why do leaves change their colour in autumn?",
    "What does an archivist do all day?",
    "Name some vegetables that grow well in the shade.",
    "How do I write a good letter of thanks?",
    "What is a prime number? Give examples.",
    "Which is better for a small flat, a cat or a dog?",
    "How do tides work?",
    "Suggest a name for a small bakery, and say why it fits.",
    "What can I cook with rice, eggs and spinach?",
    "How do I start running without hurting myself?",
)


def edit(rng: random.Random) -> str:
    """Asks for a class with a small change."""
    thing, verbs = rng.choice(_THINGS), rng.sample(_VERBS, 3)
    names = {"thing": thing, "Thing": thing.capitalize(), "verb": verbs[0]}
    code = _CLASS.format(**names, limit=rng.randrange(10, 99))
    code += "".join(_METHOD.format(verb=verb, thing=thing) for verb in verbs)
    change = rng.choice(_EDITS).format(**names, other=rng.randrange(100, 999))
    return f"{change} Write the whole class again.\n\n```python\n{code}```"


def summary(rng: random.Random) -> str:
    """Asks for a summary of a text."""
    return f"Summarise this text in three sentences.\n\n{_ARTICLE.format(**_draw(rng))}"


def json_of_document(rng: random.Random) -> str:
    """Asks for the fields of a document as JSON."""
    document = _ORDER.format(**_draw(rng))
    return f"Write this order as a JSON object with the fields {_FIELDS}.\n\n{document}"


def quote(rng: random.Random) -> str:
    """Asks a question whose answer is a sentence of the text."""
    facts = _draw(rng)
    question = rng.choice(_QUOTED).format(**facts)
    text = _ARTICLE.format(**facts)
    return f"{text}\n\n{question} Quote the sentences of the text that say it, word for word."


def _draw(rng: random.Random) -> dict[str, str | int]:
    months = "January March May June August September October December".split()
    name, baker = (f"{rng.choice(_FIRST)} {rng.choice(_LAST)}" for _ in range(2))
    texts: dict[str, str | int] = {"name": name, "baker": baker, "town": rng.choice(_TOWNS)}
    texts |= {"month": rng.choice(months), "good": rng.choice(_GOODS)}
    limits = {"years": 20, "count": 30, "weeks": 40, "minutes": 25, "cost": 900, "day": 28}
    limits |= {"number": 99999, "street": 80}
    return texts | {key: rng.randrange(2, limit) for key, limit in limits.items()}


KINDS: dict[str, Callable[[random.Random], str]] = {
    "edit": edit,
    "summary": summary,
    "JSON": json_of_document,
    "quote": quote,
}


def make_tasks() -> dict[str, list[str]]:
    """Questions by kind, the same in every run."""
    made = {
        kind: [make(random.Random(f"{kind} {number}")) for number in range(NUM_TASKS)]
        for kind, make in KINDS.items()
    }
    return made | {"chat": list(_CHAT)}
