// Scores that the FP8 route does not give exactly: NaN scales, groups of one vector too far apart, scales at the ends of
// fp32. Consumers only mark the tile; when all products are done, the block scores the marked keys again in fp64.

#if FP8
__device__ __forceinline__ bool must_redo(const Raw& raw, int entry, int end) {
    bool first = !ordinary(__uint_as_float(raw.scales[0])), second = !ordinary(__uint_as_float(raw.scales[1]));
    return (first && entry < end) || (second && entry + 8 < end);
}
#else
// Whether a group of codes with this scale byte, in a vector whose largest byte is ``most``, has to be redone.
__device__ __forceinline__ bool group_is_wide(uint4 codes, int byte, int most) {
    bool filled = ((codes.x | codes.y | codes.z | codes.w) & 0x77777777u) != 0;
    return byte == 255 || (filled && (most - byte > WIDEST || most < LEAST_SCALE || most > MOST_SCALE));
}

__device__ __forceinline__ int largest_byte(u32 x) {
    return max(max(x & 255, (x >> 8) & 255), max((x >> 16) & 255, x >> 24));
}

// x and y: the scale bytes of the lane's two keys
__device__ __forceinline__ bool must_redo(const Raw& raw, u32 x, u32 y, int entry, int end) {
    bool first = group_is_wide(raw.data[0], raw.scales[0], largest_byte(x));
    bool second = group_is_wide(raw.data[1], raw.scales[1], largest_byte(y));
    return (first && entry < end) || (second && entry + 8 < end);
}
#endif

__device__ __forceinline__ double double_power(int exponent) {
    return __longlong_as_double((i64)(exponent + 1023) << 52);
}

// Twice the value of an E2M1 code.
__device__ __forceinline__ int doubled_e2m1(u32 code) {
    int m = code & 7;
    m = m < 4 ? m : (2 | (m & 1)) << ((m >> 1) - 1);
    return code & 8 ? -m : m;
}

__device__ __forceinline__ double e4m3(u32 byte) {
    int exponent = (byte >> 3) & 15, mantissa = byte & 7;
    if ((byte & 127) == 127) return __longlong_as_double(0x7FF8000000000000LL);
    double size = exponent ? (8 + mantissa) * double_power(exponent - 10) : mantissa * double_power(-9);
    return byte & 128 ? -size : size;
}

// <q, k> of one head, dequantised.
__device__ __forceinline__ double exact_product(const u8* query, const u8* query_scale, const u8* key,
                                                const u8* key_scale) {
    double sum = 0.0;
#if FP8
#pragma unroll 1
    for (int i = 0; i < 128; ++i) sum += e4m3(query[i]) * e4m3(key[i]);
    return sum * *(const float*)query_scale * *(const float*)key_scale;
#else
#pragma unroll 1
    for (int group = 0; group < 4; ++group) {
        int products = 0;
#pragma unroll 1
        for (int i = 16 * group; i < 16 * group + 16; ++i) {
            u32 a = query[i], b = key[i];
            products += doubled_e2m1(a) * doubled_e2m1(b) + doubled_e2m1(a >> 4) * doubled_e2m1(b >> 4);
        }
        int x = query_scale[group], y = key_scale[group];
        double scale = x == 255 || y == 255 ? __longlong_as_double(0x7FF8000000000000LL) : double_power(x + y - 256);
        sum += products * scale;
    }
    return sum;
#endif
}

__device__ __forceinline__ bool key_is_wide(const u8* page, int entry, int lane) {
#if FP8
    return !ordinary(*(const float*)(page + DATA_BYTES + entry * 4));
#else
    u32 scales = *(const u32*)(page + DATA_BYTES + entry * 4);
    int part = lane & 3;
    uint4 codes = *(const uint4*)(page + entry * 64 + part * 16);
    return __any_sync(0xFFFFFFFFu, group_is_wide(codes, (scales >> (8 * part)) & 255, largest_byte(scales)));
#endif
}

__device__ __forceinline__ bool query_is_wide(const Arguments& arg, i64 row, int lane) {
    bool wide = false;
    for (int head = lane; head < HEADS; head += 32) {
        i64 vector = row * HEADS + head;
#if FP8
        wide |= !ordinary(((const float*)arg.q_scale)[vector]);
#else
        const uint4* codes = (const uint4*)(arg.q + vector * 64);
        const u8* scales = arg.q_scale + vector * 4;
        int most = -1;
        for (int part = 0; part < 4; ++part) {
            uint4 c = codes[part];
            if ((c.x | c.y | c.z | c.w) & 0x77777777u) most = max(most, (int)scales[part]);
        }
        for (int part = 0; part < 4; ++part) wide |= group_is_wide(codes[part], scales[part], most);
#endif
    }
    return __any_sync(0xFFFFFFFFu, wide);
}

__device__ __forceinline__ void redo(const Arguments& arg, const Shared& shared, const Walk& walk, const int4* groups,
                                     int warp, int lane) {
    u32 count = 0;
    int4 rows;
    int first, last;
    for (int group = walk.group; next_segment(walk, groups, group, rows, first, last); ++group) {
        for (int tile = first; tile < last; ++tile, ++count) {
            u32 bit = count % (FLAG_WORDS * 32);
            if (!((shared.flags[bit >> 5] >> (bit & 31)) & 1)) continue;
            const u8* page = arg.cache + arg.tables[rows.z * arg.table_stride + tile] * arg.page_stride;
            for (int entry = warp; entry < min(64, rows.w - tile * 64); entry += CONSUMERS / 32) {
                const bool wide_key = key_is_wide(page, entry, lane);
                const int column = tile * 64 + entry;
                for (int i = 0; i < rows.y; ++i) {
                    i64 row = rows.x + i;
                    if (column >= arg.visible_end[row] || !(wide_key || query_is_wide(arg, row, lane))) continue;
                    double sum = 0.0;
                    for (int head = lane; head < HEADS; head += 32) {
                        i64 vector = row * HEADS + head;
                        double product = exact_product(arg.q + vector * (FP8 ? 128 : 64), arg.q_scale + vector * 4,
                                                       page + entry * (FP8 ? 128 : 64), page + DATA_BYTES + entry * 4);
                        // relu keeps NaN
                        sum += (double)arg.weights[vector] * (product < 0.0 ? 0.0 : product);
                    }
                    for (int distance = 16; distance; distance >>= 1)
                        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
                    if (lane == 0) arg.out[row * arg.out_stride + column] = (float)sum;
                }
            }
        }
    }
}
