"""DeepGEMM 2.8's public calls in torch: its names, its signatures and no others, and the checks that its own make."""

from __future__ import annotations

import torch

from tests.bench import fake_deep_gemm as older

__version__ = "2.8.1"
SMS = older.SMS
calls = older.calls
early_start: list[bool] = []
"""Whether early start was on at each call of a scorer."""
_pdl = False


def set_pdl(new_enable_pdl):
    global _pdl
    assert isinstance(new_enable_pdl, bool)
    _pdl = new_enable_pdl


def get_pdl():
    return _pdl


def get_num_sms():
    return SMS


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None):
    return older.get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices)


def fp8_fp4_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, indices=None
):
    values, scales = q
    assert scales is None
    early_start.append(_pdl)
    return older.fp8_paged_mqa_logits(
        values, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len
    )


def fp8_fp4_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k, schedule_meta=None):
    values, scales = q
    assert scales is None
    if max_seqlen_k <= 0 or schedule_meta is not None:
        raise RuntimeError("Assertion error (max_seqlen_k > 0)")
    early_start.append(_pdl)
    wide = older.fp8_mqa_logits(values, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=False)
    out = torch.full((values.shape[0], max_seqlen_k + 256), float("nan"))[:, :max_seqlen_k]
    for row, (start, end) in enumerate(zip(cu_seq_len_k_start.tolist(), cu_seq_len_k_end.tolist(), strict=True)):
        out[row, : end - start] = wide[row, start:end]
    return out
