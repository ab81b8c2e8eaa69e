"""Requests for servers, and the right answers to them."""

from dataclasses import dataclass
from typing import Any

from benchmarks.schemas import KINDS, Schema, draw_schemas
from poss_jax.config.decoding import SamplingConfig
from poss_jax.engine.engine import Engine
from poss_jax.engine.grammar import Grammar
from poss_jax.engine.prompts import PreparedPrompt

PROMPTS = ("def read_lines(path):\n", "class Node:\n    def __init__", "import os\n", "for i in ")
SHARED = "".join(f"def add_{n}(value):\n    return value + {n}\n\n\n" for n in range(10))
NUM_CASES = 64


@dataclass(frozen=True)
class Case:
    """A request, and the tokens of the right answer; some follow a schema."""

    prompt: PreparedPrompt
    schema: Schema | None
    expected: list[int]

    @property
    def body(self) -> dict[str, Any]:
        """The request."""
        schema = {"name": "answer", "schema": self.schema}
        return {
            "prompt": self.prompt.ids,
            "max_tokens": self.prompt.max_new_tokens,
            "temperature": self.prompt.sampling.temperature,
            "seed": self.prompt.sampling.seed,
            "stream": True,
            "return_token_ids": True,
            "response_format": self.schema and {"type": "json_schema", "json_schema": schema},
        }


def make_cases(engine: Engine, max_new_tokens: int, *, is_mixed: bool = False) -> list[Case]:
    """Draws requests, and answers them without a server; mixed ones share prefixes or a schema."""
    drawn = [schema for _, schema in draw_schemas(1 + NUM_CASES // len(KINDS))]
    schemas = [drawn[i] if is_mixed and i % 3 == 0 else None for i in range(NUM_CASES)]
    prompts = [
        engine.prepare(
            SHARED * (is_mixed and i % 2) + PROMPTS[i % len(PROMPTS)],
            max_new_tokens,
            SamplingConfig(temperature=1.0, seed=i),
            grammar=Grammar.json_schema(schema) if schema else None,
        )
        for i, schema in enumerate(schemas)
    ]
    answers = engine.decode(prompts, batch_size=8)
    expected = [answer.output_ids for answer in answers]
    return list(map(Case, prompts, schemas, expected))
