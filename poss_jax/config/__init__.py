"""Every setting of the project as a frozen dataclass, and strict YAML loading with overrides.

models.py        shapes of target, draft and tree (hashable: static arguments of jitted functions)
runs.py          training runs and benchmarks
numbers.py       types of their numbers, with bounds
reading.py       YAML files, `base:`, dotted overrides, messages
yaml_text.py     YAML within limits
json_reading.py  JSON that others wrote
"""

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
    UserError,
    build_config,
    change_config,
    config_to_dict,
    cut,
    load_config,
    read_yaml,
    shorten,
)
from poss_jax.config.runs import (
    BenchConfig,
    DataConfig,
    FeaturesConfig,
    MeshConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProfileConfig,
    SamplingConfig,
    SpecialistsConfig,
    StepConfig,
    TrainConfig,
)
from poss_jax.config.yaml_text import lone_surrogates, parse_yaml

__all__ = [
    "ACCELERATOR_TREE",
    "CPU_TREE",
    "BenchConfig",
    "DataConfig",
    "DraftConfig",
    "FeaturesConfig",
    "JsonError",
    "LlamaConfig",
    "MeshConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ProfileConfig",
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
    "load_config",
    "lone_surrogates",
    "parse_json",
    "parse_object",
    "parse_yaml",
    "read_json",
    "read_yaml",
    "shorten",
]
