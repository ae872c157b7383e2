"""The CUDA C++ of the exact top-k for rows that fit in the shared memory of one thread block.

The block reads its row once and finds a *bound*, a score that at least k scores reach: threads keep the largest score
of each of many disjoint groups of columns, every warp sorts the 32 of its lanes, and the smallest of the warps' r-th
largest, with r times the number of sorted sets at least k, is reached by at least k groups. About 2 k scores reach it,
whatever their distribution; each thread has its own as the bits of a mask, and finds them by the largest score of each
of its float4. An adaptive histogram of (score, column) over them leaves a handful around the k-th, which are ranked
against each other. The chosen columns are bits in a map of the row, and counting bits gives them in ascending order.

Rows with very many scores at the bound (ties) or with NaN among the k best take the slow way.

Macros: THREADS, BLOCKS (float4 of a thread), GROUPS of columns per thread (1, 2 or 4), and RESIDENT, thread blocks to
fit on a multiprocessor.
"""

from __future__ import annotations

from tetrad.ops.topk_indices.cuda_common_source import COMMON, LOADING, TYPES
from tetrad.ops.topk_indices.cuda_slow_source import SLOW_SOURCE

__all__ = ["ROW_SOURCE"]

_SHARED = r"""
#define CLUSTER 1
#define BINS 256
#define MOST 8192   // scores that reach the bound, beyond which they are likely to be ties

struct alignas(16) Shared {
    float row[CHUNK];
    u32 map[CHUNK / 32];
    u32 bins[BINS];
    u64 list[LIST];
    u64 arrived[BLOCKS];
    u32 warp_sums[32];
    u32 warp_bound[32];
    u32 warp_top[32];
    u32 list_count;
    u32 found_bin;
    u32 found_above;
};
"""

