// sm90_topk_device.cuh for the emulation: CUDA's threads as fibers of one process, clusters of thread blocks included.
// Fibers take turns only where threads wait for each other, warps in an order that the seed gives. A bulk copy spoils its
// destination when it starts and arrives when it is waited for. A launch in which all wait is reported.

#pragma once
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>
using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads, blocks)
#define CLUSTER_DIMS

struct float4 { float x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };

const int WHOLE = THREADS * CLUSTER;
struct Fiber { ucontext_t context; bool done; };
struct Meeting { int need, count, turn; };
struct Copy { float* to; const float* from; u32 bytes; u64* barrier; };
static std::vector<Fiber> fibers;
static std::vector<int> after;   // the fiber that has its turn after this one
static ucontext_t outside;
static int current;
static u32 first_block;
static std::vector<Meeting> block_meetings, warp_meetings;
static Meeting team_meeting;
static std::vector<u32> exchanged;
static std::vector<Copy> copies;
static unsigned char* memories[16];
struct { struct { operator u32() const { return current % THREADS; } } x; } static threadIdx;
struct { struct { operator u32() const { return first_block + current / THREADS; } } x; } static blockIdx;
struct { u32 x; } static gridDim;

[[noreturn]] static void fail(const char* what) {
    fprintf(stderr, "emulation: %s (thread %d of team %d)\n", what, current, (int)first_block / CLUSTER);
    abort();
}
static void give_way() {
    const int from = current;
    int next = after[current];
    while (fibers[next].done && next != from) next = after[next];
    if (next == from) return;
    current = next;
    swapcontext(&fibers[from].context, &fibers[next].context);
}
static void meet(Meeting& meeting) {
    const int turn = meeting.turn;
    if (++meeting.count == meeting.need) {
        meeting.count = 0, ++meeting.turn;
        return;
    }
    for (long turns = 0; meeting.turn == turn; ++turns) {
        if (turns > 100000) fail("a thread waits for ever");
        give_way();
    }
}
static Meeting& own_warp() { return warp_meetings[current / 32]; }
static void __syncthreads() { meet(block_meetings[current / THREADS]); }
static void __syncwarp() { meet(own_warp()); }
static void team_barrier() { meet(team_meeting); }
static u32 team_rank() { return current / THREADS; }
template <class T> static T* peer(T* pointer, u32 rank) {
    return (T*)((unsigned char*)pointer - memories[team_rank()] + memories[rank]);
}

static u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
// the device has one NaN
static float __fsub_rn(float a, float b) { float d = a - b; return d != d ? __uint_as_float(0x7fffffff) : d; }
static u32 __funnelshift_l(u32 low, u32 high, u32 by) { return high << by | low >> (32 - by); }
static int __popc(u32 x) { return __builtin_popcount(x); }
static int __ffs(int x) { return __builtin_ffs(x); }
static int __clz(int x) { return x ? __builtin_clz(x) : 32; }
// kernels run one after the other here
static void wait_for_kernels_before() {}
static void let_next_kernel_start() {}
template <class T> static T* known_from_here(T* pointer) { return pointer; }
static u32 atomicAdd(u32* at, u32 x) { u32 before = *at; *at += x; return before; }
static u32 atomicOr(u32* at, u32 x) { u32 before = *at; *at |= x; return before; }
static void count_if(u32* counter, bool wanted) { *counter += wanted; }
static u32 add_by_one_lane(u32* counter, u32 by) { return atomicAdd(counter, by); }
template <class T> static T __ldg(const T* at) { return *at; }

