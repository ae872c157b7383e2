"""A model with paged caches, driven by hand: any tokens of any sequences in any step, all logits given back."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.cache.block_manager import BlockManager, Holding
from tetrad.cache.kv_cache import KVCaches
from tetrad.cache.spec import CacheSizes, CacheSpec
from tetrad.engine.batch import Batch, ScheduledSequence
from tetrad.engine.step_stager import StepStager
from tetrad.geometry import IndexDtype, KVDtype, blocks_for, window_blocks_bound
from tetrad.models.checkpoint.dummy import fill_dummy
from tetrad.models.config import ModelConfig
from tetrad.models.deepseek_v4 import DeepseekV4
from tetrad.models.indexer import IndexerOptions
from tetrad.models.linear import ActivationQuant


def dummy_model(
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    quant: ActivationQuant = ActivationQuant.NONE,
    logits_budget_bytes: int = 2048 << 20,
) -> DeepseekV4:
    """A model with seeded random weights."""
    model = DeepseekV4(config, dtype, quant=quant, indexer_options=IndexerOptions(logits_budget_bytes))
    fill_dummy(model, config, seed)
    return model


@dataclass
class FakeSequence:
    """As much of an engine's sequence as the stager reads."""

    token_ids: list[int]
    holding: Holding
    computed: int = 0
    is_stem: bool = False

    @property
    def length(self) -> int:
        return len(self.token_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        return self.token_ids[start:end]


class Session:
    """Sequences over one model. Caches are poisoned with NaN, and blocks are handed out in a scattered order."""

    def __init__(
        self,
        model: DeepseekV4,
        *,
        kv_dtype: str = "fp32",
        index_dtype: str = "fp32",
        dtype: torch.dtype = torch.float32,
        max_len: int = 1024,
        max_seqs: int = 4,
        scatter: int = 0,
    ) -> None:
        config = model.config
        self.model = model
        spec = CacheSpec(
            config.compress_ratios,
            config.head_dim,
            config.qk_rope_head_dim,
            config.index_head_dim,
            config.sliding_window,
            KVDtype(kv_dtype),
            IndexDtype(index_dtype),
            dtype,
        )
        sizes = CacheSizes(
            blocks_for(max_len) * max_seqs,
            window_blocks_bound(max_seqs, max_len * max_seqs, config.sliding_window),
            max_seqs,
        )
        self.caches = KVCaches(spec, sizes, "cpu")
        self.caches.poison()
        self.manager = BlockManager(sizes, config.sliding_window)
        generator = torch.Generator().manual_seed(scatter)
        for pool in (self.manager.blocks, self.manager.window_blocks, self.manager.state_slots):
            pool._free = torch.randperm(pool.size, generator=generator).tolist()
        self.stager = StepStager(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=max_len * max_seqs,
            max_model_len=max_len,
            device=torch.device("cpu"),
        )
        self.sequences: dict[str, FakeSequence] = {}

    @torch.no_grad()
    def feed(self, tokens: dict[str, list[int]]) -> dict[str, tuple[Tensor, Tensor]]:
        """One step: append these tokens to these sequences. Per sequence (logits [n, V], streams [n, N, D])."""
        batch = Batch()
        for name, new in tokens.items():
            if name not in self.sequences:
                self.sequences[name] = FakeSequence([], self.manager.admit())
            sequence = self.sequences[name]
            start = sequence.length
            sequence.token_ids += new
            assert self.manager.grow(sequence.holding, start, sequence.length)
            batch.scheduled.append(ScheduledSequence(sequence, start, len(new)))  # type: ignore[arg-type]
        inputs = self.stager.stage(batch)
        streams = self.model.streams(inputs, self.model.metadata(inputs), self.caches)[: inputs.rows]
        logits = self.model.logits(streams)
        result, row = {}, 0
        for item, name in zip(batch.scheduled, tokens, strict=True):
            result[name] = (logits[row : row + item.count].clone(), streams[row : row + item.count].clone())
            row += item.count
            self.manager.leave_behind(item.sequence.holding, item.end)
        return result

    def run(self, name: str, tokens: list[int], chunks: list[int]) -> tuple[Tensor, Tensor]:
        """Feed one sequence in chunks (the last one repeats); logits and streams of all its tokens."""
        chunks = copy.copy(chunks)
        parts, place = [], 0
        while place < len(tokens):
            size = chunks.pop(0) if len(chunks) > 1 else chunks[0]
            parts.append(self.feed({name: tokens[place : place + size]})[name])
            place += size
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def release(self, name: str) -> None:
        """Give a sequence's holdings back; its blocks keep stale contents, as they would in an engine."""
        self.manager.release(self.sequences.pop(name).holding)
