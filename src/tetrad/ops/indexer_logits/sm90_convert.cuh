// Query rows and pages as operands of the FP8 tensor cores: E2M1 times powers of two is E5M2 without rounding, E4M3 is
// taken as it is.

// Eight E2M1 codes, low nibble first, as E5M2 bytes out of the table of the eight magnitudes: the selector takes three
// bits of each nibble, and a byte permutation brings each sign to the top of its byte.
__device__ __forceinline__ void convert(u32 codes, u32 low, u32 high, u32& first, u32& second) {
    u32 magnitudes = codes & 0x77777777u, shifted = codes << 4;
    u32 a = permute(low, high, magnitudes), b = permute(low, high, magnitudes >> 16);
    first = a | (permute(codes, shifted, 0x1504) & 0x80808080u);
    second = b | (permute(codes, shifted, 0x3726) & 0x80808080u);
}

// 0, 0.5, 1, 1.5 and 2, 3, 4, 6 times 2^(13 - r) as E5M2
__device__ __forceinline__ u32 low_table(u32 r) { return 0x72706C00u - r * 0x04040400u; }
__device__ __forceinline__ u32 high_table(u32 r) { return 0x7A787674u - r * 0x04040404u; }

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

__device__ __forceinline__ bool ordinary(float scale) { return scale >= 0x1p-46f && scale <= 0x1p46f; }

// Convert one query row into its place in shared memory: threads first, first + stride, ... of whole warps. One unit is
// a head's quarter, which one thread of a quad multiplies with; see convert_page for the order of channels. Sets
// ``is_wide`` if the row needs the exact path.
__device__ __forceinline__ void convert_query(const Arguments& arg, Shared& shared, int place, int index, i64 row,
                                              int first, int stride, int& is_wide) {
#pragma unroll 2
    for (int unit = first; unit < HEADS * 4; unit += stride) {
        int head = unit >> 2, part = unit & 3;
        i64 vector = row * HEADS + head;
        u32 out[8];
        float weight = arg.weights[vector];
        bool wide;
#if FP8
        const uint4* source = (const uint4*)(arg.q + vector * 128 + part * 16);
        uint4 x = source[0], y = source[4];
        out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
        out[4] = y.x, out[5] = y.y, out[6] = y.z, out[7] = y.w;
        float scale = ((const float*)arg.q_scale)[vector];
        wide = !ordinary(scale);
        weight *= wide ? 0.0f : 0.5f * scale;
#else
        uint4 codes = *(const uint4*)(arg.q + vector * 64 + part * 16);
        int byte = arg.q_scale[vector * 4 + part];
        bool filled = ((codes.x | codes.y | codes.z | codes.w) & 0x77777777u) != 0;
        int most = filled ? byte : -1;
        most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
        most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
        int r = most - byte;
        wide = byte == 255 || (filled && (r > WIDEST || most < LEAST_SCALE || most > MOST_SCALE));
        r = min(max(r, 0), WIDEST);
        u32 low = low_table(r), high = high_table(r);
        convert(codes.x, low, high, out[0], out[1]);
        convert(codes.y, low, high, out[2], out[3]);
        convert(codes.z, low, high, out[4], out[5]);
        convert(codes.w, low, high, out[6], out[7]);
        most = min(max(most, LEAST_SCALE), MOST_SCALE);
        // of the scale, the tables of query and key, and the doubled relu
        weight *= power_of_two(most - 127 - 13 - 13 - 1);
#endif
        u8* target = shared.query[place][index] + head * 128 + part * 4;
#pragma unroll
        for (int c = 0; c < 8; ++c) *(u32*)(target + ((c ^ (head & 7)) << 4)) = out[c];
        // the accumulators of lane t of a quad belong to the heads 8j + 2t and 8j + 2t + 1
        const int at = ((head >> 1) & 3) * WEIGHT_LANE + (head >> 3) * 2 + (head & 1);
        if (part == 0) shared.weight[place][index][at] = weight;
        if (wide) is_wide = 1;
    }
}

// By one warp.
__device__ __forceinline__ void write_meta(const Arguments& arg, Shared& shared, int side, int4 group, int first_tile,
                                           int last_tile, int lane) {
    Meta& meta = shared.meta[side];
    const int end = lane < group.y ? arg.visible_end[group.x + lane] : group.w;
    if (lane < ROWS) meta.visible_end[lane] = end;
    const int least = __reduce_min_sync(0xFFFFFFFFu, end);
    if (lane) return;
    meta.rows = group.y, meta.first_row = group.x, meta.end = group.w, meta.least_end = least;
    meta.first_tile = first_tile, meta.last_tile = last_tile;
    meta.out_step = (1 + PAIRS) * arg.out_stride;
}

// A lane's part of a page: its two keys' bytes, and what it needs first of their scales.
struct Raw {
    uint4 data[FP8 ? 4 : 2];
    u32 scales[2];  // of an FP8 key the scale, of an FP4 key the byte of the lane's own group
};

