// The lightning indexer's scores on Hopper, FP4 and FP8 pages on the FP8 tensor cores. sm90.py compiles this and says
// how it is launched; docs/kernels.md says how it works. Macros: HEADS (32 or 64), FP8 (0 or 1), GROUPS (consumer
// warpgroups), RING (pages in flight, a power of two), ROWS (of a group at most, 8), PAIRS (0 or 1: whether two query
// rows go through the tensor cores at once).

#include "sm90_device.cuh"

constexpr int DATA_BYTES = FP8 ? 8192 : 4096;     // a page: 64 keys, then their scales
constexpr int PAGE_BYTES = DATA_BYTES + 256;
constexpr int QUERY_BYTES = HEADS * 128;          // a query row as FP8, 128-byte swizzled
constexpr int WEIGHT_LANE = HEADS / 4 + 4;        // floats of one lane of a quad, padded against bank conflicts
constexpr int CONSUMERS = GROUPS * 128;
constexpr int THREADS = CONSUMERS + 128;          // and the page warp, the query warp, two that only keep the places
// five warps a scheduler have 96 registers each, too few for the sums of two query rows
constexpr bool TRADE = PAIRS && GROUPS == 4;
constexpr int FLAG_WORDS = 1024;                  // one bit a tile that holds a score to be redone
constexpr int ACCUMULATORS = HEADS / 2;

constexpr int WIDEST = 26;                        // E2M1 * 2^(13 - r) is a normal E5M2 number for r = 0..26
constexpr int LEAST_SCALE = 127 - 46;             // between these no product of a key, a query and a sum over heads
constexpr int MOST_SCALE = 127 + 46;              // leaves the normal fp32 numbers; others are scored in fp64

struct Meta {                                     // of a group of query rows in shared memory
    int rows, first_row, first_tile, last_tile;   // rows 0: there are no more groups
    int end, wide;                                // entries that its furthest row sees; a row needs the exact path
    int visible_end[ROWS];
};

struct Shared {
    u8 query[2][ROWS][QUERY_BYTES];
    u8 page[RING][PAGE_BYTES];
    float weight[2][ROWS][4 * WEIGHT_LANE];
    Meta meta[2];
    u64 page_full[RING], page_empty[RING], query_full[2], query_empty[2];
    u32 flags[FLAG_WORDS];
    u32 flagged;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "sm90.py asks for the shared memory");

struct Arguments {
    const u8* q;
    const u8* q_scale;
    const float* weights;
    const u8* cache;
    i64 page_stride;
    const int* tables;
    i64 table_stride;
    const int* visible_end;
    float* out;
    i64 out_stride;
};

#include "sm90_convert.cuh"

// The weights of a lane's own heads.
struct Weights {
    float4 four[HEADS / 16];
    __device__ __forceinline__ void load(const u8* from) {
#pragma unroll
        for (int i = 0; i < HEADS / 16; ++i) four[i] = ((const float4*)from)[i];
    }
};

// SUM_h w_h relu(d_h) of one query row for the two keys of a lane, over the lane's own heads. x + |x| is twice the relu
// on the FMA pipe and keeps NaN; the half is in the weights.
template <int OFFSET, int N>
__device__ __forceinline__ void weighted_sum(const float (&d)[N], const Weights& weights, float& a, float& b) {
    float first[2] = {0.0f, 0.0f}, second[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < HEADS / 16; ++i) {
        const float4 w = weights.four[i];
        const float four[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float x = d[OFFSET + 8 * i + 4 * (e >> 1) + (e & 1)];
            const float y = d[OFFSET + 8 * i + 4 * (e >> 1) + 2 + (e & 1)];
            first[e & 1] += four[e] * (x + fabsf(x));
            second[e & 1] += four[e] * (y + fabsf(y));
        }
    }
    a = first[0] + first[1], b = second[0] + second[1];
}

// A lane's share of the sums of one or two query rows. They are added up over the quad and written while the next
// product is being computed.
template <int COUNT>
struct Pending {
    float a[COUNT], b[COUNT];
    float scale;
    int room;  // above 0: the lane's key is visible to its row
    float* out;

