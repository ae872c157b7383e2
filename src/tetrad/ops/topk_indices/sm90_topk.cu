// The k best of every row. docs/kernels.md says how it works.
//
// Macros: THREADS of a thread block; BLOCKS, float4 of a row that a thread holds (2, 4, 8 or 16); CLUSTER, thread blocks
// of a row; TILED, whether a thread block's part of a row may be longer than its threads hold, so that it is read again
// for every look; TILES that the map has room for; STAGE, whether the next row is copied while this one is looked at;
// EARLY, whether the first loads start before the row's end is known; STEP, whether all blocks (1) or every other one (2)
// is the sample for the bound (TILED: the sample has as many vectors, but from all over the part); GROUPS of a thread's scores; CAPACITY of the pool; RESIDENT thread blocks of a
// multiprocessor; SHARED_BYTES.
#include "sm90_topk_device.cuh"
#include "sm90_topk_team.cuh"
#include "sm90_topk_row.cuh"
#include "sm90_topk_output.cuh"

// calls see(tile) with the scores of each tile in `values`
template <class See>
__device__ __forceinline__ void each_tile(Values& values, const Part& part, See see) {
#if TILED
    for (u32 tile = 0; tile < part.tiles(); ++tile) {
        values.load<0, BLOCKS>(part, tile, part.count);
        values.end_at<0, BLOCKS>(part, tile);
        see(tile);
    }
#else
    see(0);
#endif
}

// the largest score of each group of this thread's sample; neighbours are in different groups
__device__ __forceinline__ void group_maxima(const Values& values, float (&best)[GROUPS]) {
#pragma unroll
    for (u32 order = 0; order < SAMPLE; ++order) {
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            float& group = best[(4 * order + c) % GROUPS];
            group = fmaxf(group, values.four[order][c]);
        }
    }
}

// blocks FROM..TO - 1: a bit for each score above `below`, shifted into the mask. NaN is not
template <u32 FROM, u32 TO>
__device__ __forceinline__ u32 scores_above(const Values& values, float below, u32 mask) {
#pragma unroll
    for (u32 order = FROM; order < TO; ++order) {
#pragma unroll
        for (u32 c = 0; c < 4; ++c)
            mask = __funnelshift_l(__float_as_uint(__fsub_rn(below, values.four[order][c])), mask, 1);
    }
    return mask;
}

// One thread's scores as bits: the first is the highest bit of a word.
struct Mask {
    static const u32 WORDS = (BLOCKS + 7) / 8, BITS = 4 * BLOCKS / WORDS;
    u32 word[WORDS];
};

// the columns of a mask go to the pool, in any order; what the pool cannot hold is lost, but counted
__device__ __forceinline__ void to_pool(Shared& shared, u32 tile, const Mask& mask) {
    u32 count = 0;
#pragma unroll
    for (u32 i = 0; i < Mask::WORDS; ++i) count += __popc(mask.word[i]);
    const u32 inclusive = warp_inclusive(count);
    u32 base = 0;
    if ((threadIdx.x & 31) == 31) base = add_by_one_lane(&shared.pool_count, inclusive);
    const u32 end = __shfl_sync(FULL, base + inclusive, 31);
    if (end > CAPACITY) return;
    u32* place = shared.pool_column + end - __shfl_sync(FULL, inclusive, 31) + inclusive - count;
#pragma unroll
    for (u32 i = 0; i < Mask::WORDS; ++i) {
        for (u32 rest = mask.word[i]; rest; rest &= rest - 1) {
            const u32 score = i * Mask::BITS + Mask::BITS - __ffs(rest);
            *place++ = column_at(tile, score >> 2) + (score & 3);
        }
    }
}

// every score of this thread's, valid or not: see(order, c, key)
template <class See>
__device__ __forceinline__ void each_key(const Values& values, const Part& part, u32 tile, See see) {
#pragma unroll
    for (u32 order = 0; order < BLOCKS; ++order) {
        const u32 column = column_at(tile, order);
#pragma unroll
        for (u32 c = 0; c < 4; ++c)
            if (column + c < part.count) see(order, c, key_of(values.four[order][c]));
    }
}

