"""The CUDA C++ of the exact top-k for long rows: a cluster of thread blocks has a row.

The bound is found as for short rows (``cuda_row_source``), over the part of the row that the cluster's shared memory
holds at once; the rest streams through. Scores that reach the bound go, with their columns, to a pool in the first
thread block's shared memory, and that block alone does what is left: an adaptive histogram of (score, column), the
ranking of a handful, and a map of the row whose bits, counted, give the columns in ascending order. The pool's own
order, which depends on timing, never shows.

Where the pool overflows (ties at the bound, or an adversarial row) or comes out short (NaN among the k best, or a bound
that was guessed too high for a row that streams), the slow way computes the row.

Macros: THREADS; BLOCKS, float4 of a thread that shared memory holds; CLUSTER, thread blocks of a row, at least 2;
GROUPS of columns per thread (1, 2 or 4); CAPACITY of the pool; RESIDENT, thread blocks to fit on a multiprocessor.
"""

from __future__ import annotations

from tetrad.ops.topk_indices.cuda_common_source import COMMON, LOADING, TYPES
from tetrad.ops.topk_indices.cuda_slow_source import SLOW_SOURCE

__all__ = ["CLUSTER_SOURCE"]

_SHARED = r"""
#define BINS 1024

struct alignas(16) Shared {
    float row[CHUNK];
    u32 bins[BINS];
    u64 pool[CAPACITY];
    u64 list[LIST];
    u64 arrived[BLOCKS];
    u64 threshold;
    u32 warp_sums[32];
    u32 warp_bound[32];
    u32 warp_top[32];
    u32 cluster_bound[8];
    u32 cluster_top[8];
    u32 pool_count;
    u32 list_count;
    u32 found_bin;
    u32 found_above;
    u32 found_count;
};
"""

