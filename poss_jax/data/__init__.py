"""Data sets in, rows of tokens out; the tokenizer; prompts.

Everything here is deterministic: the same source gives the same split, tokenizer, rows and prompts.

files.py          files found and read
records.py        records of a data set, one after the other
conversations.py  records of every format -> texts, chats, tokens
sources.py        what became of the records; training and held-out documents
rendering.py      chats written by a template, within limits (render_worker.py does it)
templates.py      chat templates, and which characters of a chat are trained on
tokenizer.py      the embedded tokenizer; loading any
encoding.py       documents -> tokens and loss masks
features.py       rows with features, which are read as they are needed
feature_cache.py  features kept on disk
feature_files.py  features that other programs stored
rows.py           sequences laid into rows; the batch of a step
prepared.py       the rows of a run, kept in its folder
prompts.py        prompts cut out of documents or read from a file
"""

from poss_jax.data.conversations import (
    Chat,
    Document,
    Rendered,
    Tokens,
    plain_texts,
    read_questions,
)
from poss_jax.data.feature_cache import LOCK, FeatureCache, open_cache
from poss_jax.data.feature_files import FeatureFiles
from poss_jax.data.features import FeatureSource, LazyFeatures, RowsWithFeatures, join_features
from poss_jax.data.prepared import Prepared, make_prepared, prepare
from poss_jax.data.prompts import prompts_from_documents
from poss_jax.data.records import Broken, read_records
from poss_jax.data.rendering import RenderError, render_chats
from poss_jax.data.rows import Rows, batch_at, make_rows, rows_at
from poss_jax.data.sources import Documents, Tally, load_documents
from poss_jax.data.templates import ChatTemplate
from poss_jax.data.tokenizer import (
    CHAT_TEMPLATE,
    call_tokenizer,
    load_tokenizer,
    special_pattern,
    train_tokenizer,
)

__all__ = [
    "CHAT_TEMPLATE",
    "LOCK",
    "Broken",
    "Chat",
    "ChatTemplate",
    "Document",
    "Documents",
    "FeatureCache",
    "FeatureFiles",
    "FeatureSource",
    "LazyFeatures",
    "Prepared",
    "RenderError",
    "Rendered",
    "Rows",
    "RowsWithFeatures",
    "Tally",
    "Tokens",
    "batch_at",
    "call_tokenizer",
    "join_features",
    "load_documents",
    "load_tokenizer",
    "make_prepared",
    "make_rows",
    "open_cache",
    "plain_texts",
    "prepare",
    "prompts_from_documents",
    "read_questions",
    "read_records",
    "render_chats",
    "rows_at",
    "special_pattern",
    "train_tokenizer",
]