    // Two rows: lane t of a quad ends up with key t & 1 of row t >> 1, and writes it. The order of additions is that of
    // one row, where lanes 0 and 1 write.
    __device__ __forceinline__ void write(int lane) const {
        float kept[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            kept[i] = lane & 1 ? b[i] : a[i];
            kept[i] += __shfl_xor_sync(0xFFFFFFFFu, lane & 1 ? a[i] : b[i], 1);
        }
        float sum;
        if (COUNT == 1) {
            sum = kept[0] + __shfl_xor_sync(0xFFFFFFFFu, kept[0], 2);
        } else {
            sum = lane & 2 ? kept[COUNT - 1] : kept[0];
            sum += __shfl_xor_sync(0xFFFFFFFFu, lane & 2 ? kept[0] : kept[COUNT - 1], 2);
        }
        if (room > 0) *out = sum * scale;
    }
};

// The part of the schedule that a thread block walks: groups of rows and, of the first and the last, a part of the tiles.
struct Walk {
    int group, first_tile, last_group, last_tile;
};

__device__ __forceinline__ bool next_segment(const Walk& walk, const int4* groups, int group, int4& rows, int& first,
                                             int& last) {
    if (group > walk.last_group || (group == walk.last_group && walk.last_tile == 0)) return false;
    rows = groups[group];
    first = group == walk.group ? walk.first_tile : 0;
    last = group == walk.last_group ? walk.last_tile : (rows.w + 63) >> 6;
    return true;
}

#include "sm90_exact.cuh"

// A lane's part of a page as it lies in the ring.
struct Raw {
    uint4 data[FP8 ? 4 : 2];
    u32 scales[2];
};

__device__ __forceinline__ void wait_for_page(Shared& shared, u32 number, u32 data_at, u32 scale_at, Raw& raw) {
    const u32 at = number % RING;
    barrier_wait(&shared.page_full[at], (number / RING) & 1);
    load_page(shared.page[at] + data_at, shared.page[at] + scale_at, raw.data, raw.scales);
}

// Give the page's place back and convert it. Marks the tile if a score of it has to be redone.
__device__ __forceinline__ void take_page(Shared& shared, u32 number, const Raw& raw, int lane, int key, int wide_row,
                                          int end, Tile& tile) {
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.page_empty[number % RING]);
    convert_page(raw.data, raw.scales, lane, tile);
    if (__any_sync(0xFFFFFFFFu, tile.wide || wide_row)) {
        if (wide_row || must_redo(raw.data, raw.scales, key, lane, end)) {
            u32 bit = number % (FLAG_WORDS * 32);
            atomicOr(&shared.flags[bit >> 5], 1u << (bit & 31));
            shared.flagged = 1;
        }
    }
}