_KERNEL = r"""
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 peer_address(const void* pointer, u32 peer) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(peer));
    return address;
}
__device__ __forceinline__ void peer_store(u32 address, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void peer_store(u32 address, u64 value) {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}
__device__ __forceinline__ u32 peer_add(u32 address, u32 value) {
    u32 before;
    asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(address), "r"(value)
                 : "memory");
    return before;
}

// bit 4 * block + c: this thread's score c of the block is to go to the pool
__device__ __forceinline__ u32 reaching(Shared& shared, const Part& part, u32 chunk, float bound, bool everything) {
    u32 mask = 0;
#pragma unroll
    for (u32 block = 0; block < BLOCKS; ++block) {
        u32 begin = part.first(chunk, block) + part.inside;
        if (begin < part.columns) {
            if (everything) {
                mask |= (part.columns - begin >= 4 ? 15u : (1u << (part.columns - begin)) - 1) << (4 * block);
            } else {
                float4 four = *reinterpret_cast<float4*>(shared.row + block * BLOCK + part.inside);
                mask |= four.x >= bound ? 1u << (4 * block) : 0u;
                mask |= four.y >= bound ? 2u << (4 * block) : 0u;
                mask |= four.z >= bound ? 4u << (4 * block) : 0u;
                mask |= four.w >= bound ? 8u << (4 * block) : 0u;
            }
        }
    }
    return mask;
}

__device__ __forceinline__ void append(Shared& shared, const Part& part, u32 chunk, u32 mask) {
    u32 count = __popc(mask), inclusive = warp_inclusive(count);
    u32 base = 0;
    u32 pool = peer_address(shared.pool, 0);
    if ((threadIdx.x & 31) == 31 && inclusive) base = peer_add(peer_address(&shared.pool_count, 0), inclusive);
    u32 place = __shfl_sync(FULL, base, 31) + inclusive - count;
    while (mask) {
        u32 bit = __ffs(mask) - 1;
        mask &= mask - 1;
        u32 inside = part.inside + (bit & 3);
        u32 local = (bit >> 2) * BLOCK + inside;
        if (place < CAPACITY) {
            peer_store(pool + 8 * place, entry_of(shared.row[local], part.first(chunk, bit >> 2) + inside));
        }
        ++place;
    }
}

__device__ __forceinline__ u64 pooled(Shared& shared, u32 place) {
    return shared.pool[place];
}

// the k-th largest entry of the pool, all of which lie in lo..~0; hi is a guess of the largest. shared.bins is zero
__device__ __forceinline__ u64 kth_entry(Shared& shared, u32 count, u32 k, u64 lo, u64 hi) {
    const u32 each = BINS / THREADS;
    u32 need = k;
    u64 limit = ~0ull;
    while (true) {
        int spread = 64 - __clzll((long long)(hi - lo)) - 10;
        int shift = spread > 0 ? spread : 0;
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            u64 entry = pooled(shared, i);
            if (entry >= lo && entry <= limit) {
                u64 bin = (entry - lo) >> shift;
                atomicAdd(&shared.bins[bin < BINS ? (u32)bin : BINS - 1], 1u);
            }
        }
        __syncthreads();
        u32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < each; ++i) sum += shared.bins[BINS - 1 - (threadIdx.x * each + i)];
        u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        u32 inclusive = warp_inclusive(sum);
        if (lane == 31) shared.warp_sums[warp] = inclusive;
        __syncthreads();
        u32 above = __reduce_add_sync(FULL, lane < warp ? shared.warp_sums[lane] : 0) + inclusive - sum;
        if (above < need && above + sum >= need) {
#pragma unroll
            for (u32 i = 0; i < each; ++i) {
                u32 bin = BINS - 1 - (threadIdx.x * each + i), inside = shared.bins[bin];
                if (above < need && above + inside >= need) {
                    shared.found_bin = bin;
                    shared.found_above = above;
                    shared.found_count = inside;
                }
                above += inside;
            }
        }
        __syncthreads();
        u32 bin = shared.found_bin, inside = shared.found_count;
        need -= shared.found_above;
        u64 end = bin == BINS - 1 ? limit : lo + (((u64)bin + 1) << shift) - 1;
        lo += (u64)bin << shift;
        limit = hi = end;
        for (u32 i = threadIdx.x; i < BINS; i += THREADS) shared.bins[i] = 0;
        if (inside == need) {
            __syncthreads();
            return lo;
        }
        if (inside <= LIST) break;
        __syncthreads();
    }
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        u64 entry = pooled(shared, i);
        if (entry >= lo && entry <= limit) shared.list[atomicAdd(&shared.list_count, 1u)] = entry;
    }
    __syncthreads();
    u32 inside = shared.list_count;
    if (threadIdx.x < inside) {
        u64 entry = shared.list[threadIdx.x];
        u32 larger = 0;
        for (u32 i = 0; i < inside; ++i) larger += shared.list[i] > entry;
        if (larger + 1 == need) shared.threshold = entry;
    }
    __syncthreads();
    return shared.threshold;
}

// the columns of the pool's entries from `least` on, ascending. `map`, of `window` columns, is zero
__device__ __forceinline__ void write_columns(
    Shared& shared, u32* map, u32 window, u32 count, u64 least, u32 columns, int* out) {
    u32 written = 0;
    for (u32 begin = 0; begin < columns; begin += window) {
        u32 words = (min(columns - begin, window) + 31) / 32;
        for (u32 i = threadIdx.x; i < words; i += THREADS) map[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            u64 entry = pooled(shared, i);
            u32 column = ~(u32)entry - begin;
            if (entry >= least && column < window) atomicOr(&map[column >> 5], 1u << (column & 31));
        }
        __syncthreads();
        u32 each = (words + THREADS - 1) / THREADS;
        u32 from = threadIdx.x * each, to = min(from + each, words), chosen = 0, total;
        for (u32 i = from; i < to; ++i) chosen += __popc(map[i]);
        u32 place = written + block_exclusive(shared, chosen, total);
        written += total;
        for (u32 i = from; i < to && chosen; ++i) {
            for (u32 word = map[i]; word; word &= word - 1) out[place++] = begin + 32 * i + __ffs(word) - 1;
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    __cluster_dims__(CLUSTER, 1, 1)
        topk_indices(const float* __restrict__ logits, const int* __restrict__ visible_end, int* __restrict__ out,
                     int k, int width, long long logits_stride, long long out_stride) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    u32 index = blockIdx.x / CLUSTER;
    Part part;
    part.rank = cluster_rank();
    part.columns = (u32)max(0, min(visible_end[index], width));
    part.inside = spread_place();
    part.row = logits + (long long)index * logits_stride;
    part.aligned = ((u64)part.row & 15) == 0;
    out += (long long)index * out_stride;
    u32 columns = part.columns;
    if (columns <= (u32)k) {
        if (part.rank == 0) {
            for (u32 i = thread; i < (u32)k; i += THREADS) out[i] = i < columns ? (int)i : -1;
        }
        return;
    }
    if (thread == 0) {
        for (u32 block = 0; block < BLOCKS; ++block) barrier_init(shared.arrived + block);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        part.start(shared, 0);
        shared.pool_count = 0;
        shared.list_count = 0;
    }
    for (u32 i = thread; i < BINS; i += THREADS) shared.bins[i] = 0;
    __syncthreads();
    cluster_arrive();

    // sorted sets that are sure to be full: those of thread blocks with at least one whole block of columns
    u32 sharing = min((u32)CLUSTER, columns / BLOCK);
    u32 sets = sharing * WARPS * GROUPS;
    u32 place_in_set = sets ? ((u32)k + sets - 1) / sets : 33;
    // where the sets sample only a part of a long row, a bound twice as low as their share of k suffices; it is no
    // longer sure to be reached by k scores, which the pool's count tells
    u32 chunks = (columns + CLUSTER * CHUNK - 1) / (CLUSTER * CHUNK);
    if (chunks > 2) place_in_set = (2 * place_in_set + chunks - 1) / chunks;
    bool everything = columns <= CAPACITY && columns <= 2 * (u32)k;
    bool bounded = place_in_set <= 32 && !everything;
    u32 bound_key = NO_BOUND, top_key = TOP_KEY;

    float best[GROUPS];
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) best[group] = -__uint_as_float(0x7f800000u);
#pragma unroll
    for (u32 block = 0; block < BLOCKS; ++block) {
        if (part.first(0, block) + part.inside < columns) {
            float4 four = part.fetch(shared, 0, block);
            best[0] = fmaxf(best[0], four.x);
            best[1 % GROUPS] = fmaxf(best[1 % GROUPS], four.y);
            best[2 % GROUPS] = fmaxf(best[2 % GROUPS], four.z);
            best[3 % GROUPS] = fmaxf(best[3 % GROUPS], four.w);
        }
    }
    if (bounded) {
        float low = __uint_as_float(0x7f800000u), high = -low;
        if (part.rank < sharing) {
#pragma unroll
            for (u32 group = 0; group < GROUPS; ++group) {
                float sorted = warp_sorted(best[group]);
                low = fminf(low, sorted);
                high = fmaxf(high, sorted);
            }
        }
        if (lane == place_in_set - 1) shared.warp_bound[warp] = part.rank < sharing ? key_of(low) : FULL;
        if (lane == 0) shared.warp_top[warp] = part.rank < sharing ? key_of(high) : 0;
        __syncthreads();
        bound_key = __reduce_min_sync(FULL, lane < WARPS ? shared.warp_bound[lane] : FULL);
        top_key = __reduce_max_sync(FULL, lane < WARPS ? shared.warp_top[lane] : 0);
    }
    cluster_wait();
    if (bounded) {
        if (thread < CLUSTER) {
            peer_store(peer_address(&shared.cluster_bound[part.rank], thread), bound_key);
            peer_store(peer_address(&shared.cluster_top[part.rank], thread), top_key);
        }
        cluster_arrive();
        cluster_wait();
        bound_key = FULL;
        top_key = 0;
#pragma unroll
        for (u32 peer = 0; peer < CLUSTER; ++peer) {
            bound_key = min(bound_key, shared.cluster_bound[peer]);
            top_key = max(top_key, shared.cluster_top[peer]);
        }
    }
    float bound = score_of(bound_key);
    append(shared, part, 0, reaching(shared, part, 0, bound, everything));
    for (u32 chunk = 1; part.first(chunk, 0) < columns; ++chunk) {
        __syncthreads();
        if (thread == 0) part.start(shared, chunk);
#pragma unroll
        for (u32 block = 0; block < BLOCKS; ++block) {
            if (part.first(chunk, block) + part.inside < columns) part.fetch(shared, chunk, block);
        }
        append(shared, part, chunk, reaching(shared, part, chunk, bound, everything));
    }
    cluster_arrive();
    if (part.rank) return;
    cluster_wait();
    u32 count = shared.pool_count;
    if (count > CAPACITY || count < (u32)k) {
        slow_row(shared, part.row, columns, (u32)k, bounded, bound_key, out);
        return;
    }
    u64 lo = everything ? 0 : (u64)bound_key << 32;
    u64 least = kth_entry(shared, count, (u32)k, lo, ((u64)top_key << 32) | FULL);
    write_columns(shared, reinterpret_cast<u32*>(shared.row), 32 * CHUNK, count, least, columns, out);
}
"""

CLUSTER_SOURCE = TYPES + _SHARED + COMMON + SLOW_SOURCE + LOADING + _KERNEL
"""The whole source."""
