// The lightning indexer's scores on Hopper, FP4 and FP8 pages on the FP8 tensor cores. sm90.py compiles this and says
// how it is launched; docs/kernels.md says how it works. Macros: HEADS (32 or 64), FP8 (0 or 1), GROUPS (consumer
// warpgroups), PAIRS (0 or 1: whether two query rows go through the tensor cores at once), RING (pages in flight, a
// multiple of GROUPS and of FETCHERS), FETCHERS (warps that fetch pages), ROWS (of a group at most), CONSUMER_REGISTERS
// and HELPER_REGISTERS (of a thread).

#include "sm90_device.cuh"

constexpr int DATA_BYTES = FP8 ? 8192 : 4096;     // a page: 64 keys, then their scales
constexpr int PAGE_BYTES = DATA_BYTES + 256;
constexpr int QUERY_BYTES = HEADS * 128;          // a query row as FP8, 128-byte swizzled
constexpr int WEIGHT_LANE = HEADS / 4 + 4;        // floats of one lane of a quad, padded against bank conflicts
constexpr int CONSUMERS = GROUPS * 128;
constexpr int THREADS = CONSUMERS + 128;          // and two warps that fetch pages, two that convert query rows
constexpr int QUERY_WARPS = 4 - FETCHERS;
constexpr int FLAG_WORDS = 1024;                  // one bit a tile that holds a score to be redone
constexpr int ACCUMULATORS = HEADS / 2;

constexpr int WIDEST = 26;                        // E2M1 * 2^(13 - r) is a normal E5M2 number for r = 0..26
constexpr int USUAL = 127 + 7;                    // scale bytes from USUAL - WIDEST to USUAL are the usual case
constexpr int LEAST_SCALE = 127 - 46;             // between these no product of a key, a query and a sum over heads
constexpr int MOST_SCALE = 127 + 46;              // leaves the normal fp32 numbers; others are scored in fp64

struct Meta {                                     // of a group of query rows in shared memory
    int rows, first_row, first_tile, last_tile;   // rows 0: there are no more groups
    int end, least_end;                           // entries that its furthest and its nearest row see
    int wide[2];                                  // one of its rows needs the exact path, as each query warp found
    i64 out_step;                                 // floats from one product's rows to the next one's
    int visible_end[ROWS];
};

struct Slot {                                     // one page's place in the ring
    u8 page[PAGE_BYTES];
    u64 full, empty;
    __device__ __forceinline__ void initialise() { barrier_init(&full, 1), barrier_init(&empty, 4); }
};

struct Shared {
    u8 query[2][ROWS][QUERY_BYTES];
    Slot ring[RING];
    float weight[2][ROWS][4 * WEIGHT_LANE];
    Meta meta[2];
    u64 query_full[2], query_empty[2];
    alignas(16) u32 flags[FLAG_WORDS];
    u32 flagged;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "sm90.py asks for the shared memory");
static_assert(RING <= 2 * THREADS / 32 && FLAG_WORDS / 4 <= THREADS, "each warp initialises two places at most");
static_assert(RING % GROUPS == 0 && RING % FETCHERS == 0, "a place has one consumer and one fetcher; see sm90.py");

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

// A place in the ring that moves on by STEP pages. ``at`` is its first byte.
template <int STEP>
struct RingPlace {
    u32 at, parity;
    __device__ __forceinline__ explicit RingPlace(u32 first) : at(first * (u32)sizeof(Slot)), parity(0) {}
    __device__ __forceinline__ void advance() {
        at += STEP * (u32)sizeof(Slot);
        if (at >= RING * (u32)sizeof(Slot)) at -= RING * (u32)sizeof(Slot), parity ^= 1;
    }
    __device__ __forceinline__ Slot& slot(Shared& shared) const { return *(Slot*)((u8*)shared.ring + at); }
};

#include "sm90_sums.cuh"

// The part of the schedule that a thread block walks: groups of rows and, of the first and the last, some of the tiles.
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