__device__ __forceinline__ void consume(const Arguments& arg, Shared& shared, int thread) {
    const int group = uniform(thread >> 7);
    u32 own_lane = thread & 31, own_key = ((thread >> 5) & 3) * 16 + (own_lane >> 2);
    keep(own_lane), keep(own_key);
    const int lane = own_lane, key = own_key;
    // where this lane finds its keys and their scales in a page, its weights of a row; kept, not worked out anew
    u32 data_at = key * (DATA_BYTES / 64) + (lane & 3) * 16, scale_at = DATA_BYTES + key * 4;
    u32 weight_at = (lane & 3) * WEIGHT_LANE * 4;
    keep(data_at), keep(scale_at), keep(weight_at);
    u32 tiles_before = 0;
    Pending<1 + PAIRS> pending;
    pending.room = 0;
    for (u32 groups_before = 0;; ++groups_before) {
        const u32 place = groups_before & 1;
        const Meta& meta = shared.meta[place];
        barrier_wait(&shared.query_full[place], groups_before >> 1 & 1);
        const int rows = uniform(meta.rows);
        if (rows == 0) break;
        const int first_tile = uniform(meta.first_tile), tiles = uniform(meta.last_tile) - first_tile;
        const int wide_row = meta.wide, end = meta.end;
        const u32 query = uniform(address(shared.query[place][0]));
        const u8* weights = (const u8*)shared.weight[place][0] + weight_at;
        // the key whose sum this lane will hold, and its column
        const int first = first_tile * 64 + key, column = first + (lane & 1) * 8;
        float* out = arg.out + meta.first_row * arg.out_stride + column;
#if PAIRS
        out += (lane >> 1 & 1) * arg.out_stride;
#endif
        u32 i = (group + GROUPS - tiles_before % GROUPS) % GROUPS;
#if !PAIRS
        if (rows == 1) {
            Weights w;
            w.load(weights);
            const int visible = lane & 2 ? 0 : meta.visible_end[0] - column;
            for (; i < tiles; i += GROUPS) {
                Raw raw;
                Tile tile;
                float d[ACCUMULATORS];
                wait_for_page(shared, tiles_before + i, data_at, scale_at, raw);
                pending.write(lane);
                take_page(shared, tiles_before + i, raw, lane, first + i * 64, wide_row, end, tile);
                multiply(d, tile.a, query);
                pending.out = out + i * 64, pending.scale = tile.scale, pending.room = visible - (int)i * 64;
                wait_for_product(d);
                weighted_sum<0>(d, w, pending.a[0], pending.b[0]);
            }
        }
#endif
        for (; i < tiles; i += GROUPS) {
            Raw raw;
            Tile tile;
            wait_for_page(shared, tiles_before + i, data_at, scale_at, raw);
            take_page(shared, tiles_before + i, raw, lane, first + i * 64, wide_row, end, tile);
            float* target = out + i * 64;
            int row = 0;
#if PAIRS
            for (; row + 1 < rows; row += 2) {
                float d[2 * ACCUMULATORS];
                Weights w;
                multiply(d, tile.a, query + row * QUERY_BYTES);
                w.load(weights + row * (16 * WEIGHT_LANE));
                const int visible = meta.visible_end[row + (lane >> 1 & 1)] - column - (int)i * 64;
                wait_for_product(d);
                pending.write(lane);
                pending.out = target, pending.scale = tile.scale, pending.room = visible;
                target += 2 * arg.out_stride;
                weighted_sum<0>(d, w, pending.a[0], pending.b[0]);
                w.load(weights + (row + 1) * (16 * WEIGHT_LANE));
                weighted_sum<ACCUMULATORS>(d, w, pending.a[1], pending.b[1]);
            }
            if (row < rows) {
                // the last row of an odd number; its sums do not wait, so that those of a pair can
                Pending<1> alone;
                float d[ACCUMULATORS];
                Weights w;
                multiply(d, tile.a, query + row * QUERY_BYTES);
                alone.out = target, alone.scale = tile.scale;
                alone.room = lane & 2 ? 0 : meta.visible_end[row] - column - (int)i * 64;
                w.load(weights + row * (16 * WEIGHT_LANE));
                wait_for_product(d);
                weighted_sum<0>(d, w, alone.a[0], alone.b[0]);
                alone.write(lane);
            }
#else
            for (; row < rows; ++row) {
                float d[ACCUMULATORS];
                Weights w;
                multiply(d, tile.a, query + row * QUERY_BYTES);
                w.load(weights + row * (16 * WEIGHT_LANE));
                const int visible = lane & 2 ? 0 : meta.visible_end[row] - column - (int)i * 64;
                wait_for_product(d);
                pending.write(lane);
                pending.out = target, pending.scale = tile.scale, pending.room = visible;
                target += arg.out_stride;
                weighted_sum<0>(d, w, pending.a[0], pending.b[0]);
            }
#endif
        }
        tiles_before += tiles;
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.query_empty[place]);
    }
    pending.write(lane);
}

