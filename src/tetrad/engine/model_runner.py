"""The model, its caches and its buffers on one device: runs a batch and gives back logits."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from tetrad.cache.kv_cache import KVCaches
from tetrad.cache.spec import CacheSizes, format_bytes
from tetrad.engine.batch import Batch
from tetrad.engine.config import DEFAULT_CPU_CACHE_GB, EngineConfig
from tetrad.engine.step_stager import StepStager
from tetrad.errors import ConfigError
from tetrad.models.checkpoint.dummy import fill_dummy
from tetrad.models.checkpoint.reader import load_checkpoint
from tetrad.models.deepseek_v4 import DeepseekV4
from tetrad.models.indexer import IndexerOptions

logger = logging.getLogger(__name__)
_GIB = 1 << 30


class ModelRunner:
    """Loads the weights, allocates the caches, and turns each batch into logits."""

    def __init__(self, config: EngineConfig, *, progress: bool = False) -> None:
        self.config = config
        # on a CPU the arithmetic comes before the weights, so that a wrong size is known at once
        sizes = config.cache_sizes(self._cache_bytes()) if config.device.type == "cpu" else None
        self.model = self._load(progress)
        self.sizes: CacheSizes = sizes or config.cache_sizes(self._cache_bytes())
        self.caches = self._allocate()
        self.stager = StepStager(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            device=config.device,
        )
        logger.info(
            "caches: %d blocks, %d window blocks, %d compressor states, %s in all",
            self.sizes.blocks,
            self.sizes.window_blocks,
            self.sizes.state_slots,
            format_bytes(self.sizes.total_bytes(config.cache_spec)),
        )

    def _load(self, progress: bool) -> DeepseekV4:
        config = self.config
        with config.device:
            model = DeepseekV4(
                config.model,
                config.dtype,
                quant=config.activation_quant,
                indexer_options=IndexerOptions(config.logits_budget_bytes),
            )
        if config.args.load_format == "dummy":
            fill_dummy(model, config.model, config.args.seed or 0)
        else:
            load_checkpoint(config.args.model, config.model, model, device=config.device, progress=progress)
        return model.eval()

    def _allocate(self) -> KVCaches:
        spec = self.config.cache_spec
        try:
            return KVCaches(spec, self.sizes, self.config.device)
        except RuntimeError as error:  # torch raises nothing more exact on a CPU
            raise ConfigError(
                f"the caches take {format_bytes(self.sizes.total_bytes(spec))}, which {self.config.device} does not "
                f"have ({str(error).splitlines()[0]}); lower --kv-cache-memory-gb or --num-gpu-blocks-override"
            ) from error

    def _cache_bytes(self) -> int:
        """Bytes that the caches may take."""
        args, device = self.config.args, self.config.device
        if args.kv_cache_memory_gb is not None:
            return int(args.kv_cache_memory_gb * _GIB)
        if device.type == "cpu":
            return int(DEFAULT_CPU_CACHE_GB * _GIB)
        free, total = torch.cuda.mem_get_info(device)
        return max(int(total * args.gpu_memory_utilization) - (total - free), 0)

    @torch.no_grad()
    def execute(self, batch: Batch) -> Tensor:
        """Run one step. Returns logits fp32 [S, vocabulary], one row per sequence whose ``samples`` is set."""
        if batch.copies:
            self.caches.copy(batch.copies)
        inputs = self.stager.stage(batch)
        return self.model(inputs, self.model.metadata(inputs), self.caches)
