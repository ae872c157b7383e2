// From marks in the map to ascending columns.

// `ties`: 0 marks a chosen column, 1 one of equal scores of which only the first are chosen
__device__ __forceinline__ void mark(Shared& shared, u32 column, u32 ties) {
    atomicOr(&shared.map[column >> 4], 1u << ((column >> 2 & 3) * 8 + (column & 3) + 4 * ties));
}

// one thread's bytes of the map: 4 * BLOCKS adjacent columns
struct Marks {
    static const u32 WORDS = (BLOCKS + 7) / 8;   // of 32 columns
    u32 chosen[WORDS], ties[WORDS];              // a bit for each column

    __device__ __forceinline__ Marks(const Shared& shared, u32 unit) {
        const unsigned char* mine = place(const_cast<Shared&>(shared), unit);
#if BLOCKS >= 8
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) {
            const uint2 two = reinterpret_cast<const uint2*>(mine)[i];
            chosen[i] = halves(two.x) | halves(two.y) << 16;
            ties[i] = halves(two.x >> 4) | halves(two.y >> 4) << 16;
        }
#elif BLOCKS == 4
        const u32 one = *reinterpret_cast<const u32*>(mine);
        chosen[0] = halves(one), ties[0] = halves(one >> 4);
#else
        const u32 one = *reinterpret_cast<const unsigned short*>(mine);
        chosen[0] = halves(one), ties[0] = halves(one >> 4);
#endif
    }
    // a warp's bytes are adjacent, and are a unit
    static __device__ __forceinline__ unsigned char* place(Shared& shared, u32 unit) {
        return reinterpret_cast<unsigned char*>(shared.map) + BLOCKS * (32 * unit + (threadIdx.x & 31));
    }
    static __device__ __forceinline__ u32 halves(u32 word) {
        word &= 0x0f0f0f0f;
        word = (word | word >> 4) & 0x00ff00ff;
        return (word | word >> 8) & 0xffff;
    }
    static __device__ __forceinline__ void clear(Shared& shared, u32 unit) {
        unsigned char* mine = place(shared, unit);
#if BLOCKS >= 8
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) reinterpret_cast<uint2*>(mine)[i] = uint2{0, 0};
#elif BLOCKS == 4
        *reinterpret_cast<u32*>(mine) = 0;
#else
        *reinterpret_cast<unsigned short*>(mine) = 0;
#endif
    }
    // how many are chosen, and 2^16 times how many are ties
    __device__ __forceinline__ u32 counts() const {
        u32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) sum += __popc(chosen[i]) | __popc(ties[i]) << 16;
        return sum;
    }
};

// Where the next columns go: the chosen ones and the ties before them, and how many ties are chosen.
struct Place {
    u32 chosen, ties, wanted;
};

// Writes the columns of this thread's marks, the first of which is `column`.
__device__ __forceinline__ void write_marks(const Marks& marks, u32 column, Place place, int* out) {
#pragma unroll
    for (u32 word = 0; word < Marks::WORDS; ++word) {
        for (u32 rest = marks.chosen[word] | marks.ties[word]; rest; rest &= rest - 1) {
            const u32 bit = __ffs(rest) - 1, is_tie = marks.ties[word] >> bit & 1;
            const u32 at = place.chosen + min(place.ties, place.wanted);
            if (!is_tie || place.ties < place.wanted) out[at] = column + 32 * word + bit;
            place.chosen += !is_tie;
            place.ties += is_tie;
        }
    }
}

// Writes the columns that the map of the first tile marks, and clears it. `column` is the tile's first, in the row.
__device__ __forceinline__ void write_tile(Shared& shared, u32 column, Place& place, int* out) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Marks marks(shared, warp);
    // both counts of a tile fit in 16 bits
    const u32 mine = marks.counts(), inclusive = warp_inclusive(mine);
    if (mine) Marks::clear(shared, warp);
    if (lane == 31) shared.warp_sums[warp] = inclusive;
    __syncthreads();
    const u32 sum = lane < WARPS ? shared.warp_sums[lane] : 0;
    const u32 before = __reduce_add_sync(FULL, lane < warp ? sum : 0) + inclusive - mine;
    const Place here = {place.chosen + (before & 0xffff), place.ties + (before >> 16), place.wanted};
    write_marks(marks, column + 4 * BLOCKS * threadIdx.x, here, out);
    if (TILED) {
        const u32 all = __reduce_add_sync(FULL, sum);
        place.chosen += all & 0xffff;
        place.ties += all >> 16;
        __syncthreads();
    }
}

// The same for several tiles that mark no more columns than the pool had. Each warp has units that follow each other.
__device__ __forceinline__ void write_tiles(Shared& shared, u32 tiles, u32 column, Place place, int* out) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 mine = 0;
#pragma unroll 4
    for (u32 i = 0; i < tiles; ++i) mine += Marks(shared, warp * tiles + i).counts();
    mine = __reduce_add_sync(FULL, mine);
    if (lane == 0) shared.warp_sums[warp] = mine;
    __syncthreads();
    u32 before = __reduce_add_sync(FULL, lane < warp ? shared.warp_sums[lane] : 0);
#pragma unroll 2
    for (u32 unit = warp * tiles; unit < (warp + 1) * tiles; ++unit) {
        const Marks marks(shared, unit);
        const u32 here = marks.counts(), inclusive = warp_inclusive(here), first = before + inclusive - here;
        before += __shfl_sync(FULL, inclusive, 31);
        if (!here) continue;
        Marks::clear(shared, unit);
        const Place from = {place.chosen + (first & 0xffff), place.ties + (first >> 16), place.wanted};
        write_marks(marks, column + 4 * BLOCKS * (32 * unit + lane), from, out);
    }
}

// Where this thread block's columns start, from how many each thread has marked. One barrier, none for one thread block.
__device__ __forceinline__ Place start_place(Shared& shared, u32 chosen, u32 ties, u32 wanted) {
    Place place = {0, 0, wanted};
#if CLUSTER > 1
    chosen = __reduce_add_sync(FULL, chosen);
    ties = __reduce_add_sync(FULL, ties);
    if ((threadIdx.x & 31) == 0) {
        atomicAdd(shared.marked, chosen);
        atomicAdd(shared.marked + 1, ties);
    }
    team_barrier();
    for (u32 rank = 0; rank < team_rank(); ++rank) {
        place.chosen += *peer(shared.marked, rank);
        place.ties += *peer(shared.marked + 1, rank);
    }
#endif
    return place;
}