// What a lane of a consumer keeps through all tiles rather than work it out anew.
struct Lane {
    int lane, key;          // its first key in a tile; the other one is key + 8
    u32 data_at, scale_at;  // where it finds its part of a page
};

// A page on its way from the ring to the tensor cores.
struct Page {
    Raw raw;
    Tables tables;
    bool closer;  // some lane's scales are not of the usual kind

    __device__ __forceinline__ void load(Slot& slot, u32 parity, const Lane& own) {
        barrier_wait(&slot.full, parity);
        load_page(slot.page + own.data_at, slot.page + own.scale_at, raw);
    }
    __device__ __forceinline__ void look(u32 threshold, int lane) {
        closer = __any_sync(0xFFFFFFFFu, look_closer(raw, threshold, lane, tables));
    }
    // Convert the page and give its place back. ``number`` counts the block's tiles, ``entry`` is the lane's first key
    // in its request. Marks the tile if a score of it has to be redone.
    __device__ __forceinline__ void take(Shared& shared, Slot& slot, u32 number, const Lane& own, int entry,
                                         u32 threshold, int end, Tile& tile) {
        if (closer) {
#if FP8
            if (threshold == 0 || must_redo(raw, entry, end)) mark(shared, number);
#else
            const u32* scales = (const u32*)(slot.page + DATA_BYTES) + own.key;
            const u32 x = scales[0], y = scales[8];
            const bool odd = relative_tables(x, y, own.lane, tables);
            if (threshold == 0 || (odd && must_redo(raw, x, y, entry, end))) mark(shared, number);
#endif
        }
        __syncwarp();
        if (own.lane == 0) barrier_arrive(&slot.empty);
        convert_page(raw, tables, tile);
    }
    static __device__ __forceinline__ void mark(Shared& shared, u32 tile) {
        const u32 bit = tile % (FLAG_WORDS * 32);
        atomicOr(&shared.flags[bit >> 5], 1u << (bit & 31));
        shared.flagged = 1;
    }
};

// The products of one page and its rows, as many at a time as go together; ``row`` ends at the first that is left over.
// ALL_VISIBLE: every row sees the whole page. While a product is under way, what a warpgroup asks of shared memory or of
// another lane waits for it, as all of these go through one queue: so weights are loaded before and sums are added up
// after it. The next page may wait, since nothing else needs it as early.
template <bool ALL_VISIBLE>
__device__ __forceinline__ void multiply_rows(Shared& shared, const Meta& meta, const RingPlace<GROUPS>& place,
                                              const Lane& own, const Tile& tile, Page& page, bool more, u32 query,
                                              const u8* weights, int beyond, int rows, i64 out_step, int& row,
                                              float*& out) {
    const int lane = own.lane;
    u32 weights_at = 0;
    for (; row + PAIRS < rows; row += 1 + PAIRS) {
        float d[(1 + PAIRS) * ACCUMULATORS];
        Weights w;
        Sums<1 + PAIRS> sums;
        w.load(weights + weights_at);
        multiply(d, tile.a, query);
        if (row == 0 && more) page.load(place.slot(shared), place.parity, own);
        sums.scale = tile.scale, sums.room = 1;
        if (!ALL_VISIBLE) sums.room = meta.visible_end[row + (PAIRS ? lane >> 1 & 1 : 0)] - beyond;
        if (!PAIRS && lane & 2) sums.room = 0;
        wait_for_product(d, tile.a);
        weighted_sum<0>(d, w, sums.a[0], sums.b[0]);
        if (PAIRS) {
            w.load(weights + weights_at + 16 * WEIGHT_LANE);
            weighted_sum<PAIRS * ACCUMULATORS>(d, w, sums.a[PAIRS], sums.b[PAIRS]);
        }
        sums.write(out, lane);
        out += out_step;
        weights_at += (1 + PAIRS) * 16 * WEIGHT_LANE, query += (1 + PAIRS) * QUERY_BYTES;
        keep(weights_at);
    }
}

