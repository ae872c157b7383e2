"""The flags of ``SamplingParams``: how tokens are chosen and when an output ends."""

from __future__ import annotations

import argparse
from typing import Any

from tetrad.cli.flags import json_object, token_ids
from tetrad.cli.parser import described
from tetrad.frontend.sampling_params import SamplingParams

_NUMBERS: dict[str, tuple[type, str, str]] = {
    "n": (int, "N", "choices for each prompt; more than one needs a temperature above 0"),
    "max_tokens": (int, "N", "the most tokens of an output"),
    "min_tokens": (int, "N", "no end token and no stop text ends an output before it has this many tokens"),
    "logprobs": (
        int,
        "N",
        "give the log probabilities of the N likeliest tokens and of the chosen one, 0 to 20 (default: none)",
    ),
    "temperature": (float, "X", "0 to 2: 0 always takes the likeliest token, a larger one spreads the choice"),
    "top_p": (float, "X", "keep the likeliest tokens whose probabilities together reach this; 1 keeps all"),
    "top_k": (int, "N", "keep this many of the likeliest tokens; -1 and 0 keep all"),
    "min_p": (float, "X", "drop tokens that are less likely than this share of the likeliest one; 0 drops none"),
    "presence_penalty": (float, "X", "-2 to 2: lowers the logit of each token that the output already has"),
    "frequency_penalty": (float, "X", "-2 to 2: lowers the logit of a token once for each time the output has it"),
    "repetition_penalty": (
        float,
        "X",
        "above 1 makes tokens of the prompt and the output less likely, below 1 more likely",
    ),
}
_ALIASES = {"max_tokens": ("--max-new-tokens",)}
"""Names of other engines for exactly the same."""


def add_sampling_flags(group: Any) -> None:
    """Add them to a parser or an argument group; numbers that are not given stay absent."""
    for name, (kind, metavar, text) in _NUMBERS.items():
        default = SamplingParams.__dataclass_fields__[name].default
        group.add_argument(
            f"--{name.replace('_', '-')}",
            *_ALIASES.get(name, ()),
            dest=name,
            type=kind,
            default=argparse.SUPPRESS,
            metavar=metavar,
            help=described(text, str(default)),
        )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated (default: none)"
    )
    group.add_argument(
        "--stop-token-ids",
        type=token_ids,
        metavar="IDS",
        help="end with one of these tokens as well: 5,17 (default: only the model's own)",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    group.add_argument(
        "--logit-bias",
        type=json_object,
        metavar="JSON",
        help='add to the logits of tokens, from -100 to 100: {"17": -100} (default: none)',
    )
