"""How the authors of a model recommend to sample from it: its generation_config.json."""

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.json_reading import read_json
from poss_jax.config.paths import AnyPath, as_path, local_files
from poss_jax.config.reading import build_config

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_recommended(folder: str | AnyPath) -> SamplingConfig:
    """Reads the recommended sampling settings of a model folder; greedy if there are none.

    `do_sample` decides whether tokens are drawn, as in `transformers`; without it a temperature
    does. What the file leaves out is neutral.

    Raises:
      UserError: the file is malformed.
    """
    with local_files(as_path(folder), [_FILE]) as local:
        path = local / _FILE
        values = read_json(path) if path.is_file() else {}
        settings = {name: values[name] for name in _NAMES if values.get(name) is not None}
        is_sampled = values.get("do_sample", "temperature" in settings)
        settings["temperature"] = settings.get("temperature", 1.0) if is_sampled else 0.0
        return build_config(SamplingConfig, settings, origin=str(path))
