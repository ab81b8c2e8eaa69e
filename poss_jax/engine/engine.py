"""The engine: a target, optionally a draft, and the calls that answer prompts with them.

engine = poss_jax.Engine.load("models/llama", draft="models/poss3")
for answer in engine.generate(["def fibonacci("], max_new_tokens=64):
    print(answer.text, answer.mean_acceptance_length)
for chunk in engine.stream("def fibonacci(", max_new_tokens=64):
    print(chunk.text, end="", flush=True)

Without a draft the same calls decode autoregressively, and give the same text.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.reading import UserError
from poss_jax.engine.answers import Chunk, Generation
from poss_jax.engine.batch import FixedBatch
from poss_jax.engine.loop import Loop, stream_batch
from poss_jax.engine.models import Models
from poss_jax.engine.prompts import (
    PreparedPrompt,
    Prompt,
    PromptTooLong,
    Rendering,
    check_bias,
    encode_prompt,
    sampling_per_prompt,
)
from poss_jax.engine.rounds import MOST_ROUNDS


class Engine(Models):
    """Decodes prompts with a target, speculatively if it holds a draft.

    A prompt passes two calls: `prepare` tokenises and checks it; `decode` runs a batch of them, and
    `decode_rounds` one as a stream. `generate` and `stream` do both.
    """

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        batch_size: int = 1,
        sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """Continues every prompt.

        Args:
          prompts: texts, token ids or chat messages.
          max_new_tokens: most new tokens of each.
          batch_size: number of prompts decoded together.
          sampling: how tokens are chosen, for all prompts (the first gets its seed, the others
            seeds derived from it and their index) or one per prompt; None is greedy.
          stop: strings that end an answer; they are not part of it.

        Raises:
          UserError: a prompt is empty, too long, or holds ids outside the vocabulary; stop strings
            without a tokenizer, or an empty one; more than the memory can hold.
        """
        if isinstance(prompts, str):
            raise UserError("prompts: want a list, got one text; put it into a list")
        if batch_size < 1:
            raise UserError(f"batch_size: want at least 1, got {batch_size}")
        settings = sampling_per_prompt(sampling, len(prompts))
        prepared = [
            self.prepare(prompt, max_new_tokens, setting)
            for prompt, setting in zip(prompts, settings, strict=True)
        ]
        self.check_stop(stop)
        return self.decode(prepared, batch_size=batch_size, stop=stop)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[Chunk]:
        """Continues one prompt, round by round; gives the text of `generate`.

        Yields:
          A chunk per round; the last one holds the whole answer.

        Raises:
          UserError: as `generate`.
        """
        prepared = self.prepare(prompt, max_new_tokens, sampling)
        self.check_stop(stop)
        return self.decode_rounds(prepared, stop=stop)

    def prepare(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: SamplingConfig | None = None,
        *,
        shortens: bool = False,
        max_length: int | None = None,
        stop_ids: Sequence[int] | None = None,
        num_continued: int = 0,
        is_chat: bool | None = None,
        shown_ids: Sequence[int] = (),
        drafts: bool = True,
        lookup: bool | None = None,
    ) -> PreparedPrompt:
        """Tokenises a prompt and checks it, its settings and limit; later code trusts the result.

        Args:
          prompt: text, token ids or chat messages.
          max_new_tokens: most new tokens.
          sampling: how tokens are chosen; None is greedy.
          shortens: lower `max_new_tokens` to the capacity that the prompt leaves.
          max_length: most tokens of prompt and answer together, at most the engine's; None: that.
          stop_ids: tokens that end the answer; None: the engine's.
          num_continued: tokens at the end of the prompt that already belong to the answer.
          is_chat: the answer is decoded alone; None: if the prompt holds messages.
          shown_ids: special tokens whose names belong to the answer's text.
          drafts: False decodes it without drafts and copies.
          lookup: False decodes it without copies, True refuses to; None: as the engine does.

        Raises:
          UserError: what `encode_prompt` refuses, a biased token outside the vocabulary, nothing
            but continued tokens, lookup where the engine has none, or (`PromptTooLong`) prompt and
            answer longer than `max_length`.
        """
        if lookup and not self.settings.lookup:
            raise UserError("lookup: copies want an engine or server with such as --lookup 8")
        sampling, ids = sampling or SamplingConfig(), self.encode(prompt)
        longest = max_length or self.max_length
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: want at least 1, got {max_new_tokens}")
        if shortens:
            max_new_tokens = max(min(max_new_tokens, longest - len(ids)), 1)
        if len(ids) + max_new_tokens > longest:
            raise PromptTooLong(len(ids), max_new_tokens, longest)
        check_bias(sampling, self.target_config.vocab_size)
        if num_continued >= len(ids):
            raise UserError("continued_tokens: want fewer than the prompt has")
        is_chat = isinstance(prompt[0], dict) if is_chat is None else is_chat
        stop_ids = self.stop_ids if stop_ids is None else stop_ids
        settings = max_new_tokens, sampling, stop_ids, num_continued, is_chat, shown_ids
        return PreparedPrompt(ids, *settings, drafts=drafts, lookup=lookup is not False)

    def encode(
        self, prompt: Prompt, rendering: Rendering | None = None, *, is_bare: bool = False
    ) -> list[int]:
        """Turns a prompt into token ids (see `encode_prompt`)."""
        V = self.target_config.vocab_size
        return encode_prompt(prompt, self.tokenizer, V, rendering, is_bare=is_bare)

    def check_stop(self, stop: Sequence[str]) -> None:
        """Raises UserError for an empty stop string, or if there is no tokenizer to find one."""
        if isinstance(stop, str):
            raise UserError("stop: want a list of strings, got one string; put it into a list")
        if stop and self.tokenizer is None:
            raise UserError("stop: this target has no tokenizer to find strings with; leave it out")
        if not all(stop):
            raise UserError("stop: want strings, got an empty one; leave it out")

    # ----------------------------------------------------------------------------------------------
    # Decoding prepared prompts

    def decode(
        self, prompts: Sequence[PreparedPrompt], *, batch_size: int = 1, stop: Sequence[str] = ()
    ) -> list[Generation]:
        """Answers prepared prompts, `batch_size` together; `check_stop` has accepted `stop`.

        Raises:
          UserError: more than the memory can hold, or a grammar has become too complex.
        """
        answers: list[Generation] = []
        for first in range(0, len(prompts), batch_size):
            batch = FixedBatch(self, prompts[first : first + batch_size], batch_size=batch_size)
            loop = Loop(batch, num_rounds=MOST_ROUNDS)
            tickets = loop.start(stop)
            while not loop.is_idle:
                loop.turn()
            answers += [chunk.answer for ticket in tickets for chunk in ticket if chunk.answer]
        return answers

    def decode_rounds(self, prompt: PreparedPrompt, *, stop: Sequence[str] = ()) -> Iterator[Chunk]:
        """Answers one prepared prompt round by round; yields what `stream` yields."""
        return stream_batch(FixedBatch(self, [prompt]), stop)

    def precompile(self, lengths: Sequence[int], *, batch_size: int = 1) -> None:
        """Compiles the programs for some lengths, greedy and sampled.

        Args:
          lengths: most tokens of prompt and answer together, one per expected length.
          batch_size: number of prompts decoded together.

        Raises:
          UserError: a length is beyond `max_length`, or more than the memory can hold.
        """
        for length, sampling in product(lengths, (None, SamplingConfig(temperature=1))):
            if not 1 < length <= self.max_length:
                raise UserError(f"precompile: want 2 to {self.max_length} tokens, got {length}")
            prompt = self.prepare([0], length - 1, sampling)
            FixedBatch(self, [prompt], batch_size=batch_size).compile()