_KERNEL = r"""
// this thread's score of a mask's bit (bit 4 * block + c), as an entry
__device__ __forceinline__ u64 entry_at(const Shared& shared, u32 inside, u32 bit) {
    u32 column = (bit >> 2) * BLOCK + inside + (bit & 3);
    return entry_of(shared.row[column], column);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    topk_indices(const float* __restrict__ logits, const int* __restrict__ visible_end, int* __restrict__ out, int k,
                 int width, long long logits_stride, long long out_stride) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    u32 index = blockIdx.x;
    Part part;
    part.rank = 0;
    part.columns = (u32)max(0, min(visible_end[index], width));
    part.inside = spread_place();
    part.row = logits + (long long)index * logits_stride;
    part.aligned = ((u64)part.row & 15) == 0;
    out += (long long)index * out_stride;
    const u32 columns = part.columns, inside = part.inside;
    if (columns <= (u32)k) {
        for (u32 i = thread; i < (u32)k; i += THREADS) out[i] = i < columns ? (int)i : -1;
        return;
    }
    if (thread == 0) {
        for (u32 block = 0; block < BLOCKS; ++block) barrier_init(shared.arrived + block);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        part.start(shared, 0);
        shared.list_count = 0;
    }
    for (u32 i = thread; i < BINS; i += THREADS) shared.bins[i] = 0;
    for (u32 i = thread; i < CHUNK / 32; i += THREADS) shared.map[i] = 0;
    __syncthreads();

    u32 sets = columns >= BLOCK ? WARPS * GROUPS : 0;
    u32 place_in_set = sets ? ((u32)k + sets - 1) / sets : 33;
    bool everything = columns <= 2 * (u32)k;
    bool bounded = place_in_set <= 32 && !everything;
    const float infinity = __uint_as_float(0x7f800000u);

    float best[GROUPS], tops[BLOCKS];
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) best[group] = -infinity;
#pragma unroll
    for (u32 block = 0; block < BLOCKS; ++block) {
        tops[block] = -infinity;
        if (block * BLOCK + inside < columns) {
            float4 four = part.fetch(shared, 0, block);
            best[0] = fmaxf(best[0], four.x);
            best[1 % GROUPS] = fmaxf(best[1 % GROUPS], four.y);
            best[2 % GROUPS] = fmaxf(best[2 % GROUPS], four.z);
            best[3 % GROUPS] = fmaxf(best[3 % GROUPS], four.w);
            tops[block] = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
        }
    }
    u32 bound_key = NO_BOUND, top_key = TOP_KEY;
    if (bounded) {
        float low = infinity, high = -infinity;
#pragma unroll
        for (u32 group = 0; group < GROUPS; ++group) {
            float sorted = warp_sorted(best[group]);
            low = fminf(low, sorted);
            high = fmaxf(high, sorted);
        }
        if (lane == place_in_set - 1) shared.warp_bound[warp] = key_of(low);
        if (lane == 0) shared.warp_top[warp] = key_of(high);
        __syncthreads();
        bound_key = __reduce_min_sync(FULL, lane < WARPS ? shared.warp_bound[lane] : FULL);
        top_key = __reduce_max_sync(FULL, lane < WARPS ? shared.warp_top[lane] : 0);
    }
    // a bound of -inf may be missed by NaN, which can then be among the k best
    if (bound_key == NO_BOUND && !everything) {
        slow_row(shared, part.row, columns, (u32)k, false, bound_key, out);
        return;
    }

    // which of this thread's scores reach the bound
    const float bound = score_of(bound_key);
    u32 hits = 0, mask = 0;
#pragma unroll
    for (u32 block = 0; block < BLOCKS; ++block) {
        u32 begin = block * BLOCK + inside;
        if (everything) {
            if (begin < columns) mask |= (columns - begin >= 4 ? 15u : (1u << (columns - begin)) - 1) << (4 * block);
        } else if (tops[block] >= bound) {
            hits |= 1u << block;
        }
    }
    for (; hits; hits &= hits - 1) {
        u32 block = __ffs(hits) - 1;
        float4 four = *reinterpret_cast<const float4*>(shared.row + block * BLOCK + inside);
        u32 some = (four.x >= bound) | (four.y >= bound) << 1 | (four.z >= bound) << 2 | (four.w >= bound) << 3;
        mask |= some << (4 * block);
    }

    // the k-th largest entry: narrowed to lo..limit, where `need` of the entries are chosen
    u64 lo = everything ? 0 : (u64)bound_key << 32, limit = ~0ull;
    u64 hi = ((u64)top_key << 32) | FULL;
    u32 need = k, held = 0;
    for (u32 level = 0;; ++level) {
        int spread = 64 - __clzll((long long)(hi - lo)) - 8;
        int shift = spread > 0 ? spread : 0;
        for (u32 rest = mask; rest; rest &= rest - 1) {
            u64 entry = entry_at(shared, inside, __ffs(rest) - 1);
            if (entry >= lo && entry <= limit) {
                u64 bin = (entry - lo) >> shift;
                atomicAdd(&shared.bins[bin < BINS ? (u32)bin : BINS - 1], 1u);
            }
        }
        __syncthreads();
        // every warp finds the bin for itself: a lane has eight, the largest first
        const uint4* mine = reinterpret_cast<const uint4*>(shared.bins + BINS - 8 - 8 * lane);
        uint4 second = mine[0], first = mine[1];
        u32 count[8] = {first.w, first.z, first.y, first.x, second.w, second.z, second.y, second.x};
        u32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) sum += count[i];
        u32 inclusive = warp_inclusive(sum), above = inclusive - sum;
        u32 total = __shfl_sync(FULL, inclusive, 31);
        if (level == 0 && total > MOST) {
            // ties, most often, at which every thread would count into one bin
            slow_row(shared, part.row, columns, (u32)k, bounded, bound_key, out);
            return;
        }
        u32 packed = 0;
        bool here = above < need && inclusive >= need;
        if (here) {
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                if (above < need && above + count[i] >= need) packed = (BINS - 1 - 8 * lane - i) << 16 | above;
                above += count[i];
            }
        }
        int owner = __ffs(__ballot_sync(FULL, here)) - 1;
        packed = __shfl_sync(FULL, packed, owner);
        u32 bin = packed >> 16;
        held = shared.bins[bin];
        need -= packed & 0xffff;
        u64 end = bin == BINS - 1 ? limit : lo + (((u64)bin + 1) << shift) - 1;
        lo += (u64)bin << shift;
        limit = hi = end;
        if (held == need || held <= LIST) break;
        __syncthreads();
        for (u32 i = thread; i < BINS; i += THREADS) shared.bins[i] = 0;
        __syncthreads();
    }

    // entries above are chosen; those inside are ranked against each other
    for (u32 rest = mask; rest; rest &= rest - 1) {
        u64 entry = entry_at(shared, inside, __ffs(rest) - 1);
        u32 column = ~(u32)entry;
        if (entry > limit || (entry >= lo && held == need)) {
            atomicOr(&shared.map[column >> 5], 1u << (column & 31));
        } else if (entry >= lo) {
            shared.list[atomicAdd(&shared.list_count, 1u)] = entry;
        }
    }
    __syncthreads();
    if (held != need) {
        if (thread < held) {
            u64 entry = shared.list[thread];
            u32 larger = 0, column = ~(u32)entry;
            for (u32 i = 0; i < held; ++i) larger += shared.list[i] > entry;
            if (larger < need) atomicOr(&shared.map[column >> 5], 1u << (column & 31));
        }
        __syncthreads();
    }

    // ascending columns: a thread has one word of the map
    u32 word = thread < CHUNK / 32 ? shared.map[thread] : 0, chosen = __popc(word);
    u32 inclusive = warp_inclusive(chosen);
    if (lane == 31) shared.warp_sums[warp] = inclusive;
    __syncthreads();
    u32 place = __reduce_add_sync(FULL, lane < warp ? shared.warp_sums[lane] : 0) + inclusive - chosen;
    for (; word; word &= word - 1) out[place++] = 32 * thread + __ffs(word) - 1;
}
"""

ROW_SOURCE = TYPES + _SHARED + COMMON + SLOW_SOURCE + LOADING + _KERNEL
"""The whole source."""
