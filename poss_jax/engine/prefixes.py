"""Prefix cache: keys and values of prompts' beginnings, for later prompts that begin alike.

    prompt   [ block 0 | block 1 | block 2 | rest ]
    later    [ block 0 | block 1 | another one ... ]     reads from block 2 on

A block is a whole chunk of a prompt. Its rows are copied from the prompt that computed them, and
copied to the same place in a later one, whose caches then hold, bit for bit, what its own chunks
would have written. Rows that rounds wrote equal those only up to rounding, so none are kept: an
answer is read with the next turn of its chat.

The least recently used block goes first, and the end of a prompt before its beginning. What is kept
depends on the prompts and their order alone, so all processes of a model keep the same.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256

import jax
import numpy as np
from jax.experimental import multihost_utils

from poss_jax.decode.state import StaticShape, Weights
from poss_jax.engine.device import cache_bytes, device_memory, least_bytes
from poss_jax.engine.steps import Block


def name_blocks(ids: Sequence[int], rotations: Sequence[int], *, chunk: int) -> list[bytes]:
    """Names the blocks of a prompt by all that their rows depend on.

    That is every token up to the block's end and the one after it, with which the draft's last row
    is paired; so the last token of a prompt, which must be read, is in no block.

    Args:
      rotations: `RopeConfig.rotation` of target and draft.
      chunk: tokens per block.
    """
    names, name = [], str(rotations).encode()
    for end in range(chunk, len(ids), chunk):
        name = sha256(name + np.asarray(ids[end - chunk : end + 1], np.int32).tobytes()).digest()
        names.append(name)
    return names


class Prefixes:
    """The blocks that are kept.

    Attributes:
      most: most blocks.
      most_bytes: their size on each device.
    """

    def __init__(self, max_blocks: int, most_bytes: int = 0) -> None:
        self.most, self.most_bytes = max_blocks, most_bytes
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, names: Sequence[bytes]) -> list[Block]:
        """Finds the blocks that a prompt begins with."""
        self._renew(names)
        blocks = []
        for name in names:
            if name not in self._blocks:
                break
            blocks.append(self._blocks[name])
        return blocks

    def keep(self, names: Sequence[bytes], new: range, cut: Callable[[int], Block]) -> None:
        """Keeps new blocks of a prompt, as long as blocks of other prompts can be dropped.

        Args:
          names: names of all blocks of the prompt.
          new: indices of the new ones.
        """
        for index in new:
            if names[index] in self._blocks:
                continue
            if len(self._blocks) == self.most:
                oldest = next(iter(self._blocks), names[index])
                if oldest in names:
                    break
                del self._blocks[oldest]
            self._blocks[names[index]] = cut(index)
        self._renew(names)

    def _renew(self, names: Sequence[bytes]) -> None:
        """Marks the blocks of a prompt as just used, the first one last."""
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def clear(self) -> None:
        """Forgets all blocks."""
        self._blocks.clear()


def make_prefixes(
    weights: Weights, config: StaticShape, most_bytes: int, *, batch_size: int
) -> Prefixes:
    """Makes a prefix cache, which takes at most half the memory that is left.

    Args:
      most_bytes: most bytes per device.
      batch_size: sequences whose caches are held besides.
    """
    if (available := device_memory()) is not None:
        free = available - least_bytes(weights, config, batch_size=batch_size)
        most_bytes = max(min(most_bytes, free // 2), 0)
    block_bytes = cache_bytes(weights, config._replace(rows=config.chunk))
    max_blocks = most_bytes // block_bytes
    if jax.process_count() > 1:
        max_blocks = multihost_utils.process_allgather(np.int32(max_blocks)).min()
    return Prefixes(int(max_blocks), int(max_blocks) * block_bytes)
