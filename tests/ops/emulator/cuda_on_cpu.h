// Runs a CUDA thread block on the CPU, so that a kernel's own source can be tested without a GPU: every thread is a
// fiber, warps take turns in a random order, and what threads do together (shuffles, barriers) makes them wait for each
// other as it does there. A block that waits for ever is reported. Only what this project's kernels use is here.

#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <map>
#include <random>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(x) __attribute__((aligned(x)))

struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
// kernels run one after the other here
inline void wait_for_kernels_before() {}
inline void let_next_kernel_start() {}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }

namespace emulator {

struct Index { int x; };
struct Warp { uint64_t slot[32], out[32]; int arrived; unsigned turn; };
struct Fiber { jmp_buf at; ucontext_t start; Index index; bool started, done; };
struct Meeting { int arrived; unsigned turn; };

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::map<int, Meeting> meetings;
inline Fiber* current;
inline Index block, grid;
inline jmp_buf scheduler;
inline void (*body)();
inline long progress;

[[noreturn]] inline void fail(const char* what) {
    fprintf(stderr, "emulator: %s (thread %d of block %d)\n", what, current ? current->index.x : -1, block.x);
    abort();
}

inline void yield() {
    Fiber* self = current;
    if (!_setjmp(self->at)) _longjmp(scheduler, 1);
}

inline void entry() {
    body();
    current->done = true;
    ++progress;
    _longjmp(scheduler, 1);
}

// Every lane brings a value and sees those of all 32.
inline const uint64_t* together(uint64_t value) {
    Warp& warp = warps[current->index.x / 32];
    const unsigned turn = warp.turn;
    warp.slot[current->index.x % 32] = value;
    if (++warp.arrived == 32) {
        memcpy(warp.out, warp.slot, sizeof warp.out);
        warp.arrived = 0, ++warp.turn, ++progress;
    } else {
        while (warp.turn == turn) yield();
    }
    return warp.out;
}

inline void meet(int which, int count) {
    Meeting& meeting = meetings[which];
    const unsigned turn = meeting.turn;
    if (++meeting.arrived == count) meeting.arrived = 0, ++meeting.turn, ++progress;
    else while (meeting.turn == turn) yield();
}

template <class T> inline uint64_t bits(T x) { uint64_t y = 0; memcpy(&y, &x, sizeof x); return y; }
template <class T> inline T value(uint64_t x) { T y; memcpy(&y, &x, sizeof y); return y; }
template <class T> inline T from(T mine, int lane, bool inside) {
    const uint64_t* all = together(bits(mine));
    return inside ? value<T>(all[lane]) : mine;
}
inline int lane() { return current->index.x & 31; }

inline void run_block(int number, int blocks, int threads, unsigned seed, void (*kernel)()) {
    static std::vector<char> stacks;
    const size_t stack = 48 << 10;
    stacks.resize(threads * stack);
    fibers.assign(threads, Fiber{});
    warps.assign((threads + 31) / 32, Warp{});
    meetings.clear();
    block.x = number, grid.x = blocks, body = kernel;
    std::mt19937 random(seed);
    std::vector<int> order(warps.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (int idle = 0, left = threads; left;) {
        const long before = progress;
        for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
        for (int warp : order) {
            for (int thread = warp * 32; thread < warp * 32 + 32; ++thread) {
                Fiber& fiber = fibers[thread];
                if (fiber.done) continue;
                current = &fiber;
                if (_setjmp(scheduler)) {
                    left -= current->done;
                    continue;
                }
                if (fiber.started) _longjmp(fiber.at, 1);
                fiber.started = true, fiber.index.x = thread;
                getcontext(&fiber.start);
                fiber.start.uc_stack.ss_sp = stacks.data() + thread * stack;
                fiber.start.uc_stack.ss_size = stack, fiber.start.uc_link = nullptr;
                makecontext(&fiber.start, entry, 0);
                setcontext(&fiber.start);
            }
        }
        idle = progress == before ? idle + 1 : 0;
        if (idle > 100) fail("all threads wait for each other");
    }
}

}  // namespace emulator

#define threadIdx (emulator::current->index)
#define blockIdx emulator::block
#define gridDim emulator::grid

template <class T> inline T __shfl_sync(unsigned, T x, int lane) { return emulator::from(x, lane & 31, true); }
template <class T> inline T __shfl_xor_sync(unsigned, T x, int mask) { return emulator::from(x, emulator::lane() ^ mask, true); }
template <class T> inline T __shfl_up_sync(unsigned, T x, int by) { return emulator::from(x, emulator::lane() - by, emulator::lane() >= by); }
inline void __syncwarp() { emulator::together(0); }
inline void __syncthreads() { emulator::meet(0, emulator::fibers.size()); }
inline bool __any_sync(unsigned, bool x) {
    const uint64_t* all = emulator::together(x);
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= all[i] != 0;
    return any;
}
inline int __reduce_max_sync(unsigned, int x) {
    const uint64_t* all = emulator::together(emulator::bits(x));
    int most = x;
    for (int i = 0; i < 32; ++i) most = max(most, emulator::value<int>(all[i]));
    return most;
}
inline int __reduce_min_sync(unsigned, int x) {
    const uint64_t* all = emulator::together(emulator::bits(x));
    int least = x;
    for (int i = 0; i < 32; ++i) least = min(least, emulator::value<int>(all[i]));
    return least;
}
inline unsigned atomicOr(unsigned* at, unsigned x) { unsigned old = *at; *at |= x; return old; }
