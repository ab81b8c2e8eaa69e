"""The names of trees in reports."""

from poss_jax.config.models import TreeConfig


def tree_name(tree: TreeConfig) -> str:
    """Names a tree as options do."""
    return f"{tree.depth}/{tree.top_k}/{tree.total_tokens}"
