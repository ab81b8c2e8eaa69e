"""Results of a long measurement, kept one by one: the same command resumes after an interruption.

They lie in `unfinished` of the cache folder until the measurement is finished.
"""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from poss_jax.checkpoint.whole import write_file
from poss_jax.config.bench import BenchConfig
from poss_jax.config.paths import cache_folder
from poss_jax.config.reading import config_to_dict
from poss_jax.engine.prompts import PreparedPrompt

from .bench.measure import Decoder, digest, identify

_LOG = logging.getLogger(__name__)


class Kept:
    """Results by name, all JSON-compatible.

    Attributes:
      path: their file, a JSON line per result.
    """

    def __init__(self, program: str, made_from: dict[str, Any]) -> None:
        """Finds what an interrupted run has kept.

        Args:
          program: name of the program.
          made_from: all that decides the results, JSON-compatible.
        """
        file = f"{program}-{digest(made_from)[:16]}.jsonl"
        self.path = cache_folder() / "unfinished" / file
        self._results: dict[str, Any] = {}
        if self.path.is_file():
            lines = self.path.read_text().rpartition("\n")[0]  # the last may be incomplete
            write_file(self.path, lines + "\n" * bool(lines))
            for line in lines.splitlines():
                self._results |= json.loads(line)
            _LOG.warning("going on with %d results of %s", len(self._results), self.path)

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """Returns a result, which is measured unless it was kept; as JSON gives it back."""
        if name not in self._results:
            line = json.dumps({name: measure()})
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(f"{line}\n")
            self._results |= json.loads(line)
        return self._results[name]

    def finish(self) -> None:
        """Removes the file."""
        self.path.unlink(missing_ok=True)


def describe(
    config: BenchConfig,
    decoders: Sequence[Decoder],
    prompts: Sequence[PreparedPrompt],
    **settings: Any,
) -> dict[str, Any]:
    """All that decides texts and times of some decoders, JSON-compatible."""
    of_run = {"config": config_to_dict(config), "prompts": [prompt.ids for prompt in prompts]}
    return settings | of_run | identify(config, decoders)
