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
// a head's quarter, which one thread of a quad multiplies with; see convert_page for the order of channels.
__device__ __forceinline__ void convert_query(const Arguments& arg, Shared& shared, int place, int index, i64 row,
                                              int first, int stride) {
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
        if (part == 0) shared.weight[place][index][((head >> 1) & 3) * WEIGHT_LANE + (head >> 3) * 2 + (head & 1)] = weight;
        if (wide) shared.meta[place].wide = 1;
    }
}

__device__ __forceinline__ void write_meta(const Arguments& arg, Shared& shared, int place, int4 group,
                                           int first_tile, int last_tile, int index) {
    Meta& meta = shared.meta[place];
    if (index < group.y) meta.visible_end[index] = arg.visible_end[group.x + index];
    if (index) return;
    meta.rows = group.y, meta.first_row = group.x, meta.end = group.w;
    meta.first_tile = first_tile, meta.last_tile = last_tile;
}

// What a lane needs of a page: the fragments of its two keys, the scale of the key whose sum it will hold, and whether
// the FP8 route is not exact for one of them.
struct Tile {
    u32 a[16];
    float scale;
    bool wide;
};

#if FP8
__device__ __forceinline__ void load_page(const u8* data, const u8* scale, uint4 (&raw)[4], u32 (&scales)[2]) {
    raw[0] = *(const uint4*)data, raw[1] = *(const uint4*)(data + 64);
    raw[2] = *(const uint4*)(data + 8 * 128), raw[3] = *(const uint4*)(data + 8 * 128 + 64);
    scales[0] = *(const u32*)scale, scales[1] = *(const u32*)(scale + 32);
}

__device__ __forceinline__ void convert_page(const uint4 (&raw)[4], const u32 (&scales)[2], int lane, Tile& tile) {
    const u32* first = (const u32*)&raw[0];
    const u32* second = (const u32*)&raw[2];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        tile.a[4 * step] = first[2 * step], tile.a[4 * step + 1] = second[2 * step];
        tile.a[4 * step + 2] = first[2 * step + 1], tile.a[4 * step + 3] = second[2 * step + 1];
    }
    tile.scale = __uint_as_float(lane & 1 ? scales[1] : scales[0]);
    tile.wide = !ordinary(tile.scale);
}
#else
__device__ __forceinline__ void load_page(const u8* data, const u8* scale, uint4 (&raw)[2], u32 (&scales)[2]) {
    raw[0] = *(const uint4*)data, raw[1] = *(const uint4*)(data + 8 * 64);
    scales[0] = *(const u32*)scale, scales[1] = *(const u32*)(scale + 32);
}

// Lane t of a quad owns group t of its two keys: 16 packed bytes, one table, and the 32 bytes of its own fragments, so
// nothing moves between lanes. Channel 32t + 8j + 4h + b thereby meets place 32j + 16h + 4t + b of the product, in the
// keys here and in the query rows in convert_query.
__device__ __forceinline__ void convert_page(const uint4 (&raw)[2], const u32 (&scales)[2], int lane, Tile& tile) {
    // the largest of four scale bytes, of both keys at once: each byte in turn on top of a 16-bit half
    u32 x = scales[0], y = scales[1], t = lane & 3;
    u32 most = larger_halves(larger_halves(permute(x, y, 0x5410), permute(x, y, 0x4501)),
                             larger_halves(permute(x, y, 0x7632), permute(x, y, 0x6723)));
    most = permute(most, 0, 0x4341);
    u32 own = permute(x, y, 0x4400 + t * 0x1111) & 0x00FF00FFu;
    u32 r = most - own;
    // bit 8 of each half: r above 26, largest scale above or below the ordinary
    u32 odd = ((r + (255 - WIDEST) * 0x00010001u) | (most + (255 - MOST_SCALE) * 0x00010001u) |
               ((255 + LEAST_SCALE) * 0x00010001u - most)) & 0x01000100u;
    tile.wide = odd != 0;
    // 2^(byte - 127), and 0 for byte 0; the 2^-13 of the table is in the weights
    tile.scale = __uint_as_float(permute(most, 0, lane & 1 ? 0x4442 : 0x4440) << 23);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 distance = k ? r >> 16 : r & 0xFFFFu;
        u32 low = low_table(distance), high = high_table(distance);
        const uint4& codes = raw[k];
        convert(codes.x, low, high, tile.a[k], tile.a[2 + k]);
        convert(codes.y, low, high, tile.a[4 + k], tile.a[6 + k]);
        convert(codes.z, low, high, tile.a[8 + k], tile.a[10 + k]);
        convert(codes.w, low, high, tile.a[12 + k], tile.a[14 + k]);
    }
}
#endif
