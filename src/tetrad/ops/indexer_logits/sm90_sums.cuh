// From products of heads to scores: relu, head weights, and the sum over a quad's lanes.

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

// A lane's share of the sums of one or two query rows.
template <int COUNT>
struct Sums {
    float a[COUNT], b[COUNT];
    float scale;
    int room;  // above 0: the lane's key is visible to its row

    // Two rows: lane t of a quad ends up with key t & 1 of row t >> 1, and writes it. The order of additions is that of
    // one row, where lanes 0 and 1 write.
    __device__ __forceinline__ void write(float* out, int lane) const {
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