// The pool has every key of range.low and above: its k best are marked. Two or more barriers. Returns ties to choose;
// nothing is done where a thread block's pool has spilled.
__device__ __forceinline__ u32 choose_from_pool(
    Shared& shared, u32& turn, Range& range, const Part& part, u32 count) {
    const u32 thread = threadIdx.x;
    const u32 AT_ONCE = THREADS > 512 ? 2 : 4;   // loads under way; too many are of the last one
    for (u32 first = thread; first < count; first += AT_ONCE * THREADS) {
        float score[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i)
            score[i] = __ldg(part.scores + shared.pool_column[min(first + i * THREADS, count - 1)]);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i)
            if (first + i * THREADS < count) shared.pool_key[first + i * THREADS] = key_of(score[i]);
    }
    const bool enough = narrow(shared, turn, range, LIST, 0, [&](auto add) {
        for (u32 i = thread; i < count; i += THREADS) add(shared.pool_key[i]);
    });
    // a bound that follows from few of the scores may be too high
    if (!enough) range.spilled = true;
    if (range.spilled) return 0;
    if (thread == 0) shared.pool_count = 0;
    const bool all = range.held == range.need, tied = range.low == range.limit;
    for (u32 i = thread; i < count; i += THREADS) {
        const u32 key = shared.pool_key[i], column = shared.pool_column[i];
        if (key < range.low) continue;
        if (key > range.limit || all || tied) {
            mark(shared, column, !all && key <= range.limit);
        } else {
            // larger for a larger score, then for a lower column: no two are equal
            shared.list[atomicAdd(&shared.list_count, 1u)] = (u64)key << 32 | ~(part.begin + column);
        }
    }
    team_barrier();
    if (all || tied) return all ? 0 : range.need;
    const u32 own = shared.list_count;
    const u64* rivals = shared.list;
#if CLUSTER > 1
    for (u32 i = thread; i < CLUSTER * LIST; i += THREADS) {
        // read in any case, to wait once: what no entry is goes nowhere
        const u64 entry = *(const volatile u64*)peer(shared.list + i % LIST, i / LIST);
        u32 place = i % LIST, here = 0;
#pragma unroll
        for (u32 rank = 0; rank < CLUSTER; ++rank) {
            const u32 some = *peer(&shared.list_count, rank);
            if (rank < i / LIST) place += some;
            if (rank == i / LIST) here = some;
        }
        if (i % LIST < here) shared.joined[place] = entry;
    }
    rivals = shared.joined;
    __syncthreads();
#endif
    if (thread < own) {
        const u64 entry = shared.list[thread];
        u32 larger = 0;
#pragma unroll 4
        for (u32 i = 0; i < range.held; ++i) larger += rivals[i] > entry;
        if (larger < range.need) mark(shared, ~(u32)entry - part.begin, 0);
    }
    __syncthreads();
    return 0;
}

// Every score is counted, as often as it takes. For rows whose candidates do not fit in the pool: ties, most often.
__device__ __forceinline__ void choose_from_all(
    Shared& shared, u32& turn, Range range, Values& values, const Part& part, int* out) {
    narrow(shared, turn, range, 0, 0, [&](auto add) {
        each_tile(values, part, [&](u32 tile) {
            each_key(values, part, tile, [&](u32, u32, u32 key) { add(key); });
        });
    });
    const u32 last = range.low;
    u32 chosen = 0, ties = 0;
    if (CLUSTER > 1) {
        each_tile(values, part, [&](u32 tile) {
            each_key(values, part, tile, [&](u32, u32, u32 key) { chosen += key > last, ties += key == last; });
        });
    }
    Place place = start_place(shared, chosen, ties, range.need);
    each_tile(values, part, [&](u32 tile) {
        u32 marks[BLOCKS] = {};
        each_key(values, part, tile, [&](u32 order, u32 c, u32 key) {
            marks[order] |= (key > last) << c | (key == last) << (c + 4);
        });
#pragma unroll
        for (u32 order = 0; order < BLOCKS; ++order)
            reinterpret_cast<unsigned char*>(shared.map)[block_at(order) * THREADS + threadIdx.x] = marks[order];
        __syncthreads();
        write_tile(shared, part.begin + tile * CHUNK, place, out);
    });
}

