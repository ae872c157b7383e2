"""The CUDA C++ of the exact top-k: what its kernels share. The order of scores, prefix sums, how a row comes into
shared memory, and the sorting of a warp's scores.

A kernel's source is TYPES, its ``struct Shared``, COMMON, the slow way, LOADING, and the kernel.
"""

from __future__ import annotations

__all__ = ["COMMON", "LOADING", "TYPES"]

TYPES = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

#define FULL 0xffffffffu
#define WARPS (THREADS / 32)
#define BLOCK (4 * THREADS)
#define CHUNK (BLOCKS * BLOCK)
#define LIST 32
#define NO_BOUND 0x007fffffu   // the key of -inf
#define TOP_KEY 0xff800000u    // the key of +inf
"""
"""Types and constants."""

COMMON = r"""
// unsigned integers in the order of the scores: NaN, -inf, ..., 0, ..., inf
__device__ __forceinline__ u32 key_of(float score) {
    u32 bits = __float_as_uint(score + 0.0f);
    u32 key = bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
    return score != score ? 0u : key;
}

__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// larger for a larger score, then for a lower column: no two entries of a row are equal
__device__ __forceinline__ u64 entry_of(float score, u32 column) {
    return ((u64)key_of(score) << 32) | (u32)~column;
}

__device__ __forceinline__ u32 warp_inclusive(u32 value) {
    u32 lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(FULL, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// exclusive prefix sum over the threads of the block; the total goes to `total`. Two barriers
__device__ __forceinline__ u32 block_exclusive(Shared& shared, u32 value, u32& total) {
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 inclusive = warp_inclusive(value);
    if (lane == 31) shared.warp_sums[warp] = inclusive;
    __syncthreads();
    u32 sum = lane < WARPS ? shared.warp_sums[lane] : 0;
    u32 before = __reduce_add_sync(FULL, lane < warp ? sum : 0);
    total = __reduce_add_sync(FULL, sum);
    __syncthreads();
    return before + inclusive - value;
}
"""
"""Keys and prefix sums."""

LOADING = r"""
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void barrier_init(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void copy_to_shared(float* to, const float* from, u32 bytes, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// a place for each thread of a block of columns. Neighbouring scores are alike, and a warp's lanes should see a fair
// sample of the row, so they are spread evenly over the block; eight lanes still touch all banks of shared memory
__device__ __forceinline__ u32 spread_place() {
    const u32 lines = THREADS / 8, step = WARPS / 8 ? WARPS / 8 : 1;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 line = (warp + WARPS * (lane >> 3) + step * (lane & 7)) % lines;
    return 4 * (8 * line + (lane & 7));
}

// the row's part of one thread block: block j of chunk c is columns (c * BLOCKS + j) * CLUSTER + rank, times BLOCK
struct Part {
    const float* row;
    u32 rank, columns;
    u32 inside;   // where in each block this thread's four columns are
    bool aligned;

    __device__ __forceinline__ u32 first(u32 chunk, u32 block) const {
        return ((chunk * BLOCKS + block) * CLUSTER + rank) * BLOCK;
    }
    __device__ __forceinline__ void start(Shared& shared, u32 chunk) const {
        if (!aligned) return;
        for (u32 block = 0; block < BLOCKS; ++block) {
            u32 begin = first(chunk, block);
            if (begin + 4 > columns) break;
            u32 whole = min(columns - begin, (u32)BLOCK) & ~3u;
            copy_to_shared(shared.row + block * BLOCK, row + begin, 4 * whole, shared.arrived + block);
        }
    }
    // this thread's four scores of a block, NaN behind the end; they are in shared memory afterwards
    __device__ __forceinline__ float4 fetch(Shared& shared, u32 chunk, u32 block) const {
        float4* place = reinterpret_cast<float4*>(shared.row + block * BLOCK + inside);
        u32 column = first(chunk, block) + inside;
        if (aligned && column + 4 <= columns) {
            barrier_wait(shared.arrived + block, chunk & 1);
            return *place;
        }
        float nan = __uint_as_float(0x7fffffffu);
        float4 four;
        four.x = column < columns ? __ldg(row + column) : nan;
        four.y = column + 1 < columns ? __ldg(row + column + 1) : nan;
        four.z = column + 2 < columns ? __ldg(row + column + 2) : nan;
        four.w = column + 3 < columns ? __ldg(row + column + 3) : nan;
        *place = four;
        return four;
    }
};

// the lanes' scores, largest in lane 0
__device__ __forceinline__ float warp_sorted(float score) {
    u32 lane = threadIdx.x & 31;
#pragma unroll
    for (u32 size = 2; size <= 32; size *= 2) {
#pragma unroll
        for (u32 step = size / 2; step > 0; step /= 2) {
            float other = __shfl_xor_sync(FULL, score, step);
            bool larger = ((lane & step) == 0) == ((lane & size) == 0 || size == 32);
            score = larger ? fmaxf(score, other) : fminf(score, other);
        }
    }
    return score;
}
"""
"""Bulk copies into shared memory, a thread's part of a row, and the sort."""