// What a lane multiplies with: the fragments of its two keys, and the scale of the key whose sum it will hold.
struct Tile {
    u32 a[16];
    float scale;
};

#if FP8
__device__ __forceinline__ void load_page(const u8* data, const u8* scale, Raw& raw) {
    raw.data[0] = *(const uint4*)data, raw.data[1] = *(const uint4*)(data + 64);
    raw.data[2] = *(const uint4*)(data + 8 * 128), raw.data[3] = *(const uint4*)(data + 8 * 128 + 64);
    raw.scales[0] = *(const u32*)scale, raw.scales[1] = *(const u32*)(scale + 32);
}

struct Tables {
    float scale;
};

__device__ __forceinline__ bool look_closer(const Raw& raw, u32 threshold, int lane, Tables& tables) {
    tables.scale = __uint_as_float(lane & 1 ? raw.scales[1] : raw.scales[0]);
    return !ordinary(tables.scale) || threshold == 0;
}

__device__ __forceinline__ void convert_page(const Raw& raw, const Tables& tables, Tile& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 first = raw.data[half], second = raw.data[2 + half];
        u32* a = tile.a + 8 * half;
        a[0] = first.x, a[1] = second.x, a[2] = first.y, a[3] = second.y;
        a[4] = first.z, a[5] = second.z, a[6] = first.w, a[7] = second.w;
    }
    tile.scale = tables.scale;
}
#else
__device__ __forceinline__ void load_page(const u8* data, const u8* scale, Raw& raw) {
    raw.data[0] = *(const uint4*)data, raw.data[1] = *(const uint4*)(data + 8 * 64);
    raw.scales[0] = *scale, raw.scales[1] = *(scale + 32);
}

// The tables of a lane's two groups, one of each key, and the scale of the key whose sum it will hold.
struct Tables {
    u32 low[2], high[2];
    float scale;
};

// Scale bytes from USUAL - WIDEST to USUAL (2^-19 to 2^7) are the usual case: every key gets the scale 2^(USUAL - 127),
// and a group's table follows from its byte alone. Says whether one of the lane's bytes lies elsewhere; threshold is
// WIDEST + 1, or 0 to say yes in any case.
__device__ __forceinline__ bool look_closer(const Raw& raw, u32 threshold, int lane, Tables& tables) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
        tables.low[k] = low_table(USUAL) + raw.scales[k] * 0x04040400u,
        tables.high[k] = high_table(USUAL) + raw.scales[k] * 0x04040404u;
    tables.scale = power_of_two(USUAL - 127);
    return max(raw.scales[0] - (USUAL - WIDEST), raw.scales[1] - (USUAL - WIDEST)) >= threshold;
}

// The tables relative to the largest of each key's four scale bytes, x and y. Says whether the FP8 route may not be
// exact for one of the keys.
__device__ __forceinline__ bool relative_tables(u32 x, u32 y, int lane, Tables& tables) {
    // of both keys at once: each byte in turn on top of a 16-bit half
    u32 t = lane & 3;
    u32 most = larger_halves(larger_halves(permute(x, y, 0x5410), permute(x, y, 0x4501)),
                             larger_halves(permute(x, y, 0x7632), permute(x, y, 0x6723)));
    most = permute(most, 0, 0x4341);
    u32 own = permute(x, y, 0x4400 + t * 0x1111) & 0x00FF00FFu;
    u32 r = most - own;
    // 2^(byte - 127), and 0 for byte 0; the 2^-13 of the table is in the weights
    tables.scale = __uint_as_float(permute(most, 0, lane & 1 ? 0x4442 : 0x4440) << 23);
    tables.low[0] = low_table(r & 0xFFFFu), tables.high[0] = high_table(r & 0xFFFFu);
    tables.low[1] = low_table(r >> 16), tables.high[1] = high_table(r >> 16);
    // bit 8 of each half: r above 26, largest scale above or below the ordinary
    return ((r + (255 - WIDEST) * 0x00010001u) | (most + (255 - MOST_SCALE) * 0x00010001u) |
            ((255 + LEAST_SCALE) * 0x00010001u - most)) & 0x01000100u;
}

// Lane t of a quad owns group t of its two keys: 16 packed bytes each, one table each, and the 32 bytes of its own
// fragments, so nothing moves between lanes. Channel 32t + 8j + 4h + b thereby meets place 32j + 16h + 4t + b of the
// product, in the keys here and in the query rows in convert_query.
__device__ __forceinline__ void convert_page(const Raw& raw, const Tables& tables, Tile& tile) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const u32 low = tables.low[k], high = tables.high[k];
        const uint4& codes = raw.data[k];
        convert(codes.x, low, high, tile.a[k], tile.a[2 + k]);
        convert(codes.y, low, high, tile.a[4 + k], tile.a[6 + k]);
        convert(codes.z, low, high, tile.a[8 + k], tile.a[10 + k]);
        convert(codes.w, low, high, tile.a[12 + k], tile.a[14 + k]);
    }
    tile.scale = tables.scale;
}
#endif