__device__ __forceinline__ void set_up(Shared& shared) {
    const u32 thread = threadIdx.x;
    uint4 *map = reinterpret_cast<uint4*>(shared.map), *bins = reinterpret_cast<uint4*>(shared.bins);
#pragma unroll 1
    for (u32 i = thread; i < TILES * CHUNK / 64; i += THREADS) map[i] = uint4{0, 0, 0, 0};
#pragma unroll 1
    for (u32 i = thread; i < 3 * (BINS + 4) / 4; i += THREADS) bins[i] = uint4{0, 0, 0, 0};
    if (thread == 0) {
        if (STAGE) barrier_init(&shared.arrived);
        shared.pool_count = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) CLUSTER_DIMS
    topk_indices(const float* all_logits, const int* all_ends, int* out_all, int k, int width, int rows,
                 long long logits_stride, long long out_stride) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 thread = threadIdx.x, teams = gridDim.x / CLUSTER;
    u32 index = blockIdx.x / CLUSTER;
    let_next_kernel_start();
    wait_for_kernels_before();
    if (index >= (u32)rows) return;
    const float* logits = known_from_here(all_logits);
    const int* visible_end = known_from_here(all_ends);
    auto end_of = [&](u32 row) { return (u32)max(0, min(__ldg(visible_end + row), width)); };
    u32 columns = end_of(index), known = EARLY ? (u32)width : columns;
    bool staged = false, started = false;
    u32 parity = 0, turn = 0;
    Values values;
    for (; index < (u32)rows; index += teams) {
        const u32 next = index + teams;
        const u32 next_columns = next < (u32)rows ? end_of(next) : 0;
        const float* row = logits + (long long)index * logits_stride;
        int* out = out_all + (long long)index * out_stride;
        if (TILED) {
            values.load_sample(Part(row, columns));
        } else if (!staged) {
            const Part part(row, known);
            values.load<0, SAMPLE>(part, 0, part.count);
        }
        if (!started) set_up(shared);
        // thread blocks look at each other's memory only when all have started
        if (CLUSTER > 1 && !started) team_barrier();
        started = true;
        if (RARELY(columns <= (u32)k)) {
            if (team_rank() == 0)
                for (u32 i = thread; i < (u32)k; i += THREADS) out[i] = i < columns ? (int)i : -1;
            columns = known = next_columns;
            continue;
        }
        const Part part(row, columns);
#if !TILED
#if STAGE
        if (staged) {
            barrier_wait(&shared.arrived, parity);
            parity ^= 1;
            values.take(shared, part);
        } else
#endif
            values.load<SAMPLE, BLOCKS>(part, 0, part.count);
        values.end_at<0, SAMPLE>(part, 0);
#endif

        // The bound: at least `rank` groups, and so as many scores, reach it. Where few of the scores are looked at,
        // twice as many as k of all of them are expected to.
        const u32 rank = min((u32)k, 2 * (u32)k / part.step + (part.step > 1 ? 16 : (u32)k));
        float best[GROUPS];
#pragma unroll
        for (u32 group = 0; group < GROUPS; ++group) best[group] = -__uint_as_float(0x7f800000u);
        group_maxima(values, best);
#if TILED
        values.load<0, BLOCKS>(part, 0, part.count);
#endif
        u32 low = FULL, high = 0;
#pragma unroll
        for (u32 group = 0; group < GROUPS; ++group) {
            const u32 key = key_of(best[group]);
            low = min(low, key > MINUS_INFINITY ? key : FULL);
            high = max(high, key);
        }
        team_range(shared, low, high);
        staged = false;
#if STAGE
        if (next_columns > (u32)k) {
            const Part ahead(row + teams * logits_stride, next_columns);
            staged = ahead.aligned;
            if (staged && thread == 0) start_copy(shared, ahead);
        }
#endif
        if (thread == 0) shared.list_count = shared.marked[0] = shared.marked[1] = 0;
        Range range;
        // most often the k-th is within four octaves of the largest; if not, the rest is looked at
        range.low = max(low, high > 1u << 25 ? high - (1u << 25) : 0);
        range.guess = high, range.limit = FULL, range.need = rank, range.held = 0, range.spilled = false;
        const bool bounded =
            low != FULL && narrow(shared, turn, range, rank / 4 + 8, low, [&](auto add) {
#pragma unroll
                for (u32 group = 0; group < GROUPS; ++group) add(key_of(best[group]));
            });
        const u32 least = bounded ? range.low : 0;

        // The pool: the scores that reach it. Without a bound all do, NaN as well.
        const float below = score_below(max(least, MINUS_INFINITY + 1));
        for (u32 tile = 0, tiles = part.tiles(); tile < tiles; ++tile) {
            Mask mask;
            const u32 HALF = TILED ? BLOCKS / 2 : BLOCKS > 8 ? 8 : SAMPLE;
            const bool last = !TILED || tile + 1 == tiles;
            if (TILED && last) values.end_at<0, BLOCKS>(part, tile);
            mask.word[0] = scores_above<0, HALF>(values, below, 0);
            if (!last) values.load<0, HALF>(part, tile + 1, part.count);
            if (!TILED) values.end_at<SAMPLE, BLOCKS>(part, 0);
            u32& second = mask.word[Mask::WORDS - 1];
            second = scores_above<HALF, BLOCKS>(values, below, Mask::WORDS > 1 ? 0 : second);
            if (!last) values.load<HALF, BLOCKS>(part, tile + 1, part.count);
            if (RARELY(!bounded)) {
#pragma unroll
                for (u32 i = 0; i < 4 * BLOCKS; ++i) {
                    u32& word = mask.word[i / Mask::BITS];
                    word = (i % Mask::BITS ? word << 1 : 0) | (column_at(tile, i >> 2) + (i & 3) < part.count);
                }
            }
            to_pool(shared, tile, mask);
        }
        __syncthreads();
        const u32 pooled = shared.pool_count;
        bool spilled = pooled > CAPACITY || part.tiles() > TILES;
        u32 ties = 0;
        range.low = least, range.guess = high, range.limit = FULL, range.need = k;
        if (CLUSTER > 1 && spilled && thread == 0) shared.bins[turn][BINS] = 1;
        if (CLUSTER > 1 || !spilled) {
            ties = choose_from_pool(shared, turn, range, part, spilled ? 0 : pooled);
            spilled = range.spilled;
        }
        if (!RARELY(spilled)) {
#if TILED
            WholeMap map(shared, max(1u, part.tiles()));
            const u32 marked = map.counts;
#else
            const u32 marked = CLUSTER > 1 ? Marks(shared).counts() : 0;
#endif
            Place place = start_place(shared, marked & 0xffff, marked >> 16, ties);
#if TILED
            map.write(shared, part.begin, place, out);
#else
            write_tile(shared, part.begin, place, out);
#endif
        } else {
            // where the bound is shared by many, it is most often the k-th score itself
            low = FULL;
#pragma unroll
            for (u32 group = 0; group < GROUPS; ++group) {
                const u32 key = key_of(best[group]);
                if (key >= least) low = min(low, key);
            }
            team_range(shared, low, high);
            if (thread == 0) shared.pool_count = 0;
            range.low = bounded ? low : 0, range.guess = max(high, range.low), range.limit = FULL, range.need = k;
            range.spilled = false;
            choose_from_all(shared, turn, range, values, part, out);
        }
        columns = known = next_columns;
    }
    // nobody leaves while others may look at its memory
    if (CLUSTER > 1) team_barrier();
}
