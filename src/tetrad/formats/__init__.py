"""Number formats in plain torch: what the bits of a checkpoint and of the caches mean.

================  ==========================================================================================
module            what it holds
================  ==========================================================================================
:mod:`.e8m0`      a power of two in one byte: 2^(byte - 127), 255 is NaN. The scale of every format below.
:mod:`.mxfp4`     E2M1, two values to a byte (low nibble = even element), one e8m0 scale per 32 values.
                  Index keys and queries, and the routed experts of a checkpoint.
:mod:`.fp8`       E4M3 (finite only, largest 448), one power-of-two scale per group of a row (64 for the KV
                  cache, 128 for the inputs of linears, the whole row for index keys) or per 128x128 tile
                  (weights).
:mod:`.hadamard`  the orthogonal rotation that spreads an outlier channel over all channels before FP4.
================  ==========================================================================================

One rule serves all of them: the scale of a group is the smallest power of two that brings its largest magnitude into
the format's range, found by looking at fp32 bits, so that no logarithm rounds and dividing by it is exact. Values are
rounded to the nearest, ties to the even code. A group that holds an infinity or a NaN gets the scale byte 255
and comes back as NaN: a broken key never looks like a good one.

Nothing here reads a value back from the device or copies a table to it. The bits are promised for torch's ordinary
arithmetic: ``torch.set_flush_denormal(True)`` turns values under 2^-126 into zeros.
"""

from __future__ import annotations

from tetrad.formats import e8m0, fp8, hadamard, mxfp4

__all__ = ["e8m0", "fp8", "hadamard", "mxfp4"]