// Every consumer warpgroup takes every GROUPS-th tile of the block, whatever group of rows it belongs to.
__device__ __forceinline__ void consume(const Arguments& arg, Shared& shared, int thread) {
    const int group = uniform(thread >> 7);
    u32 own_lane = thread & 31, own_key = ((thread >> 5) & 3) * 16 + (own_lane >> 2);
    keep(own_lane), keep(own_key);
    u32 data_at = own_key * (DATA_BYTES / 64) + (own_lane & 3) * 16;
    u32 scale_at = DATA_BYTES + own_key * 4 + (FP8 ? 0 : own_lane & 3), weight_at = (own_lane & 3) * WEIGHT_LANE * 4;
    keep(data_at), keep(scale_at), keep(weight_at);
    const Lane own{(int)own_lane, (int)own_key, data_at, scale_at};
    const int lane = own.lane;
    RingPlace<GROUPS> place(group);
    u32 tiles_before = 0;
    int skip = group;  // tiles of the next group of rows before this warpgroup's first
    for (u32 groups_before = 0;; ++groups_before) {
        const u32 side = groups_before & 1;
        const Meta& meta = shared.meta[side];
        barrier_wait(&shared.query_full[side], groups_before >> 1 & 1);
        const int rows = uniform(meta.rows);
        if (rows == 0) break;
        const int first_tile = uniform(meta.first_tile), tiles = uniform(meta.last_tile) - first_tile;
        const int end = meta.end;
        const u32 threshold = meta.wide[0] | meta.wide[1] ? 0 : WIDEST + 1;
        const u32 query = uniform(address(shared.query[side][0]));
        const u8* weights = (const u8*)shared.weight[side][0] + weight_at;
        // the lane's first key, and the column of the one whose sum it will hold
        const int first = first_tile * 64 + own.key, column = first + (lane & 1) * 8;
        float* out = arg.out + meta.first_row * arg.out_stride + column;
        int i = skip;
        Page page;
        if (i < tiles) page.load(place.slot(shared), place.parity, own), page.look(threshold, lane);
        if (rows == 1) {
            Weights w;
            w.load(weights);
            Sums<1> sums;  // of the tile before; they are added up and written between two products
            sums.a[0] = sums.b[0] = sums.scale = 0.0f, sums.room = 0;
            int room = lane & 2 ? 0 : meta.visible_end[0] - column - i * 64;
            out += i * 64;
            for (; i < tiles; i += GROUPS) {
                Tile tile;
                float d[ACCUMULATORS];
                page.take(shared, place.slot(shared), tiles_before + i, own, first + i * 64, threshold, end, tile);
                place.advance();
                sums.write(out - GROUPS * 64, lane);
                multiply(d, tile.a, query);
                sums.scale = tile.scale, sums.room = room;
                wait_for_product(d, tile.a);
                if (i + GROUPS < tiles) page.load(place.slot(shared), place.parity, own);
                page.look(threshold, lane);
                weighted_sum<0>(d, w, sums.a[0], sums.b[0]);
                out += GROUPS * 64, room -= GROUPS * 64;
            }
            sums.write(out - GROUPS * 64, lane);
        } else {
#if PAIRS
            out += (lane >> 1 & 1) * arg.out_stride;
#endif
            const int least_end = uniform(meta.least_end) - first_tile * 64;
            const i64 out_step = meta.out_step;
            for (; i < tiles; i += GROUPS) {
                Tile tile;
                page.take(shared, place.slot(shared), tiles_before + i, own, first + i * 64, threshold, end, tile);
                place.advance();
                const int beyond = column + i * 64;
                const bool more = i + GROUPS < tiles;
                float* next = out + i * 64;
                int row = 0;
                // most tiles are seen by all rows
                if ((i + 1) * 64 <= least_end)
                    multiply_rows<true>(shared, meta, place, own, tile, page, more, query, weights, 0, rows, out_step,
                                        row, next);
                else
                    multiply_rows<false>(shared, meta, place, own, tile, page, more, query, weights, beyond, rows,
                                         out_step, row, next);
                if (row < rows) {
                    // the last row of an odd number
                    Sums<1> alone;
                    float d[ACCUMULATORS];
                    Weights w;
                    w.load(weights + row * (16 * WEIGHT_LANE));
                    multiply(d, tile.a, query + row * QUERY_BYTES);
                    alone.scale = tile.scale;
                    alone.room = lane & 2 ? 0 : meta.visible_end[row] - beyond;
                    wait_for_product(d, tile.a);
                    weighted_sum<0>(d, w, alone.a[0], alone.b[0]);
                    alone.write(next, lane);
                }
                page.look(threshold, lane);
            }
        }
        skip = i - tiles;
        tiles_before += tiles;
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.query_empty[side]);
    }
}

