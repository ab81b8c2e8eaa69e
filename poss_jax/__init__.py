"""poss_jax: position-specialist speculative decoding in JAX and Flax."""

__version__ = "0.1.0"