__device__ __forceinline__ void fetch_pages(const Arguments& arg, Shared& shared, const Walk& walk,
                                            const int4* groups, int lane) {
    u32 count = 0;
    int4 rows;
    int first, last;
    for (int group = walk.group; next_segment(walk, groups, group, rows, first, last); ++group) {
        const int* table = arg.tables + rows.z * arg.table_stride;
        for (int tile = first; tile < last; tile += 32) {
            int page = tile + lane < last ? table[tile + lane] : 0;
            for (int i = 0; i < min(32, last - tile); ++i, ++count) {
                u32 place = count % RING;
                i64 number = __shfl_sync(0xFFFFFFFFu, page, i);
                barrier_wait(&shared.page_empty[place], ((count / RING) & 1) ^ 1);
                if (lane == 0)
                    copy_to_shared(shared.page[place], arg.cache + number * arg.page_stride, PAGE_BYTES,
                                   &shared.page_full[place]);
                __syncwarp();
            }
        }
    }
}

__device__ __forceinline__ void fetch_queries(const Arguments& arg, Shared& shared, const Walk& walk,
                                              const int4* groups, int lane) {
    int4 rows;
    int first, last;
    u32 count = 1;
    for (int group = walk.group + 1; next_segment(walk, groups, group, rows, first, last); ++group, ++count) {
        const u32 place = count & 1;
        barrier_wait(&shared.query_empty[place], (count >> 1 & 1) ^ 1);
        if (lane == 0) shared.meta[place].wide = 0;
        __syncwarp();
        write_meta(arg, shared, place, rows, first, last, lane);
        for (int row = 0; row < rows.y; ++row) convert_query(arg, shared, place, row, rows.x + row, lane, 32);
        to_tensor_cores();
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.query_full[place]);
    }
    barrier_wait(&shared.query_empty[count & 1], (count >> 1 & 1) ^ 1);
    if (lane == 0) {
        shared.meta[count & 1].rows = 0;
        barrier_arrive(&shared.query_full[count & 1]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
indexer_logits(const u8* q, const u8* q_scale, const float* weights, const u8* cache, i64 page_stride,
               const int* tables, i64 table_stride, const int* visible_end, float* out, i64 out_stride,
               const int4* schedule) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *(Shared*)memory;
    const Arguments arg{q, q_scale, weights, cache, page_stride, tables, table_stride, visible_end, out, out_stride};
    const int4 range = schedule[2 * blockIdx.x], rows = schedule[2 * blockIdx.x + 1];
    const int4* groups = schedule + 2 * gridDim.x;
    const Walk walk{range.x, range.y, range.z, range.w};
    if (walk.group == walk.last_group && walk.first_tile == walk.last_tile) return;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    for (int i = thread; i < FLAG_WORDS; i += THREADS) shared.flags[i] = 0;
    if (thread < 2) shared.meta[thread].wide = 0;
    if (thread == 0) {
        shared.flagged = 0;
        for (int i = 0; i < RING; ++i) {
            barrier_init(&shared.page_full[i], 1);
            barrier_init(&shared.page_empty[i], 4);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(&shared.query_full[i], 1);
            barrier_init(&shared.query_empty[i], 4 * GROUPS);
        }
        barriers_initialised();
    }
    __syncthreads();
    if (thread >= CONSUMERS) {
        // these need few registers and leave theirs to the consumers, where those need more than an equal share
        if (TRADE) fewer_registers<32>();
        if (warp == CONSUMERS / 32) {
            fetch_pages(arg, shared, walk, groups, lane);
        } else if (warp == CONSUMERS / 32 + 1) {
            fetch_queries(arg, shared, walk, groups, lane);
        }
    } else {
        if (TRADE) more_registers<112>();
        // the first rows are converted by all, the later ones by one warp behind the consumers' backs
        const int last = walk.group == walk.last_group ? walk.last_tile : (rows.w + 63) >> 6;
        if (thread < ROWS) write_meta(arg, shared, 0, rows, walk.first_tile, last, thread);
        for (int row = 0; row < rows.y; ++row)
            convert_query(arg, shared, 0, row, rows.x + row, thread, CONSUMERS);
        to_tensor_cores();
        meet<CONSUMERS>();
        if (thread == 0) barrier_arrive(&shared.query_full[0]);
        consume(arg, shared, thread);
        meet<CONSUMERS>();
        if (shared.flagged) redo(arg, shared, walk, groups, warp, lane);
    }
}
