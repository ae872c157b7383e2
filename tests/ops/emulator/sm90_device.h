// sm90_device.cuh for the emulator: the same functions from what the PTX ISA says of the instructions.

#pragma once
#include "cuda_on_cpu.h"

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define __shared__
extern u8 memory[];
alignas(1024) u8 memory[232448];

inline u32 address(const void* pointer) { return (u32)((const u8*)pointer - memory) + 1024; }

inline u32 permute(u32 a, u32 b, u32 selector) {
    const u64 joined = (u64)b << 32 | a;
    u32 d = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 nibble = selector >> (4 * i) & 15, byte = joined >> (8 * (nibble & 7)) & 255;
        d |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return d;
}

inline u32 larger_halves(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }

struct Barrier { int count, pending; long bytes; u32 phase; };
inline std::map<const u64*, Barrier> barriers;
inline Barrier& barrier_at(const u64* at) {
    if (!barriers.count(at)) emulator::fail("a barrier is used before it is initialised");
    return barriers[at];
}
inline void barrier_step(Barrier& b) {
    if (b.pending < 0) emulator::fail("too many arrivals");
    if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.count, ++emulator::progress;
}
inline void barrier_init(u64* at, u32 count) { barriers[at] = Barrier{(int)count, (int)count, 0, 0}; }
inline void barrier_arrive(u64* at) { Barrier& b = barrier_at(at); --b.pending; barrier_step(b); }
// done when the phase of this parity is over; the phase before the first counts as one of parity 1
inline void barrier_wait(u64* at, u32 parity) { while (barrier_at(at).phase == parity) emulator::yield(); }

inline void copy_to_shared(u8* to, const u8* from, u32 bytes, u64* at) {
    if (((uintptr_t)to | (uintptr_t)from | bytes) & 15) emulator::fail("a bulk copy that is not aligned to 16 bytes");
    Barrier& b = barrier_at(at);
    b.bytes += bytes, --b.pending;
    barrier_step(b);
    // it takes a while
    for (int i = 0; i < 3; ++i) ++emulator::progress, emulator::yield();
    memcpy(to, from, bytes);
    b.bytes -= bytes;
    barrier_step(b);
}

inline void barriers_initialised() {}
inline void to_tensor_cores() {}
template <int COUNT> inline void meet() { emulator::meet(1, COUNT); }
template <int COUNT> inline void fewer_registers() {}
template <int COUNT> inline void more_registers() {}
inline void keep(u32&) {}
inline int uniform(int x) {
    const uint64_t* all = emulator::together(emulator::bits(x));
    for (int i = 0; i < 32; ++i) if (emulator::value<int>(all[i]) != x) emulator::fail("lanes differ where they must not");
    return x;
}

// E4M3 or E5M2
inline float fp8(u32 byte) {
#if FP8
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    if ((byte & 127) == 127) return NAN;
    const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
#else
    const int exponent = byte >> 2 & 31, mantissa = byte & 3;
    if (exponent == 31) return mantissa ? NAN : byte & 128 ? -INFINITY : INFINITY;
    const float size = exponent ? std::ldexp(4.0f + mantissa, exponent - 17) : std::ldexp((float)mantissa, -16);
#endif
    return byte & 128 ? -size : size;
}

// wgmma m64nNk32 with the first operand in registers and the second K-major in 128-byte swizzle; here of one warp, whose
// 16 rows need no other
template <int N>
inline void product_step(float (&d)[N], const u32* a, u64 b, bool add) {
    static float table[256];
    if (table[1] == 0) for (int i = 0; i < 256; ++i) table[i] = fp8(i);
    if ((b >> 62) != 1 || (b >> 32 & 0x3FFF) != 64) emulator::fail("not the descriptor of a 128-byte swizzle");
    const u32 start = (b & 0x3FFF) << 4;
    u32 fragments[4][32];
    for (int half = 0; half < 2; ++half) {
        const uint64_t* all = emulator::together((u64)a[2 * half + 1] << 32 | a[2 * half]);
        for (int i = 0; i < 32; ++i) fragments[2 * half][i] = (u32)all[i], fragments[2 * half + 1][i] = all[i] >> 32;
    }
    const int lane = emulator::lane();
    for (int below = 0; below < 2; ++below) {
        float row[32];
        for (int k = 0; k < 32; ++k)
            row[k] = table[fragments[k / 16 * 2 + below][lane / 4 * 4 + k % 16 / 4] >> (8 * (k % 4)) & 255];
        for (int j = 0; j < N / 4; ++j) {
            for (int e = 0; e < 2; ++e) {
                const int column = 8 * j + lane % 4 * 2 + e;
                u32 at = start + column / 8 * 1024 + column % 8 * 128;
                double sum = add ? d[4 * j + 2 * below + e] : 0.0;
                for (int k = 0; k < 32; ++k) {
                    const u32 place = at + k;
                    sum += (double)row[k] * table[memory[(place ^ (place >> 7 & 7) << 4) - 1024]];
                }
                d[4 * j + 2 * below + e] = (float)sum;
            }
        }
    }
}

template <int N>
inline void multiply(float (&d)[N], const u32 (&a)[16], u32 query) {
    const u64 b = (u64)(1u << 30 | 1024 >> 4) << 32 | (query >> 4 | 1u << 16);
    for (int step = 0; step < 4; ++step) product_step(d, a + 4 * step, b + 2 * step, step > 0);
}

template <int N>
inline void wait_for_product(float (&)[N], const u32 (&)[16]) { emulator::together(0); }
