"""How many of what: blocks, compressed entries and rings, as plain integers. Nothing here knows a tensor.

A *block* is 256 original tokens of one request. One block table per request drives three caches at once: block ``b``
holds 64 CSA entries, 64 index entries and ``256 / hca_ratio`` HCA entries. The window's raw keys lie in a *ring* per
request, and so do the tokens that a compressor still needs.
"""

from __future__ import annotations

from tetrad.errors import ConfigError, check_integer, check_whole

BLOCK_SIZE = 256
"""Original tokens in a block."""

CSA_RATIO = 4
"""Original tokens behind one CSA entry (and one index entry)."""

CSA_ENTRIES = BLOCK_SIZE // CSA_RATIO
"""CSA entries, and index entries, in a block."""

DRAFT_ROWS = 8
"""Most draft rows of a request in one step, beside the row of its last token. Rings have room for them."""

ROW_MULTIPLE = 8
"""fp32 matrix products on CPUs round alike for every row when the number of rows is a multiple of this. Nine rows
already differ from eight where the kernel handles the ninth on its own."""

_DECODE_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_CHUNK_MULTIPLE = 128


def ceil_div(numerator: int, denominator: int) -> int:
    """The least integer that is not below ``numerator / denominator``; the denominator is positive."""
    check_integer("numerator", numerator)
    check_whole("denominator", denominator, 1)
    return -(-numerator // denominator)


def window_ring(window: int) -> int:
    """Keys in a request's window ring: those that a query sees and those of :data:`DRAFT_ROWS` draft rows.

    Rounded up to a multiple of 8. A step's rows may then be written before any of them is read, and draft rows may be
    rejected: what an accepted row still sees is never overwritten.
    """
    check_whole("window", window, 1)
    return ceil_div(window + DRAFT_ROWS, 8) * 8


def pooled_tokens(ratio: int) -> int:
    """Tokens behind one compressed entry: two groups where they overlap (ratio 4), else one.

    Source: the pooling window of 2 * 4 tokens in CSA layers and of ``ratio`` tokens in HCA layers.
    """
    check_whole("ratio", ratio, 1)
    return 2 * ratio if ratio == CSA_RATIO else ratio


def compressor_ring(ratio: int) -> int:
    """Tokens that a compressor remembers of a request: those of one entry, and of :data:`DRAFT_ROWS` draft rows."""
    return pooled_tokens(ratio) + DRAFT_ROWS


def blocks_for(tokens: int) -> int:
    """Blocks that hold ``tokens`` original tokens."""
    check_whole("tokens", tokens, 0)
    return ceil_div(tokens, BLOCK_SIZE)


def width_blocks(tokens: int) -> int:
    """Blocks of the bucket that holds ``tokens`` tokens of context: the power of two, at least 1."""
    return 1 << max(blocks_for(tokens) - 1, 0).bit_length()


def bucket_rows(rows: int, device_type: str, *, chunks: bool) -> int:
    """The number of rows of the bucket that holds ``rows`` rows.

    On a CPU every multiple of 8. On a GPU a few sizes for decode rows, which a graph may be captured for, and multiples
    of 128 where a step holds chunks of prompts.
    """
    check_whole("rows", rows, 0)
    if device_type == "cpu":
        return max(1, ceil_div(rows, ROW_MULTIPLE)) * ROW_MULTIPLE
    if not chunks:
        size = next((size for size in _DECODE_SIZES if size >= rows), None)
        if size is not None:
            return size
    return max(1, ceil_div(rows, _CHUNK_MULTIPLE)) * _CHUNK_MULTIPLE


def check_block_size(block_size: int) -> None:
    """Refuse every block size but 256, with the reason."""
    check_integer("block_size", block_size)
    if block_size != BLOCK_SIZE:
        raise ConfigError(
            f"block_size {block_size} is not supported: a block is {BLOCK_SIZE} tokens, so that it holds the "
            f"{CSA_ENTRIES} index keys of one page, which the scoring kernels read together; leave --block-size out"
        )
