"""The older DeepGEMM's public calls in torch, with the checks that its own make, in the roles of its arguments."""

from __future__ import annotations

import torch

SMS = 132
calls: list[str] = []


def get_num_sms() -> int:
    return SMS


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None):
    assert context_lens.dim() == 2
    assert context_lens.dtype == torch.int32
    assert context_lens.is_contiguous()
    assert block_kv == 64
    calls.append("plan")
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32)


def fp8_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False, indices=None
):
    batch, next_n, heads, dim = q.shape
    assert q.dtype == torch.float8_e4m3fn
    assert q.is_contiguous()
    assert kv_cache.dtype == torch.uint8
    assert kv_cache.shape[1:] == (64, 1, dim + 4)
    assert kv_cache.stride()[1::2] == (dim + 4, 1)
    assert weights.shape == (batch * next_n, heads)
    assert context_lens.shape == (batch, next_n)
    assert block_table.shape[0] == batch
    assert not clean_logits
    if schedule_meta.shape != (SMS // (2 if next_n == 4 else 1) + 1, 2):
        raise RuntimeError("Assertion error (schedule_meta_size)")
    calls.append("score")
    out = torch.full((batch * next_n, max_context_len + 256), float("nan"))[:, :max_context_len]
    pages = kv_cache.reshape(kv_cache.shape[0], -1)
    for request in range(batch):
        page = pages[block_table[request].long()]
        keys = page[:, : 64 * dim].reshape(-1, dim).view(torch.float8_e4m3fn).float()
        scales = page[:, 64 * dim :].reshape(-1, 4).view(torch.float32)
        for row in range(next_n):
            place, end = request * next_n + row, int(context_lens[request, row])
            dots = torch.relu(q[request, row].float() @ (keys * scales)[:end].T)
            out[place, :end] = weights[place] @ dots
    return out


def fp8_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0):
    keys, scales = kv
    assert keys.dtype == torch.float8_e4m3fn
    assert keys.is_contiguous()
    assert scales.dtype == torch.float32
    assert scales.shape == keys.shape[:1]
    assert not clean_logits
    calls.append("prefill")
    out = torch.full((q.shape[0], keys.shape[0]), float("nan"))
    for row, (start, end) in enumerate(zip(cu_seq_len_k_start.tolist(), cu_seq_len_k_end.tolist(), strict=True)):
        dots = torch.relu(q[row].float() @ (keys.float() * scales.unsqueeze(1))[start:end].T)
        out[row, start:end] = weights[row] @ dots
    return out
