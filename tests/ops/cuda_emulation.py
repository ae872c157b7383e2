"""The top-k kernels' own source on a CPU: CUDA threads as fibers of one process, for tests where no device is.

The source is compiled by the system's C++ compiler behind a header that says what CUDA's built-in names mean here.
Fibers take turns only where threads wait for each other, so this checks what a kernel computes, not its races. The few
functions that are PTX are replaced: a bulk copy becomes a copy that completes at once.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from torch import Tensor

from tetrad.ops.topk_indices.cuda import Shape, macros

_THREADS = r"""
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
using std::max;
using std::min;
#ifndef CLUSTER
#define CLUSTER 1
#endif
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __global__
#define __launch_bounds__(threads, blocks)
#define __cluster_dims__(x, y, z)

struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct Fiber { ucontext_t context; unsigned thread, block; bool done; };
struct Barrier { int need, count, turn; };
const int WHOLE = THREADS * CLUSTER;
static std::vector<Fiber> fibers;
static ucontext_t outside;
static int current;
static std::vector<Barrier> block_barriers, warp_barriers;
static Barrier cluster_barrier;
static std::vector<int> cluster_turns;
static std::vector<unsigned> exchanged;
static unsigned char* memories[16];
struct Thread { struct { operator unsigned() const { return fibers[current].thread; } } x; } static threadIdx;
struct Index { unsigned x; } static blockIdx;

static void give_way() {
    int from = current, next = current;
    do next = (next + 1) % WHOLE; while (fibers[next].done && next != from);
    if (next == from) return;
    current = next;
    swapcontext(&fibers[from].context, &fibers[next].context);
}
static void wait_until(const std::function<bool()>& ready) {
    for (long turns = 0; !ready(); ++turns) {
        if (turns > 1000000) { printf("a thread waits for ever\n"); exit(3); }
        give_way();
    }
}
static int arrive(Barrier& barrier) {
    int turn = barrier.turn;
    if (++barrier.count == barrier.need) { barrier.count = 0; ++barrier.turn; }
    return turn;
}
static void meet(Barrier& barrier) {
    int turn = arrive(barrier);
    wait_until([&] { return barrier.turn != turn; });
}
static int warp_of() { return (fibers[current].block * THREADS + fibers[current].thread) / 32; }
static void __syncthreads() { meet(block_barriers[fibers[current].block]); }
static void __syncwarp() { meet(warp_barriers[warp_of()]); }

