// Shared memory, the order of scores, and what the threads of a team find out together.

#define FULL 0xffffffffu
#define RARELY(condition) __builtin_expect(!!(condition), 0)   // keeps long code for rare cases off the usual way
#define WARPS (THREADS / 32)
#define BLOCK (4 * THREADS)
#define CHUNK (BLOCKS * BLOCK)
#define BINS 256
#define LIST 32
#define SPILLED FULL
#define MINUS_INFINITY 0x007fffffu   // its key

struct alignas(16) Shared {
#if STAGE
    float stage[CHUNK];              // scores of the next row
#endif
    u32 map[TILES * CHUNK / 16];     // a byte for four columns: the lower half marks chosen ones, the upper half ties
    u32 pool_key[CAPACITY];
    u32 pool_column[CAPACITY];
    u32 bins[3][BINS + 4];           // of this level, the next and the one after; one more for "the pool is lost"
#if CLUSTER > 1
    u32 sums[BINS + 4];              // bins of all the team
#endif
    uint4 found;                     // the narrowed range
    u64 list[LIST];
    u64 joined[LIST];
    u64 arrived;
    u32 warp_sums[32];
    u32 warp_low[32 * CLUSTER];
    u32 warp_high[32 * CLUSTER];
    u32 pool_count, list_count;
    u32 marked[2];                   // columns of this thread block that are chosen, and ties
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch asks for too little shared memory");

// unsigned integers in the order of the scores: NaN, -inf, ..., 0, ..., inf
__device__ __forceinline__ u32 key_of(float score) {
    u32 bits = __float_as_uint(score + 0.0f);
    u32 key = bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
    return score != score ? 0u : key;
}

__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The largest score under a key that is above minus infinity's. No zero with a sign: -0 - -0 would not be negative.
__device__ __forceinline__ float score_below(u32 key) { return score_of(key == 0x80000000u ? key - 2 : key - 1); }

__device__ __forceinline__ u32 warp_inclusive(u32 value) {
    u32 lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(FULL, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// The team's least `low` and greatest `high`. One barrier.
__device__ __forceinline__ void team_range(Shared& shared, u32& low, u32& high) {
    const u32 lane = threadIdx.x & 31, place = team_rank() * WARPS + (threadIdx.x >> 5);
    low = __reduce_min_sync(FULL, low);
    high = __reduce_max_sync(FULL, high);
    if (lane < CLUSTER) {
        *peer(&shared.warp_low[place], lane) = low;
        *peer(&shared.warp_high[place], lane) = high;
    }
    team_barrier();
    low = FULL, high = 0;
#pragma unroll
    for (u32 i = 0; i < CLUSTER * WARPS; i += 32) {
        if (i + lane < CLUSTER * WARPS) {
            low = min(low, shared.warp_low[i + lane]);
            high = max(high, shared.warp_high[i + lane]);
        }
    }
    low = __reduce_min_sync(FULL, low);
    high = __reduce_max_sync(FULL, high);
}

// The wanted key is the need-th largest of those in low..limit; `guess` is where most of them are thought to end.
struct Range {
    u32 low, guess, limit, need;
    u32 held;        // keys in the range, once it has been narrowed
    bool spilled;    // a thread block of the team had more candidates than its pool holds
};

// Bin 0 is the lowest key alone, which catches ties; bin i the 2^shift keys that end at low + i * 2^shift; the last one
// has no end.
__device__ __forceinline__ u32 bin_of(u32 above, u32 shift) {
    u32 some = above != 0;
    return min(((above - some) >> shift) + some, (u32)BINS - 1);
}

// All threads: adds up the bins of the team. Each thread block starts with its own, so that not all read from one.
#if CLUSTER > 1
__device__ __forceinline__ void sum_bins(Shared& shared, u32* bins) {
    for (u32 i = threadIdx.x; i <= BINS; i += THREADS) {
        u32 some[CLUSTER], sum = 0;
#pragma unroll
        for (u32 rank = 0; rank < CLUSTER; ++rank) some[rank] = *peer(bins + i, (team_rank() + rank) % CLUSTER);
#pragma unroll
        for (u32 rank = 0; rank < CLUSTER; ++rank) sum += some[rank];
        shared.sums[i] = sum;
    }
    __syncthreads();
}
#endif

// One warp finds the bin of the need-th largest key: a lane has eight bins, the largest first, of all the team.
__device__ __forceinline__ void find_bin(Shared& shared, const u32* bins, const Range& range, u32 shift) {
    const u32 lane = threadIdx.x & 31;
    const uint4* mine = reinterpret_cast<const uint4*>(bins + BINS - 8 - 8 * lane);
    const uint4 second = mine[0], first = mine[1];
    const u32 count[8] = {first.w, first.z, first.y, first.x, second.w, second.z, second.y, second.x};
    const u32 sum = count[0] + count[1] + count[2] + count[3] + (count[4] + count[5] + count[6] + count[7]);
    const u32 inclusive = warp_inclusive(sum), need = range.need;
    u32 above = inclusive - sum;
    if (CLUSTER > 1 && bins[BINS]) {
        if (lane == 0) shared.found = uint4{0, 0, 0, SPILLED};
    } else if (above < need && inclusive >= need) {
        u32 bin = BINS - 1 - 8 * lane, held = count[0];
#pragma unroll
        for (u32 i = 1; i < 8; ++i) {
            if (above + held < need) above += held, held = count[i], --bin;
        }
        const u32 low = bin ? range.low + ((bin - 1) << shift) + 1 : range.low;
        // the keys above range.limit have been counted already, though this bin may go beyond it
        const u32 reach = range.limit - range.low;
        const u32 limit = range.low + (bin == BINS - 1 ? reach : min(bin << shift, reach));
        shared.found = uint4{low, limit, need - above, held};
    } else if (lane == 31 && inclusive < need) {
        shared.found = uint4{0, range.low - 1, need - inclusive, 0};
    }
}

// Counts keys, which each(count) gives away thread by thread, until at most `slack` are left in the range or it is one
// key. Where fewer than `need` are in it, the rest of the keys down to `floor` is looked at; false if they are too few.
// Two barriers a level.
template <class Each>
__device__ __forceinline__ bool narrow(
    Shared& shared, u32& turn, Range& range, u32 slack, u32 floor, Each each) {
    while (true) {
        const u32 low = range.low, limit = range.limit;
        const int bits = 32 - __clz((int)(max(range.guess, low) - low)) - 8;
        const u32 shift = bits > 0 ? bits : 0;
        u32* bins = shared.bins[turn];
        each([&](u32 key) { count_if(bins + bin_of(key - low, shift), key >= low && key <= limit); });
        team_barrier();
        turn = turn == 2 ? 0 : turn + 1;
#if CLUSTER > 1
        sum_bins(shared, bins);
        bins = shared.sums;
#endif
        if (threadIdx.x < 32) {
            find_bin(shared, bins, range, shift);
        } else {
            // what the level before has used, nobody reads any more
            uint4* spare = reinterpret_cast<uint4*>(shared.bins[turn == 2 ? 0 : turn + 1]);
#pragma unroll 1
            for (u32 i = threadIdx.x - 32; i < (BINS + 4) / 4; i += THREADS - 32) spare[i] = uint4{0, 0, 0, 0};
        }
        __syncthreads();
        const uint4 found = shared.found;
        range.limit = range.guess = found.y, range.need = found.z, range.held = found.w;
        if (CLUSTER > 1 && RARELY(found.w == SPILLED)) {
            range.spilled = true;
            return true;
        }
        if (found.w) {
            range.low = found.x;
            if (found.w <= slack || range.low == range.limit) return true;
        } else {
            if (low <= floor) return false;
            range.low = floor;
        }
    }
}
