"""The CUDA C++ of the exact top-k: the slow way, right for every row, one thread block and global memory."""

from __future__ import annotations

__all__ = ["SLOW_SOURCE"]

SLOW_SOURCE = r"""
// counts a byte of one thread; a warp whose bytes agree, as in a row of ties, counts at once
__device__ __forceinline__ void count_byte(Shared& shared, bool taken, u32 byte) {
    u32 active = __ballot_sync(FULL, taken);
    if (!active) return;
    int leader = __ffs(active) - 1;
    u32 common = __shfl_sync(FULL, byte, leader);
    if (__all_sync(FULL, !taken || byte == common)) {
        if ((threadIdx.x & 31) == leader) atomicAdd(&shared.bins[common], __popc(active));
    } else if (taken) {
        atomicAdd(&shared.bins[byte], 1u);
    }
}

// the k-th largest key of the row, and in `ties` how many of the scores equal to it are chosen
__device__ __noinline__ u32 slow_key(Shared& shared, const float* row, u32 columns, u32 k, u32& ties) {
    u32 prefix = 0, need = k;
    u32 rounded = (columns + THREADS - 1) / THREADS * THREADS;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (u32 i = threadIdx.x; i < 256; i += THREADS) shared.bins[i] = 0;
        __syncthreads();
#pragma unroll 4
        for (u32 column = threadIdx.x; column < rounded; column += THREADS) {
            u32 key = column < columns ? key_of(__ldg(row + column)) : 0;
            bool same = shift == 24 || (key >> (shift + 8)) == (prefix >> (shift + 8));
            count_byte(shared, same && column < columns, (key >> shift) & 255);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            u32 sum = 0;
            for (u32 i = 0; i < 8; ++i) sum += shared.bins[255 - (8 * threadIdx.x + i)];
            u32 above = warp_inclusive(sum) - sum;
            for (u32 i = 0; i < 8; ++i) {
                u32 byte = 255 - (8 * threadIdx.x + i), inside = shared.bins[byte];
                if (above < need && above + inside >= need) {
                    shared.found_bin = byte;
                    shared.found_above = above;
                }
                above += inside;
            }
        }
        __syncthreads();
        prefix |= shared.found_bin << shift;
        need -= shared.found_above;
    }
    ties = need;
    return prefix;
}

__device__ __noinline__ void slow_row(
    Shared& shared, const float* row, u32 columns, u32 k, bool bounded, u32 bound_key, int* out) {
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 least = bound_key, ties = 0, total;
    bool known = false;
    __syncthreads();
    if (bounded) {
        // most often the bound itself is the k-th score, shared by too many columns for the pool
        u32 larger = 0, equal = 0;
#pragma unroll 4
        for (u32 column = threadIdx.x; column < columns; column += THREADS) {
            u32 key = key_of(__ldg(row + column));
            larger += key > bound_key;
            equal += key == bound_key;
        }
        u32 all_larger, all_equal;
        block_exclusive(shared, larger, all_larger);
        block_exclusive(shared, equal, all_equal);
        known = all_larger < k && all_larger + all_equal >= k;
        ties = k - all_larger;
    }
    if (!known) least = slow_key(shared, row, columns, k, ties);

    // ascending columns: a lane ends up with the flags of 32 adjacent ones
    u32 larger_before = 0, equal_before = 0;
    for (u32 begin = 0; begin < columns; begin += 32 * THREADS) {
        u32 larger = 0, equal = 0;
        u32 first = begin + 1024 * warp;
#pragma unroll 4
        for (u32 word = 0; word < 32; ++word) {
            u32 column = first + 32 * word + lane;
            u32 key = column < columns ? key_of(__ldg(row + column)) : 0;
            u32 larger_word = __ballot_sync(FULL, column < columns && key > least);
            u32 equal_word = __ballot_sync(FULL, column < columns && key == least);
            if (lane == word) {
                larger = larger_word;
                equal = equal_word;
            }
        }
        // both counts of a tile stay under 2^16
        u32 before = block_exclusive(shared, (__popc(larger) << 16) | __popc(equal), total);
        u32 place_larger = larger_before + (before >> 16), place_equal = equal_before + (before & 0xffff);
        larger_before += total >> 16;
        equal_before += total & 0xffff;
        first += 32 * lane;
        for (u32 word = larger | equal; word; word &= word - 1) {
            u32 bit = __ffs(word) - 1;
            bool is_larger = larger >> bit & 1;
            u32 place = place_larger + min(place_equal, ties);
            if (is_larger || place_equal < ties) out[place] = first + bit;
            place_larger += is_larger;
            place_equal += !is_larger;
        }
    }
}
"""