static unsigned as_uint(float value) { unsigned u; memcpy(&u, &value, 4); return u; }
static float as_float(unsigned value) { float f; memcpy(&f, &value, 4); return f; }
#define __float_as_uint as_uint
#define __uint_as_float as_float
// every lane hands in a word and computes from all 32
template <class Compute> static unsigned together(unsigned word, Compute compute) {
    int warp = warp_of();
    exchanged[32 * warp + threadIdx.x % 32] = word;
    meet(warp_barriers[warp]);
    unsigned result = compute(&exchanged[32 * warp]);
    meet(warp_barriers[warp]);
    return result;
}
#define LANE (int)(threadIdx.x % 32)
static unsigned __shfl_sync(unsigned, unsigned v, int lane) {
    return together(v, [&](unsigned* w) { return w[lane]; });
}
static unsigned __shfl_up_sync(unsigned, unsigned v, int step) {
    return together(v, [&](unsigned* w) { return w[LANE >= step ? LANE - step : LANE]; });
}
static float __shfl_xor_sync(unsigned, float v, int step) {
    return as_float(together(as_uint(v), [&](unsigned* w) { return w[LANE ^ step]; }));
}
template <class Join> static unsigned joined(unsigned v, Join join) {
    return together(v, [&](unsigned* w) {
        unsigned all = w[0];
        for (int i = 1; i < 32; ++i) all = join(all, w[i]);
        return all;
    });
}
static unsigned __reduce_add_sync(unsigned, unsigned v) {
    return joined(v, [](unsigned a, unsigned b) { return a + b; });
}
static unsigned __reduce_min_sync(unsigned, unsigned v) {
    return joined(v, [](unsigned a, unsigned b) { return min(a, b); });
}
static unsigned __reduce_max_sync(unsigned, unsigned v) {
    return joined(v, [](unsigned a, unsigned b) { return max(a, b); });
}
static unsigned __ballot_sync(unsigned, bool v) { return __reduce_add_sync(0, (unsigned)v << LANE); }
static int __all_sync(unsigned, bool v) { return __reduce_min_sync(0, v); }
static int __popc(unsigned v) { return __builtin_popcount(v); }
static int __ffs(int v) { return __builtin_ffs(v); }
static int __clzll(long long v) { return v ? __builtin_clzll(v) : 64; }
static unsigned atomicAdd(unsigned* at, unsigned v) { unsigned before = *at; *at += v; return before; }
static unsigned atomicOr(unsigned* at, unsigned v) { unsigned before = *at; *at |= v; return before; }
static float __ldg(const float* at) { return *at; }
"""

_PTX = r"""
static void barrier_init(u64* barrier) { *barrier = 0; }
static void barrier_wait(u64* barrier, u32 parity) { wait_until([&] { return (*barrier & 1) != parity; }); }
static void copy_to_shared(float* to, const float* from, u32 bytes, u64* barrier) {
    if ((size_t)from % 16 || (size_t)to % 16 || bytes % 16) { printf("a bulk copy is not aligned\n"); exit(4); }
    memcpy(to, from, bytes);
    ++*barrier;
}
static u32 peer_address(const void* at, u32 peer) {
    return (u32)((const unsigned char*)at - memories[fibers[current].block]) + (peer << 24);
}
static unsigned char* peer_memory(u32 address) { return memories[address >> 24] + (address & 0xffffff); }
static void peer_store(u32 address, u32 v) { *(u32*)peer_memory(address) = v; }
static void peer_store(u32 address, u64 v) { *(u64*)peer_memory(address) = v; }
static u32 peer_add(u32 address, u32 v) { return atomicAdd((u32*)peer_memory(address), v); }
static u32 cluster_rank() { return fibers[current].block; }
static void cluster_arrive() { cluster_turns[current] = arrive(cluster_barrier); }
static void cluster_wait() { wait_until([&] { return cluster_barrier.turn != cluster_turns[current]; }); }
"""

_LAUNCH = r"""
static std::function<void()> kernel;
static void thread_begin() {
    kernel();
    fibers[current].done = true;
    if (std::all_of(fibers.begin(), fibers.end(), [](Fiber& fiber) { return fiber.done; })) setcontext(&outside);
    give_way();
}
extern "C" void launch(const float* logits, const int* ends, int* out, int k, int width, long long logits_stride,
                       long long out_stride, int rows) {
    kernel = [&] { topk_indices(logits, ends, out, k, width, logits_stride, out_stride); };
    const size_t stack_bytes = 1 << 16;
    static std::vector<char> stacks(stack_bytes * WHOLE);
    exchanged.resize(WHOLE);
    cluster_turns.resize(WHOLE);
    for (int block = 0; block < CLUSTER; ++block)
        if (!memories[block]) memories[block] = (unsigned char*)aligned_alloc(128, (sizeof(Shared) + 127) / 128 * 128);
    for (int row = 0; row < rows; ++row) {
        for (int block = 0; block < CLUSTER; ++block) memset(memories[block], 0xAB, sizeof(Shared));
        blockIdx.x = row * CLUSTER;
        block_barriers.assign(CLUSTER, Barrier{THREADS, 0, 0});
        warp_barriers.assign(WHOLE / 32, Barrier{32, 0, 0});
        cluster_barrier = Barrier{WHOLE, 0, 0};
        fibers.assign(WHOLE, Fiber());
        for (int i = 0; i < WHOLE; ++i) {
            Fiber& fiber = fibers[i];
            fiber.thread = i % THREADS;
            fiber.block = i / THREADS;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = &stacks[stack_bytes * i];
            fiber.context.uc_stack.ss_size = stack_bytes;
            makecontext(&fiber.context, thread_begin, 0);
        }
        current = 0;
        swapcontext(&outside, &fibers[0].context);
    }
}
"""


class EmulatedKernel:
    """The kernel of a shape, with the parameters of the back end's function."""

    def __init__(self, shape: Shape, folder: Path, most: int | None = None) -> None:
        """:param most: another value for the source's MOST, which small rows do not reach"""
        text = shape.source
        if shape.cluster > 1:
            text = _replaced(text, "cluster_rank", "// bit 4 * block + c", "")
        text = _replaced(text, "shared_address", "// a place for each thread", _PTX)
        text = text.replace('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', "")
        text = text.replace(
            "extern __shared__ __align__(128) unsigned char memory[];",
            "unsigned char* memory = memories[fibers[current].block];",
        )
        if most is not None:
            text = text.replace("#define MOST 8192", f"#define MOST {most}")
        assert "asm" not in text, "PTX that the emulation does not know"
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        source.write_text(_THREADS + text + _LAUNCH)
        defines = [f"-D{name}={value}" for name, value in macros(shape)]
        flags = ["-O1", "-w", "-std=c++17", "-fpermissive", "-shared", "-fPIC"]
        subprocess.run(["g++", *flags, *defines, "-o", str(library), str(source)], check=True)
        self._launch = ctypes.CDLL(str(library)).launch

    def topk_indices(self, logits: Tensor, visible_end: Tensor, k: int, out: Tensor) -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (logits, visible_end, out)]
        rows, width = logits.shape
        strides = ctypes.c_longlong(logits.stride(0)), ctypes.c_longlong(out.stride(0))
        self._launch(*pointers, k, width, *strides, rows)


def _replaced(text: str, first_function: str, end: str, by: str) -> str:
    """Without what lies from a function's definition to ``end``, and ``by`` instead."""
    begin = text.rindex("__device__", 0, text.index(f" {first_function}("))
    return text[:begin] + by + text[text.index(end, begin) :]
