"""Every setting of the project as a frozen dataclass, and strict YAML loading with overrides.

models.py        shapes of target, draft and tree (hashable: static arguments of jitted functions)
training.py      training runs
decoding.py      runs of the programs that decode; sampling
numbers.py       types of their numbers, with bounds
reading.py       YAML files, `base:`, dotted overrides, keys and their help, messages
yaml_text.py     YAML within limits
json_reading.py  JSON that others wrote
"""

from poss_jax.config.decoding import (
    AnswerConfig,
    BenchConfig,
    DecodingConfig,
    GenerateConfig,
    RegenerateConfig,
    SamplingConfig,
)
from poss_jax.config.json_reading import (
    JsonError,
    check_own_file,
    check_text,
    parse_json,
    parse_object,
    read_json,
)
from poss_jax.config.models import (
    ACCELERATOR_TREE,
    CPU_TREE,
    DraftConfig,
    LlamaConfig,
    RopeConfig,
    TreeConfig,
)
from poss_jax.config.reading import (
    Key,
    UserError,
    build_config,
    change_config,
    config_to_dict,
    cut,
    list_keys,
    load_config,
    read_values,
    read_yaml,
    shorten,
)
from poss_jax.config.training import (
    DataConfig,
    FeaturesConfig,
    MeshConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProfileConfig,
    SpecialistsConfig,
    StepConfig,
    TrainConfig,
)
from poss_jax.config.yaml_text import lone_surrogates, parse_yaml

__all__ = [
    "ACCELERATOR_TREE",
    "CPU_TREE",
    "AnswerConfig",
    "BenchConfig",
    "DataConfig",
    "DecodingConfig",
    "DraftConfig",
    "FeaturesConfig",
    "GenerateConfig",
    "JsonError",
    "Key",
    "LlamaConfig",
    "MeshConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "RegenerateConfig",
    "RopeConfig",
    "SamplingConfig",
    "SpecialistsConfig",
    "StepConfig",
    "TrainConfig",
    "TreeConfig",
    "UserError",
    "build_config",
    "change_config",
    "check_own_file",
    "check_text",
    "config_to_dict",
    "cut",
    "list_keys",
    "load_config",
    "lone_surrogates",
    "parse_json",
    "parse_object",
    "parse_yaml",
    "read_json",
    "read_values",
    "read_yaml",
    "shorten",
]
