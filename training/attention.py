"""The attention of a layer: its window, its compressed entries, and the indexer that picks among them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from parts import Linear, Norm, Pass, rms_norm, rotate
from quantise import fp8_groups, hadamard_matrix, index_format, straight_through
from shape import Shape
from torch import nn

FP8_KV_GROUP = 64


def sink_softmax(
    near: torch.Tensor,
    far: torch.Tensor | None,
    sink: torch.Tensor,
    hidden: torch.Tensor,
    unseen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of window scores near [N, H, C] and far scores [N, H, K] (or None) in a softmax with the sink [H].

    hidden bool [P, C] and unseen bool [Q, K] mark scores that do not count, repeating every P and Q tokens.
    """
    if near.is_cuda and (far is None or far.shape[-1] <= 1024):
        from attention_kernels import SinkSoftmax  # Triton exists only where there is a GPU

        far = near[..., :0] if far is None else far
        unseen = hidden[:, :0] if unseen is None else unseen
        return SinkSoftmax.apply(near, far, sink, hidden.to(torch.uint8), unseen.to(torch.uint8))
    count, heads, width = near.shape
    pieces = [near.unflatten(0, (-1, len(hidden))).masked_fill(hidden[:, None], float("-inf")).flatten(0, 1)]
    pieces.append(sink.to(near.dtype).expand(count, heads).unsqueeze(-1))
    if far is not None and unseen is not None:
        pieces.append(far.unflatten(0, (-1, len(unseen))).masked_fill(unseen[:, None], float("-inf")).flatten(0, 1))
    share = torch.cat(pieces, -1).softmax(-1, dtype=torch.float32).to(near.dtype)
    return share[..., :width], share[..., width + 1 :]


class Compressor(nn.Module):
    """Pools every `ratio` tokens into one entry; ratio 4 overlaps with the block before (section "compressor")."""

    def __init__(self, shape: Shape, ratio: int, width: int) -> None:
        super().__init__()
        self.ratio, self.width, self.overlap = ratio, width, ratio == 4
        self.eps = shape.rms_norm_eps
        size = width * (2 if self.overlap else 1)
        self.wkv = Linear(size, shape.hidden_size, stored="bf16")
        self.wgate = Linear(size, shape.hidden_size, stored="bf16")
        self.ape = nn.Parameter(torch.zeros(ratio, size))
        self.norm = Norm(width)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, before: torch.Tensor | None, run: Pass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries [B, T, width] in x's dtype, and the last block's first halves [2, B, ratio, width] (values, gates)
        for a continuation, which gets them back as `before`. cos and sin are those of each block's first token."""
        count = x.shape[1] // self.ratio
        blocks = x[:, : count * self.ratio].float()
        u = self.wkv(blocks, run).unflatten(1, (count, self.ratio))
        g = self.wgate(blocks, run).unflatten(1, (count, self.ratio)) + self.ape
        last = torch.stack([u[:, -1:, :, : self.width], g[:, -1:, :, : self.width]]).squeeze(2) if count else u
        if self.overlap:
            if before is None:
                first_u, first_g = (
                    torch.zeros_like(u[:, :1, :, : self.width]),
                    torch.full_like(g[:, :1, :, : self.width], float("-inf")),
                )
            else:
                first_u, first_g = (part.expand(x.shape[0], -1, -1).unsqueeze(1) for part in before)
            u = torch.cat([torch.cat([first_u, u[:, :-1, :, : self.width]], 1), u[..., self.width :]], 2)
            g = torch.cat([torch.cat([first_g, g[:, :-1, :, : self.width]], 1), g[..., self.width :]], 2)
        pooled = (g.softmax(2) * u).sum(2).to(x.dtype)
        return rotate(rms_norm(pooled, self.norm.weight, self.eps), cos, sin), last


