"""Settings of `poss regenerate`, which lets a target write chats."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from poss_jax.config.data import DataConfig
from poss_jax.config.decoding import AnswerConfig, SamplingConfig
from poss_jax.config.models import STRICT
from poss_jax.config.numbers import INT32_MAX, Count, Fraction, Probability, Temperature
from poss_jax.config.reading import parse_yaml, refuse_given, shorten

_Int = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]
_Float = Annotated[float, Field(ge=-1e30, le=1e30)]
Scalar = Annotated[  # an option's text is parsed like a config value: `false` is a boolean
    bool | _Int | _Float | str,
    BeforeValidator(lambda value: parse_yaml(value) if isinstance(value, str) else value),
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RegenerateConfig(AnswerConfig):
    """One run of `poss regenerate`.

    Attributes:
      target: Model folder of the target; with server, only for its tokenizer, whose special tokens
        no question may spell out.
      server: Address of a chat server with OpenAI's interface that answers instead, such as
        http://localhost:8000/v1; the environment variable OPENAI_API_KEY holds its key.
      model: Name of the server's model; null takes the first it lists.
      concurrency: Questions sent to the server at a time.
      batch_size: Number of questions that the target answers together.
      chat_template_kwargs: Values for the server's chat template, such as
        enable_thinking=false.
      data: The questions; its keys about rows and training have no effect.
      output: JSONL file of chats to write; failures go into a file next to it.
      keeps_unfinished: Keep answers that reach max_new_tokens; otherwise their chat ends before
        them.
      temperatures: Temperatures of the answers, one per chat, repeated; empty takes
        sampling.temperature.
      self_prompt: Number of chats whose user turns the target writes; unusable ones count.
      source_share: Share of these chats that use the questions of data.source instead.
      self_prompt_turns: Most user turns of a chat that the target writes.
      self_prompt_tokens: Most tokens of such a turn; a longer one is dropped.
      self_prompt_temperature: Temperature of such turns.
      self_prompt_top_p: Sample such turns from the most likely tokens that together have this
        probability.
    """

    target: str | None = None
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    server: str | None = None
    model: str | None = None
    concurrency: Count = 16
    chat_template_kwargs: dict[str, Scalar] | None = None
    output: str
    data: DataConfig = Field(default_factory=DataConfig)
    max_new_tokens: Count = 1024
    batch_size: Count = 8
    keeps_unfinished: bool = False
    temperatures: tuple[Temperature, ...] = ()
    self_prompt: Count | None = None
    source_share: Fraction = 0.0
    self_prompt_turns: Count = 1
    self_prompt_tokens: Count = 192
    self_prompt_temperature: Temperature = 1.0
    self_prompt_top_p: Probability = Field(default=0.95, gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.self_prompt is None:
            names = "self_prompt_turns self_prompt_tokens self_prompt_temperature "
            names += "self_prompt_top_p source_share"
            refuse_given(self, names, "concerns turns that the target writes; give self_prompt")
        if self.self_prompt is not None and self.data.is_code == (self.source_share > 0):
            raise ValueError("source_share: want it above 0 with a data.source, and only then")
        if self.self_prompt is not None and self.target is None:
            raise ValueError("self_prompt: want --target DIR, whose tokenizer opens a user's turn")
        if self.self_prompt is None and self.data.is_code:
            raise ValueError(
                f"data.source: want chats or questions (--source DATA), got {self.data.source}, "
                "which holds none; or self_prompt, to let the target write questions"
            )
        if (url := self.server) is None:
            if self.target is None:
                raise ValueError("want a target (--target DIR), or a server (--server URL)")
            names = "model concurrency chat_template_kwargs"
            refuse_given(self, names, "applies only to a server; give it, or leave this out")
            return
        address = urlsplit(url)
        is_plain = address.scheme in ("http", "https") and re.fullmatch("[!-~]+", url)
        if not (is_plain and address.hostname) or address.query or address.fragment:
            raise ValueError(f"server: want such as http://localhost:8000/v1, got {shorten(url)}")
        _ = address.port, address.hostname.encode("idna")  # raise ValueError
        names = "draft drafting lookup tree trees quantise mesh draft_vocabulary draft_window "
        names += "batch_size max_length allow_target_mismatch"
        refuse_given(self, names, "applies only to a local target; leave it or server out")
        if self.data.template is not None:
            raise ValueError("data.template: the server has its own; leave it out")