#include "sm90_fetch.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
indexer_logits(const u8* q, const u8* q_scale, const float* weights, const u8* cache, i64 page_stride,
               const int* tables, i64 table_stride, const int* visible_end, float* out, i64 out_stride,
               const int4* schedule) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *(Shared*)memory;
    const Arguments arg{q, q_scale, weights, cache, page_stride, tables, table_stride, visible_end, out, out_stride};
    const int4* groups = schedule + 2 * gridDim.x;
    // a warp initialises one barrier after the other, so all take part
    const int thread = threadIdx.x, warp = uniform(thread >> 5), lane = thread & 31;
    if (thread < FLAG_WORDS / 4) ((uint4*)shared.flags)[thread] = make_uint4(0, 0, 0, 0);
    if (lane == 0) {
        if (warp < RING) shared.ring[warp].initialise();
        if (warp + THREADS / 32 < RING) shared.ring[warp + THREADS / 32].initialise();
        if (warp < 2) {
            shared.meta[0].wide[warp] = 0, shared.flagged = 0;
            barrier_init(&shared.query_full[warp], QUERY_WARPS);
            barrier_init(&shared.query_empty[warp], 4 * GROUPS);
        }
        barriers_initialised();
    }
    let_next_kernel_start();
    wait_for_kernels_before();
    int4 range = schedule[2 * blockIdx.x], rows = schedule[2 * blockIdx.x + 1];
    __syncthreads();
    // in this form the compiler cannot wait for it before the barrier
    range = make_int4(uniform(range.x), uniform(range.y), uniform(range.z), uniform(range.w));
    rows = make_int4(uniform(rows.x), uniform(rows.y), uniform(rows.z), uniform(rows.w));
    const Walk walk{range.x, range.y, range.z, range.w};
    if (walk.group == walk.last_group && walk.first_tile == walk.last_tile) return;
    if (thread >= CONSUMERS) {
        // these need few registers and leave theirs to the consumers
        fewer_registers<HELPER_REGISTERS>();
        const int helper = warp - CONSUMERS / 32;
        if (helper < FETCHERS)
            fetch_pages(arg, shared, walk, rows, groups, helper, lane);
        else
            fetch_queries(arg, shared, walk, groups, helper - FETCHERS, lane);
    } else {
        more_registers<CONSUMER_REGISTERS>();
        // the first rows are converted by all, the later ones by two warps behind the consumers' backs
        const int last = walk.group == walk.last_group ? walk.last_tile : (rows.w + 63) >> 6;
        int wide = 0;
        for (int row = 0; row < rows.y; ++row)
            convert_query(arg, shared, 0, row, rows.x + row, thread, CONSUMERS, wide);
        if (warp == CONSUMERS / 32 - 1) write_meta(arg, shared, 0, rows, walk.first_tile, last, lane);
        if (wide) shared.meta[0].wide[0] = 1;
        to_tensor_cores();
        meet<CONSUMERS>();
        if (thread < QUERY_WARPS) barrier_arrive(&shared.query_full[0]);
        consume(arg, shared, thread);
        meet<CONSUMERS>();
        if (shared.flagged) redo(arg, shared, walk, groups, warp, lane);
    }
}
