"""poss_jax: position-specialist speculative decoding in JAX and Flax.

Where things live:

    config, shapes      settings; axis letters
    layers, cache       linear, rotary embedding, attention, one decoder layer; key/value caches
    target, draft       the frozen Llama; fc fusion and specialists
    tree, verify        static-shape draft tree; the path the target agrees with
    sampling            processed scores, and noise that belongs to the request
    decoding            what a round reads and writes: config, weights, request, state
    speculate           the decoding round and its on-device loop
    engine              load, generate, stream: what users hold
    rollout, losses     the training recursion and what it minimises
    train_step          jitted steps
    data, checkpoint    text, tokenizer, rows; the model folder
    convert, torch_io   from Hugging Face and PyTorch checkpoints

`train/` makes weights and `infer/` uses them; both are programs around these functions.
"""

from poss_jax.config import SamplingConfig, TreeConfig, UserError
from poss_jax.engine import Chunk, Engine, Generation

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "Engine",
    "Generation",
    "SamplingConfig",
    "TreeConfig",
    "UserError",
    "__version__",
]
