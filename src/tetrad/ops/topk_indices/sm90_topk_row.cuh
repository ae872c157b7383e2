// How a row comes to the threads that look at it.

// Each thread holds BLOCKS float4. The first SAMPLE of them are every STEP-th block of the row, so they are a fair
// sample of it; the others follow. Where a part is longer than that, its sample is read apart: one of `step` pieces.
#define SAMPLE (BLOCKS / STEP)
static_assert(!(EARLY && (TILED || CLUSTER > 1)), "where a part begins follows from the row's end");
static_assert(!(TILED && STAGE), "a stage holds a whole row");
#define PIECE 16   // columns: 64 bytes, what the memory gives at once

__device__ __forceinline__ u32 block_at(u32 order) {
#if STEP > 1 && !TILED
    if (order >= SAMPLE) {
        u32 rest = order - SAMPLE;
        return rest / (STEP - 1) * STEP + 1 + rest % (STEP - 1);
    }
#endif
    return TILED ? order : order * STEP;
}

// The columns of a row that one thread block has: `count` of them, from column `begin` of the row.
struct Part {
    const float* scores;
    u32 begin, count;
    u32 step;   // of `step` pieces of a long part, one is in the sample; the same for all of a team
    bool aligned;

    __device__ __forceinline__ Part(const float* row, u32 columns) {
        // whole lines of 128 bytes
        u32 span = CLUSTER > 1 ? (columns + 32 * CLUSTER - 1) / (32 * CLUSTER) * 32 : columns;
        begin = min(team_rank() * span, columns);
        count = min(span, columns - begin);
        step = TILED ? max(1u, (span + SAMPLE * BLOCK - 1) / (SAMPLE * BLOCK)) : 1;
        scores = row + begin;
        aligned = ((u64)row & 15) == 0;
    }
    __device__ __forceinline__ u32 tiles() const { return TILED ? (count + CHUNK - 1) / CHUNK : 1; }
};

// This thread's column of block `order` of a tile; tiles are CHUNK columns.
__device__ __forceinline__ u32 column_at(u32 tile, u32 order) {
    return (TILED ? tile * CHUNK : 0) + block_at(order) * BLOCK + 4 * threadIdx.x;
}

// Written with distances from this thread's first column, so that a block's are constants in its instructions.
struct Values {
    float four[BLOCKS][4];

    // blocks FROM..TO - 1 of the columns before `count`, NaN behind it
    template <u32 FROM, u32 TO>
    __device__ __forceinline__ void load(const Part& part, u32 tile, u32 count) {
        const float* first = part.scores + column_at(tile, 0);
        const int left = (int)count - (int)column_at(tile, 0);
        if (TILED && part.aligned && (tile + 1) * CHUNK <= count) {
#pragma unroll
            for (u32 order = FROM; order < TO; ++order) put(order, load_four(first + block_at(order) * BLOCK, true));
            return;
        }
#pragma unroll
        for (u32 order = FROM; order < TO; ++order) {
            const int after = block_at(order) * BLOCK;
            if (RARELY(!part.aligned)) put_each(order, first + after, left - after);
            else put(order, load_four(first + after, left >= after + 4));
        }
    }
    __device__ __forceinline__ void load_sample(const Part& part) {
#pragma unroll
        for (u32 order = 0; order < SAMPLE; ++order) {
            const u32 vector = order * THREADS + threadIdx.x;
            const u32 column = vector / (PIECE / 4) * (PIECE * part.step) + vector % (PIECE / 4) * 4;
            const int left = (int)part.count - (int)column;
            if (RARELY(!part.aligned)) put_each(order, part.scores + column, left);
            else put(order, load_four(part.scores + column, left >= 4));
        }
    }
#if STAGE
    __device__ __forceinline__ void take(const Shared& shared, const Part& part) {
        const float nan = __uint_as_float(0x7fffffffu);
        const float* first = shared.stage + column_at(0, 0);
        const int left = (int)part.count - (int)column_at(0, 0);
#pragma unroll
        for (u32 order = 0; order < BLOCKS; ++order) {
            const int after = block_at(order) * BLOCK;
            float4 some = *reinterpret_cast<const float4*>(first + after);
            if (left < after + 4) some.x = some.y = some.z = some.w = nan;
            put(order, some);
        }
    }
#endif
    // What vectors cannot load: the last columns of a part. What was loaded too much is NaN afterwards.
    template <u32 FROM, u32 TO>
    __device__ __forceinline__ void end_at(const Part& part, u32 tile) {
        const u32 count = part.count - (TILED ? tile * CHUNK : 0);
        if (!EARLY && (!part.aligned || count % 4 == 0)) return;
        const float* first = part.scores + column_at(tile, 0);
        const int left = (int)part.count - (int)column_at(tile, 0);
#pragma unroll
        for (u32 order = FROM; order < TO; ++order) {
            const int after = block_at(order) * BLOCK;
            if (RARELY(after + BLOCK > count)) put_each(order, first + after, left - after);
        }
    }

private:
    __device__ __forceinline__ void put_each(u32 order, const float* from, int left) {
#pragma unroll
        for (int c = 0; c < 4; ++c) four[order][c] = load_one(from + c, c < left);
    }
    __device__ __forceinline__ void put(u32 order, float4 some) {
        four[order][0] = some.x, four[order][1] = some.y, four[order][2] = some.z, four[order][3] = some.w;
    }
};

#if STAGE
// Start copying a part into the stage, by one thread.
__device__ __forceinline__ void start_copy(Shared& shared, const Part& part) {
    u32 whole = part.count & ~3u;
    barrier_expect(&shared.arrived, 4 * whole);
    for (u32 begin = 0; begin < whole; begin += BLOCK)
        copy_to_shared(shared.stage + begin, part.scores + begin, 4 * min(whole - begin, (u32)BLOCK), &shared.arrived);
}
#endif
