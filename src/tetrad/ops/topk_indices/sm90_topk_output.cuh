// From marks in the map to ascending columns.

// `ties`: 0 marks a chosen column, 1 one of equal scores of which only the first are chosen
__device__ __forceinline__ void mark(Shared& shared, u32 column, u32 ties) {
    atomicOr(&shared.map[column >> 4], 1u << ((column >> 2 & 3) * 8 + (column & 3) + 4 * ties));
}

// one thread's bytes of the first tile's map: 4 * BLOCKS adjacent columns
struct Marks {
    static const u32 WORDS = (BLOCKS + 7) / 8;   // of 32 columns
    u32 chosen[WORDS], ties[WORDS];              // a bit for each column

    __device__ __forceinline__ Marks(const Shared& shared) {
        const unsigned char* mine = place(const_cast<Shared&>(shared));
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
    static __device__ __forceinline__ unsigned char* place(Shared& shared) {
        return reinterpret_cast<unsigned char*>(shared.map) + BLOCKS * threadIdx.x;
    }
    static __device__ __forceinline__ u32 halves(u32 word) {
        word &= 0x0f0f0f0f;
        word = (word | word >> 4) & 0x00ff00ff;
        return (word | word >> 8) & 0xffff;
    }
    static __device__ __forceinline__ void clear(Shared& shared) {
        unsigned char* mine = place(shared);
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

// Writes the columns of a word of marks, the first of which is `column`.
__device__ __forceinline__ void write_columns(u32 chosen, u32 ties, u32 column, Place& place, int* out) {
    for (u32 rest = chosen | ties; rest; rest &= rest - 1) {
        const u32 bit = __ffs(rest) - 1, is_tie = ties >> bit & 1;
        const u32 at = place.chosen + min(place.ties, place.wanted);
        if (!is_tie || place.ties < place.wanted) out[at] = column + bit;
        place.chosen += !is_tie;
        place.ties += is_tie;
    }
}

// Writes the columns that the map of the first tile marks, and clears it. `column` is the tile's first, in the row.
__device__ __forceinline__ void write_tile(Shared& shared, u32 column, Place& place, int* out) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Marks marks(shared);
    // both counts of a tile fit in 16 bits
    const u32 mine = marks.counts(), inclusive = warp_inclusive(mine);
    if (mine) Marks::clear(shared);
    if (lane == 31) shared.warp_sums[warp] = inclusive;
    __syncthreads();
    const u32 sum = lane < WARPS ? shared.warp_sums[lane] : 0;
    const u32 before = __reduce_add_sync(FULL, lane < warp ? sum : 0) + inclusive - mine;
    Place here = {place.chosen + (before & 0xffff), place.ties + (before >> 16), place.wanted};
#pragma unroll
    for (u32 word = 0; word < Marks::WORDS; ++word)
        write_columns(marks.chosen[word], marks.ties[word], column + 4 * BLOCKS * threadIdx.x + 32 * word, here, out);
    if (TILED) {
        const u32 all = __reduce_add_sync(FULL, sum);
        place.chosen += all & 0xffff;
        place.ties += all >> 16;
        __syncthreads();
    }
}

#if TILED
// All tiles of a part, which mark no more columns than the pool had. A thread has adjacent words of the map, most of them
// empty.
struct WholeMap {
    static_assert(BLOCKS >= 4 && TILES * BLOCKS <= 128, "a thread's words of the map are whole, and 32 at most");
    u32* words;
    u32 counts;   // how many are chosen, and 2^16 times how many are ties
    u32 filled;   // a bit for each word that is not empty

    __device__ __forceinline__ WholeMap(Shared& shared, u32 tiles) : counts(0), filled(0) {
        const u32 count = tiles * (BLOCKS / 4);
        words = shared.map + count * threadIdx.x;
        // lanes start at different words, so that they read from different banks
        u32 at = (threadIdx.x & 31) % count;
#pragma unroll 4
        for (u32 i = 0; i < count; ++i) {
            const u32 word = words[at];
            counts += __popc(word & 0x0f0f0f0f) | __popc(word & 0xf0f0f0f0) << 16;
            filled |= (u32)(word != 0) << at;
            at = at + 1 == count ? 0 : at + 1;
        }
    }
    // Writes the columns, of which the map's first is `column`, and clears the map.
    __device__ __forceinline__ void write(Shared& shared, u32 column, Place place, int* out) {
        const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, inclusive = warp_inclusive(counts);
        if (lane == 31) shared.warp_sums[warp] = inclusive;
        __syncthreads();
        const u32 before = __reduce_add_sync(FULL, lane < warp ? shared.warp_sums[lane] : 0) + inclusive - counts;
        place.chosen += before & 0xffff;
        place.ties += before >> 16;
        for (u32 rest = filled; rest; rest &= rest - 1) {
            u32* word = words + __ffs(rest) - 1;
            write_columns(
                Marks::halves(*word), Marks::halves(*word >> 4), column + 16 * (u32)(word - shared.map), place, out);
            *word = 0;
        }
    }
};
#endif

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
    const u32 lane = threadIdx.x & 31;
    const bool before = lane < team_rank();
    place.chosen = __reduce_add_sync(FULL, before ? *peer(shared.marked, lane) : 0);
    place.ties = __reduce_add_sync(FULL, before ? *peer(shared.marked + 1, lane) : 0);
#endif
    return place;
}