class Indexer(nn.Module):
    """Scores compressed entries for every token; reads detached inputs, so only its own loss trains it."""

    hadamard: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.width = shape.index_n_heads, shape.index_head_dim
        self.wq_b = Linear(self.heads * self.width, shape.q_lora_rank)
        self.weights_proj = Linear(self.heads, shape.hidden_size, stored="bf16")
        self.compressor = Compressor(shape, 4, self.width)
        self.register_buffer("hadamard", hadamard_matrix(self.width), persistent=False)

    def queries(
        self, qr: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, run: Pass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [..., heads, width] in their format, and head weights [..., heads] in fp32."""
        q = self.wq_b(qr, run).unflatten(-1, (self.heads, self.width))
        q = index_format(rotate(q, cos[..., None, :], sin[..., None, :]), self.hadamard, run.index_format)
        return q, self.weights_proj(x, run).float() * (self.width * self.heads) ** -0.5

    def scores(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """sum_h weights * relu(q . k), fp32 [rows, entries]; q [rows, heads, width], k [entries, width]."""
        products = F.relu(F.linear(q.flatten(0, 1), k)).unflatten(0, (-1, self.heads))
        return torch.bmm(weights.to(products.dtype).unsqueeze(1), products).squeeze(1).float()

    @torch.no_grad()
    def select(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor, topk: int):
        """int64 [B, R, min(topk, entries)], -1 where fewer are visible; q [B, R, H, D], k [B, T, D], visible [B, R]."""
        picks, rows = [], max(64, 2**28 // max(1, k.shape[1] * q.shape[0]))
        for begin in range(0, q.shape[1], rows):
            part = slice(begin, begin + rows)
            if q.is_cuda:
                from attention_kernels import index_scores  # Triton exists only where there is a GPU

                end = visible[:, part].to(torch.int32)
                scores = index_scores(q[:, part].bfloat16(), k.bfloat16(), weights[:, part], end)
            else:
                products = F.relu(torch.einsum("brhd,btd->brht", q[:, part].float(), k.float()))
                scores = torch.einsum("brh,brht->brt", weights[:, part], products)
                hidden = torch.arange(k.shape[1], device=q.device) >= visible[:, part, None]
                scores = scores.masked_fill(hidden, float("-inf"))
            best = scores.topk(min(topk, k.shape[1]), sorted=False)
            picks.append(best.indices.masked_fill(best.values == float("-inf"), -1))
        return torch.cat(picks, 1)


class Attention(nn.Module):
    def __init__(self, shape: Shape, ratio: int) -> None:
        super().__init__()
        self.shape, self.ratio = shape, ratio
        heads, width = shape.num_attention_heads, shape.head_dim
        self.wq_a = Linear(shape.q_lora_rank, shape.hidden_size)
        self.q_norm = Norm(shape.q_lora_rank)
        self.wq_b = Linear(heads * width, shape.q_lora_rank)
        self.wkv = Linear(width, shape.hidden_size)
        self.kv_norm = Norm(width)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = Linear(shape.o_groups * shape.o_lora_rank, heads * width // shape.o_groups)
        self.wo_b = Linear(shape.hidden_size, shape.o_groups * shape.o_lora_rank)
        if ratio:
            self.compressor = Compressor(shape, ratio, width)
        if ratio == 4:
            self.indexer = Indexer(shape)

    def _cached(self, kv: torch.Tensor, run: Pass) -> torch.Tensor:
        if not run.cache_quantised:
            return kv
        plain, turned = kv.split([kv.shape[-1] - self.shape.qk_rope_head_dim, self.shape.qk_rope_head_dim], -1)
        return torch.cat([straight_through(plain, lambda v: fp8_groups(v, FP8_KV_GROUP)), turned], -1)

    def forward(self, x: torch.Tensor, run: Pass, layer: int) -> torch.Tensor:
        shape, ratio = self.shape, self.ratio
        batch, length, _ = x.shape
        heads, width, window = shape.num_attention_heads, shape.head_dim, shape.sliding_window
        cos, sin = run.tables[ratio > 0]
        qr = rms_norm(self.wq_a(x, run), self.q_norm.weight, shape.rms_norm_eps)
        q = rms_norm(self.wq_b(qr, run).unflatten(-1, (heads, width)), None, shape.rms_norm_eps)
        q = rotate(q, cos[:, :, None], sin[:, :, None]) * width**-0.5
        kv = rms_norm(self.wkv(x, run), self.kv_norm.weight, shape.rms_norm_eps)
        kv = self._cached(rotate(kv, cos, sin), run)
        before = run.prefix[layer] if run.prefix is not None else None
        kept: dict[str, torch.Tensor] = {}
        if run.keep is not None:
            kept["window"] = kv[:, -window:]
            run.keep.append(kept)

        # Keys of the window: per block of queries, its own block and the one before; or the prefix's tail and all.
        size = length if before is not None else window
        blocks = kv.unflatten(1, (-1, size))
        if before is not None:
            previous = before["window"].expand(batch, -1, -1).unsqueeze(1)
        else:
            previous = F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1]
        keys = torch.cat([previous, blocks], 2).flatten(0, 1)
        near = (q.reshape(-1, size * heads, width) @ keys.mT).view(batch, -1, size, heads, keys.shape[1])
        place, key = torch.arange(size, device=x.device), torch.arange(keys.shape[1], device=x.device)
        hidden = (key <= place[:, None]) | (key > place[:, None] + window)
        hidden = hidden.expand(near.shape[1], -1, -1)
        if before is None:
            first = torch.arange(near.shape[1], device=x.device)[:, None, None] == 0
            hidden = hidden | (first & (key < window))
        hidden, near = hidden.flatten(0, 1), near.view(batch, length, heads, -1)

        entries = picks = chosen = far = unseen = None
        if ratio:
            visible = (run.prefix_length + torch.arange(length, device=x.device) + 1) // ratio
            at = (cos[:, ::ratio][:, : length // ratio], sin[:, ::ratio][:, : length // ratio])
            entries, last = self.compressor(x, *at, before.get("main") if before else None, run)
            entries = self._cached(entries, run)
            if before is not None:
                entries = torch.cat([before["entries"].expand(batch, -1, -1), entries], 1)
            if run.keep is not None:
                kept["entries"], kept["main"] = entries, last
            if ratio == 4:
                picks = self._index(x.detach(), qr.detach(), q, near, hidden, entries, at, visible, run, before, kept)
        if entries is not None and picks is not None:
            table = entries.reshape(-1, width)
            offset = torch.arange(batch, device=x.device)[:, None, None] * entries.shape[1]
            chosen = F.embedding(picks.clamp_min(0) + offset, table).flatten(0, 1)
            far, unseen = q.flatten(0, 1) @ chosen.mT, (picks < 0).flatten(0, 1)
        elif entries is not None:
            far = (q.flatten(1, 2) @ entries.mT).view(batch * length, heads, -1)
            unseen = torch.arange(entries.shape[1], device=x.device) >= visible[:, None]
        near, far = sink_softmax(near.flatten(0, 1), far, self.attn_sink, hidden, unseen)
        out = (near.reshape(-1, size * heads, near.shape[-1]) @ keys).view(batch, length, heads, width)
        if chosen is not None:
            out = out + (far @ chosen).view_as(out)
        elif entries is not None:
            out = out + (far.view(batch, length * heads, -1) @ entries).view_as(out)
        out = rotate(out, cos[:, :, None], -sin[:, :, None])
        groups = out.reshape(batch * length, shape.o_groups, -1)
        matrices = self.wo_a.value(run, x.dtype).unflatten(0, (shape.o_groups, -1))
        return self.wo_b(torch.einsum("ngi,goi->ngo", groups, matrices).reshape(batch, length, -1), run)

    def _index(self, x, qr, q, near, hidden, entries, at, visible, run: Pass, before, kept) -> torch.Tensor | None:
        """The entries that each token attends to (None: all), and the indexer's loss at `run.rows`."""
        indexer, batch = self.indexer, x.shape[0]
        cos, sin = run.tables[True]
        keys, last = indexer.compressor(x, *at, before.get("index") if before else None, run)
        keys = index_format(keys, indexer.hadamard, run.index_format)
        if before is not None:
            keys = torch.cat([before["keys"].expand(batch, -1, -1), keys], 1)
        if run.keep is not None:
            kept["keys"], kept["index"] = keys, last
        if run.rows is not None:
            run.index_losses.append(self._imitate(x, qr, q, near, hidden, entries, keys, visible, run))
        if not run.selection:
            return None
        with torch.no_grad():
            picks, rows = [], max(64, 2**17 // batch)
            for begin in range(0, x.shape[1], rows):
                part = slice(begin, begin + rows)
                index_q, weights = indexer.queries(qr[:, part], x[:, part], cos[:, part], sin[:, part], run)
                ends = visible[part].expand(batch, -1)
                picks.append(indexer.select(index_q, keys.detach(), weights, ends, run.topk))
            return torch.cat(picks, 1)

    def _imitate(self, x, qr, q, near, hidden, entries, keys, visible, run: Pass) -> torch.Tensor:
        """KL from the attention over compressed entries (mean of the heads, at `run.rows`) to the softmax of the index
        scores over the entries of every sequence of the batch: other documents' entries are distractors."""
        rows = run.rows
        if rows is None:
            raise ValueError("the indexer's loss needs rows")
        batch, count = rows.shape
        total = entries.shape[1]
        take = torch.arange(batch, device=x.device)[:, None]
        unseen = torch.arange(total, device=x.device) >= visible[rows][..., None]
        with torch.no_grad():
            far = (q[take, rows].flatten(1, 2) @ entries.mT).unflatten(1, (count, -1)).float()
            far = far.masked_fill(unseen[:, :, None], float("-inf"))
            sink = self.attn_sink.expand(batch, count, -1).unsqueeze(-1)
            beside = near[take, rows].float().masked_fill(hidden[rows][:, :, None], float("-inf"))
            joint = torch.cat([far, beside, sink], -1).softmax(-1)
            target = joint[..., :total].mean(2)
            mass = target.sum(-1)
            target = target / mass.clamp_min(1e-6).unsqueeze(-1)
        cos, sin = run.tables[True]
        index_q, weights = self.indexer.queries(qr[take, rows], x[take, rows], cos[take, rows], sin[take, rows], run)
        scores = self.indexer.scores(index_q.flatten(0, 1), keys.flatten(0, 1), weights.flatten(0, 1))
        scores = scores.view(batch, count, batch, total)
        own = torch.eye(batch, dtype=torch.bool, device=x.device)[:, None, :, None]
        scores = scores.masked_fill(own & unseen[:, :, None], float("-inf"))
        norm = scores.flatten(2).logsumexp(-1)
        mine = scores[torch.arange(batch, device=x.device), :, torch.arange(batch, device=x.device)]
        cross = (target * (norm.unsqueeze(-1) - mine).masked_fill(unseen, 0.0)).sum(-1)
        entropy = -(target * target.clamp_min(1e-9).log()).sum(-1)
        return (mass * (cross - entropy)).sum() / (mass.sum() + 1e-3 * mass.numel())
