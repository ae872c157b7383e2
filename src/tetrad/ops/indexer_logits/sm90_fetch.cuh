// The helpers: warps that fetch pages, and warps that convert query rows.

// The pages of a share in the order in which they are consumed, 32 ids at a time. Ids, and the requests they belong to,
// are loaded ahead of their use.
struct PageIds {
    const Arguments& arg;
    const int4* groups;
    int group, tile, last_group, last_tile;
    int lane;
    int base, known = 1, request, end;  // groups of which lane ``group - base`` knows the request and the end

    // ``rows`` is the first group's entry, which the share's record has too: it need not be looked up
    __device__ __forceinline__ PageIds(const Arguments& arg, const Walk& walk, int4 rows, const int4* groups, int lane)
        : arg(arg), groups(groups), group(walk.group), tile(walk.first_tile), lane(lane) {
        const bool whole = walk.last_tile == 0;
        last_group = walk.last_group - whole, last_tile = whole ? 0x7FFFFFFF : walk.last_tile;
        base = group, request = rows.z, end = rows.w;
    }
    __device__ __forceinline__ void look_up() {
        base = group, known = 32;
        const int4 rows = groups[min(base + lane, last_group)];
        request = rows.z, end = rows.w;
    }
    // The number of pages in the next batch, 0 after the last one, and this lane's id.
    __device__ __forceinline__ int next(int& page) {
        for (; group <= last_group; ++group, tile = 0) {
            if (group - base == known) look_up();
            int last = (__shfl_sync(0xFFFFFFFFu, end, group - base) + 63) >> 6;
            if (group == last_group) last = min(last, last_tile);
            if (tile >= last) continue;
            const i64 row = __shfl_sync(0xFFFFFFFFu, request, group - base);
            const int count = min(32, last - tile);
            page = lane < count ? arg.tables[row * arg.table_stride + tile + lane] : 0;
            tile += count;
            return count;
        }
        return 0;
    }
};

// One of FETCHERS warps, which share the pages in turn. Each lane starts the copies of the pages that it knows.
__device__ __forceinline__ void fetch_pages(const Arguments& arg, Shared& shared, const Walk& walk, int4 rows,
                                            const int4* groups, int fetcher, int lane) {
    PageIds ids(arg, walk, rows, groups, lane);
    RingPlace<FETCHERS> place(fetcher);
    int page = 0, i = fetcher;
    const u8* source;
    auto start_copies = [&](int stop) {
#pragma unroll 1
        for (; i < stop; i += FETCHERS, place.advance()) {
            Slot& slot = place.slot(shared);
            barrier_wait(&slot.empty, place.parity ^ 1);
            if (lane == i) copy_to_shared(slot.page, source, PAGE_BYTES, &slot.full);
            __syncwarp();
        }
    };
    int count = ids.next(page);
    source = arg.cache + page * arg.page_stride;
    // as many as the ring has room for are on their way before anything else is looked up
    start_copies(min(count, RING));
    while (count) {
        const int following = ids.next(page);
        start_copies(count);
        i -= count, count = following, source = arg.cache + page * arg.page_stride;
    }
}

// One of QUERY_WARPS warps, which share the heads of a row.
__device__ __forceinline__ void fetch_queries(const Arguments& arg, Shared& shared, const Walk& walk,
                                              const int4* groups, int part, int lane) {
    int4 rows;
    int first, last;
    u32 count = 1;
    for (int group = walk.group + 1; next_segment(walk, groups, group, rows, first, last); ++group, ++count) {
        const u32 side = count & 1;
        barrier_wait(&shared.query_empty[side], (count >> 1 & 1) ^ 1);
        int wide = 0;
        for (int row = 0; row < rows.y; ++row)
            convert_query(arg, shared, side, row, rows.x + row, part * 32 + lane, QUERY_WARPS * 32, wide);
        wide = __any_sync(0xFFFFFFFFu, wide);
        if (part == 0) write_meta(arg, shared, side, rows, first, last, lane);
        if (lane == 0) shared.meta[side].wide[part] = wide;
        to_tensor_cores();
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.query_full[side]);
    }
    barrier_wait(&shared.query_empty[count & 1], (count >> 1 & 1) ^ 1);
    if (lane == 0) {
        shared.meta[count & 1].rows = 0;
        barrier_arrive(&shared.query_full[count & 1]);
    }
}
