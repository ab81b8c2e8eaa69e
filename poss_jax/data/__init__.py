"""Text in, token rows and prompts out.

Everything here is deterministic: the same source gives the same split, tokenizer, rows and prompts.

files.py      text and JSON lines, found and read
sources.py    corpora, split into training and held-out documents
tokenizer.py  the embedded tokenizer; loading any
rows.py       rows of tokens, and the batch of a step
prompts.py    prompts cut out of documents or read from a file
"""

from poss_jax.data.prompts import PROMPT_KEYS, prompts_from_documents, read_prompts
from poss_jax.data.rows import Rows, batch_at, rows_at, token_rows
from poss_jax.data.sources import Documents, load_documents
from poss_jax.data.tokenizer import CHAT_TEMPLATE, load_tokenizer, train_tokenizer

__all__ = [
    "CHAT_TEMPLATE",
    "PROMPT_KEYS",
    "Documents",
    "Rows",
    "batch_at",
    "load_documents",
    "load_tokenizer",
    "prompts_from_documents",
    "read_prompts",
    "rows_at",
    "token_rows",
    "train_tokenizer",
]