// every lane hands in a word and computes from all 32
template <class Compute> static u32 together(u32 word, Compute compute) {
    const int warp = current / 32;
    exchanged[current] = word;
    meet(own_warp());
    const u32 result = compute(&exchanged[32 * warp]);
    meet(own_warp());
    return result;
}
static u32 __shfl_sync(u32, u32 x, int lane) { return together(x, [&](u32* all) { return all[lane]; }); }
static u32 __shfl_up_sync(u32, u32 x, int by) {
    const int lane = current % 32;
    return together(x, [&](u32* all) { return all[lane >= by ? lane - by : lane]; });
}
template <class Join> static u32 joined(u32 x, Join join) {
    return together(x, [&](u32* all) {
        u32 sum = all[0];
        for (int i = 1; i < 32; ++i) sum = join(sum, all[i]);
        return sum;
    });
}
static u32 __reduce_add_sync(u32, u32 x) { return joined(x, [](u32 a, u32 b) { return a + b; }); }
static u32 __reduce_min_sync(u32, u32 x) { return joined(x, [](u32 a, u32 b) { return min(a, b); }); }
static u32 __reduce_max_sync(u32, u32 x) { return joined(x, [](u32 a, u32 b) { return max(a, b); }); }
static u32 __ballot_sync(u32, bool x) { return __reduce_add_sync(0, (u32)x << current % 32); }

static float4 load_four(const float* from, bool wanted) {
    const float nan = __uint_as_float(0x7fffffff);
    if (!wanted) return {nan, nan, nan, nan};
    if ((size_t)from % 16) fail("a load is not aligned");
    return {from[0], from[1], from[2], from[3]};
}
static float load_one(const float* from, bool wanted) { return wanted ? *from : __uint_as_float(0x7fffffff); }
static void barrier_init(u64* barrier) { *barrier = 0; }
static void barrier_expect(u64*, u32) {}
static void copy_to_shared(float* to, const float* from, u32 bytes, u64* barrier) {
    if ((size_t)from % 16 || (size_t)to % 16 || bytes % 16) fail("a bulk copy is not aligned");
    memset(to, 0xff, bytes);
    copies.push_back({to, from, bytes, barrier});
}
// the phases that are over are counted by the bits above the parity that the waiting threads ask for
static void barrier_wait(u64* barrier, u32 parity) {
    if ((*barrier & 1) != parity) return;
    for (auto& copy : copies)
        if (copy.barrier == barrier) memcpy(copy.to, copy.from, copy.bytes);
    copies.erase(std::remove_if(copies.begin(), copies.end(), [&](Copy& copy) { return copy.barrier == barrier; }),
                 copies.end());
    ++*barrier;
}

static std::function<void()> kernel;
static void thread_begin() {
    kernel();
    fibers[current].done = true;
    if (std::all_of(fibers.begin(), fibers.end(), [](Fiber& fiber) { return fiber.done; })) setcontext(&outside);
    give_way();
}
static void run_team(u32 shared_bytes, std::mt19937& random) {
    const size_t stack_bytes = 1 << 16;
    static std::vector<char> stacks(stack_bytes * WHOLE);
    exchanged.resize(WHOLE);
    copies.clear();
    for (int block = 0; block < CLUSTER; ++block) {
        if (!memories[block]) memories[block] = (unsigned char*)aligned_alloc(128, (shared_bytes + 127) / 128 * 128);
        memset(memories[block], 0xAB, shared_bytes);
    }
    block_meetings.assign(CLUSTER, Meeting{THREADS, 0, 0});
    warp_meetings.assign(WHOLE / 32, Meeting{32, 0, 0});
    team_meeting = Meeting{WHOLE, 0, 0};
    std::vector<int> warps(WHOLE / 32);
    for (size_t i = 0; i < warps.size(); ++i) warps[i] = i;
    std::shuffle(warps.begin(), warps.end(), random);
    after.resize(WHOLE);
    for (size_t i = 0; i < warps.size(); ++i)
        for (int lane = 0; lane < 32; ++lane)
            after[32 * warps[i] + lane] = lane < 31 ? 32 * warps[i] + lane + 1 : 32 * warps[(i + 1) % warps.size()];
    fibers.assign(WHOLE, Fiber());
    for (int i = 0; i < WHOLE; ++i) {
        ucontext_t& context = fibers[i].context;
        getcontext(&context);
        context.uc_stack.ss_sp = &stacks[stack_bytes * i];
        context.uc_stack.ss_size = stack_bytes;
        makecontext(&context, thread_begin, 0);
    }
    current = 32 * warps[0];
    swapcontext(&outside, &fibers[current].context);
}
