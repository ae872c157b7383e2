"""The model, its caches and its buffers on one device: runs a batch and gives back logits."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from tetrad import bundled
from tetrad.cache.kv_cache import KVCaches
from tetrad.cache.spec import CacheSizes, format_bytes
from tetrad.engine import memory
from tetrad.engine.batch import Batch
from tetrad.engine.config import EngineConfig
from tetrad.engine.cpu_threads import with_cpu_threads
from tetrad.engine.step_stager import StepStager
from tetrad.errors import ConfigError
from tetrad.models.checkpoint.dummy import fill_dummy
from tetrad.models.checkpoint.reader import load_checkpoint
from tetrad.models.deepseek_v4 import DeepseekV4
from tetrad.models.indexer import IndexerOptions
from tetrad.torch_settings import undisturbed

logger = logging.getLogger(__name__)


class ModelRunner:
    """Loads the weights, allocates the caches, and turns each batch into logits."""

    @undisturbed
    def __init__(self, config: EngineConfig, *, progress: bool = False) -> None:
        self.config = config
        bundled.require_weights(config.args.model, dummy=config.args.load_format == "dummy")
        # the arithmetic comes before the weights, so that a wrong size is known at once
        weights = memory.check_weights(config)
        config.cache_sizes(memory.cache_memory(config, weights_to_come=weights))
        self.model = self._load(progress)
        self.sizes: CacheSizes = config.cache_sizes(memory.cache_memory(config))
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

    @with_cpu_threads
    def _load(self, progress: bool) -> DeepseekV4:
        config = self.config
        try:
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
        except (MemoryError, RuntimeError) as error:
            if _is_lack_of_memory(error):
                raise memory.weights_not_allocated(config, error) from error
            raise
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

    @undisturbed
    @with_cpu_threads
    def execute(self, batch: Batch) -> Tensor:
        """Run one step. Returns logits fp32 [S, vocabulary], one row per sequence whose ``samples`` is set."""
        if batch.copies:
            self.caches.copy(batch.copies)
        inputs = self.stager.stage(batch)
        return self.model(inputs, self.model.metadata(inputs), self.caches)


def _is_lack_of_memory(error: Exception) -> bool:
    # torch raises nothing more exact than RuntimeError on a CPU
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)
