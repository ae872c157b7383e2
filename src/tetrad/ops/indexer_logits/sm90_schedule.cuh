// A thread block's way through the schedule, which plan_indexer/sm90.py describes: its own share, then pieces that it
// claims.

// The rows of a walk's group and its tiles in this walk; false behind the last group.
__device__ __forceinline__ bool next_segment(const Walk& walk, const int4* groups, int group, int4& rows, int& first,
                                             int& last) {
    if (group > walk.last_group || (group == walk.last_group && walk.last_tile == 0)) return false;
    rows = groups[group];
    first = group == walk.group ? walk.first_tile : 0;
    last = group == walk.last_group ? walk.last_tile : (rows.w + 63) >> 6;
    return true;
}

// A block's own walk is its share without the tail.
__device__ __forceinline__ Walk own_walk(int4 range, int4 tail) {
    Walk walk{range.x, range.y, range.z, range.w};
    if (tail.y < tail.z) walk.last_group = tail.x, walk.last_tile = tail.y;
    return walk;
}

// This block takes no more pieces. The last one to say so leaves the counters as it found them.
__device__ __forceinline__ void leave(const Arguments& arg) {
    int* counters = arg.counters();
    if (atomicAdd(counters + 1, 1) == gridDim.x - 1) counters[0] = counters[1] = 0;
}

// Take the next piece for this thread block, by one warp. What is empty is passed over; none is left: an empty claim.
__device__ __forceinline__ void claim_piece(const Arguments& arg, Shared& shared, int pieces, int number, int lane) {
    const int shares = gridDim.x;
    Claim claim{Walk{0, 0, 0, 0}, make_int4(0, 0, 0, 0)};
    while (number < CLAIMS && claim.walk.empty()) {
        int index = lane == 0 ? atomicAdd(arg.counters(), 1) : 0;
        index = __shfl_sync(0xFFFFFFFFu, index, 0);
        if (index >= shares * pieces) break;
        // the first pieces of all shares, then the second ones
        const int share = index % shares, piece = index / shares;
        const int4 tail = arg.tails()[share];
        const int tiles = tail.z - tail.y;
        claim.walk = Walk{tail.x, tail.y + tiles * piece / pieces, tail.x, tail.y + tiles * (piece + 1) / pieces};
        if (!claim.walk.empty()) claim.rows = arg.groups()[tail.x];
    }
    if (lane) return;
    shared.claims[number] = claim;
    barrier_arrive(&shared.claimed[number]);
    if (claim.walk.empty()) leave(arg);
}

__device__ __forceinline__ Claim await_claim(Shared& shared, int number) {
    barrier_wait(&shared.claimed[number], 0);
    return shared.claims[number];
}
