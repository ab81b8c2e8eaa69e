"""Inputs and state of decoding: the static side, the weights, the request, and the state."""

from typing import NamedTuple

from flax import struct
from jax.sharding import Mesh

from poss_jax.config.models import DraftConfig, Drafting, LlamaConfig, TreeConfig
from poss_jax.decode.drafting import ChildrenFn
from poss_jax.decode.sampling import Sampling
from poss_jax.decode.verify import Logprobs
from poss_jax.model.cache import KVCache
from poss_jax.shapes import Array, Params


class StaticShape(NamedTuple):
    """Static settings of decoding."""

    target: LlamaConfig  # shape of the target
    draft: DraftConfig | None  # shape of the draft; None decodes autoregressively
    tree: TreeConfig  # size of the draft tree
    # S, capacity of each sequence: prompt, new tokens and `margin`, and the prompt in whole chunks
    rows: int
    chunk: int = 64  # prompt tokens that the target reads per forward
    drafting: Drafting = "coupled"  # how drafts propose tokens to sampled sequences
    # how the draft proposes the children of a node, instead of `drafting`
    children: ChildrenFn | None = None
    mesh: Mesh | None = None  # devices; None: one
    # False drafts nothing in this round, and keeps the draft's cache for later ones
    drafts: bool = True
    # most likely tokens whose log-probabilities are kept per position; 0: none
    num_logprobs: int = 0
    # most tokens that a round copies from prompt and output, as nodes of the tree; 0: none
    lookup: int = 0

    @property
    def is_drafting(self) -> bool:
        return self.draft is not None and self.drafts

    @property
    def num_copied(self) -> int:
        """Length of the chain that is copied."""
        num_nodes = self.tree.num_nodes if self.draft else self.tree.total_tokens
        return min(self.lookup, num_nodes - 1) if self.drafts else 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes that a round verifies, the root included."""
        return self.tree.num_nodes if self.is_drafting else 1 + self.num_copied

    @property
    def max_accepted(self) -> int:
        of_draft = self.tree.depth if self.is_drafting else 0
        return min(max(of_draft, self.num_copied), self.num_nodes - 1)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.draft.aux_layers if self.draft else ()

    @property
    def num_streams(self) -> int:
        """Streams of keys and values that a tree of this depth reads."""
        return self.draft.num_streams(self.tree.depth) if self.draft else 0

    @property
    def margin(self) -> int:
        """Rows that rounds may write beyond the limit."""
        return 2 * (self.max_accepted + 1)


class Weights(NamedTuple):
    """Parameters of the target and of the draft (after `borrow_from_target`; empty: none)."""

    target: Params
    draft: Params


class Request(struct.PyTreeNode):
    """A batch of requests, one per sequence."""

    tokens: Array  # [B P] int32, prompts, padded on the right
    lengths: Array  # [B] int32, tokens of each prompt, at least 1
    max_new_tokens: Array  # [B] int32, most new tokens, at least 1
    # tokens that end each sequence, -1 is none; one row serves all sequences
    stop_ids: Array  # [B num_stop] int32
    # how tokens are chosen; None is the argmax of the target's logits
    sampling: Sampling | None = None
    # position from which a prompt's tokens count as output (of a continued answer) for penalties on
    # the output; None: its end
    output_starts: Array | None = None  # [B] int32
    # False accepts no drafted token; None: every sequence may
    drafts: Array | None = None  # [B] bool
    lookup: Array | None = None  # [B] bool, False copies nothing; None: every sequence may


class Prefill(struct.PyTreeNode):
    """Prompts on their way into the caches, chunk by chunk."""

    cache: KVCache  # the target's, of the chunks so far
    hidden: Array  # [B 1 D], final hidden state of each prompt's last row, once its chunk has run
    features: Array  # [B 1 F], features of that row, F = D, or D per layer that the draft reads
    draft_cache: KVCache | None  # None without a draft


class Prefilled(NamedTuple):
    """Prompts in the caches."""

    logits: Array  # [B V] float32, logits of each prompt's last row
    features: Array  # [B 1 F], features of that row, F as in `Prefill`
    cache: KVCache  # the target's, all prompts committed
    draft_cache: KVCache | None  # every prompt's (feature, token) pairs but the last


class DraftState(struct.PyTreeNode):
    """State that the draft carries from round to round."""

    cache: KVCache  # committed (feature, token) pairs; the last one ends at the root
    root_input: Array  # [B 1 width], that last pair, as `commit_pairs` returns it


class Output(struct.PyTreeNode):
    """Tokens decoded so far, and statistics."""

    # chosen tokens; entries from `num_tokens` on are not part of the sequence
    tokens: Array  # [B S] int32
    num_tokens: Array  # [B] int32, tokens of each sequence
    num_accepted: Array  # [B S] int32, accepted drafted tokens of every round
    # deepest position offered along the accepted path in every round
    num_offered: Array  # [B S] int32
    # accepted tokens of every round that only lookup proposed, after the drafted ones
    num_copied: Array  # [B S] int32
    # accepted tokens of every round that only a grammar proposed, the last ones
    num_certain: Array  # [B S] int32
    num_rounds: Array  # [B] int32, rounds of each sequence
    is_done: Array  # [B] bool, the sequence has ended (stop token or limit)
    logprobs: Logprobs | None = None  # log-probabilities of the tokens; None if not requested


class DecodeState(struct.PyTreeNode):
    """The state that a round reads and writes."""

    target_cache: KVCache  # all tokens but the root
    draft: DraftState | None  # None without a draft
    root: Array  # [B] int32, the last chosen token
    output: Output  # tokens and statistics
