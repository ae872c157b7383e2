// What CUDA C++ has no words for: the instructions of Hopper that sm90_scorer.cu is made of. Macro: FP8 (0 or 1).

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
    u32 d;
    asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra through;\nbra again;\nthrough:\n}" ::"r"(address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_to_shared(u8* to, const u8* from, u32 bytes, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address(to)), "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void barriers_initialised() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What this thread has stored in shared memory will be read by the tensor cores.
__device__ __forceinline__ void to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of the first COUNT threads of the block.
template <int COUNT>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}

template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Keep a value in its register rather than work it out anew.
__device__ __forceinline__ void keep(u32& x) { asm volatile("" : "+r"(x)); }

// The same number in every lane, in a way that the compiler knows.
__device__ __forceinline__ int uniform(int x) { return __reduce_max_sync(0xFFFFFFFFu, x); }

#define ROW8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                "+f"(d[i + 6]), "+f"(d[i + 7])
#if FP8
#define TYPES "e4m3.e4m3"
#else
#define TYPES "e5m2.e5m2"
#endif

// The descriptor of a K-major operand in 128-byte swizzle, 1024 bytes from eight heads to the next: its upper half. The
// lower one has the address, and alone moves on from one step to the next.
constexpr u32 DESCRIPTOR_HIGH = 1u << 30 | 1024 >> 4;

__device__ __forceinline__ void multiply_step(float (&d)[16], const u32* a, u32 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %21, 0;\nmov.b64 b, {%20, %22};\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32." TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, b, add, 1, 1;\n}"
        : ROW8(0), ROW8(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "r"(DESCRIPTOR_HIGH));
}

__device__ __forceinline__ void multiply_step(float (&d)[32], const u32* a, u32 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %37, 0;\nmov.b64 b, {%36, %38};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32." TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, b, add, 1, 1;\n}"
        : ROW8(0), ROW8(8), ROW8(16), ROW8(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "r"(DESCRIPTOR_HIGH));
}

__device__ __forceinline__ void multiply_step(float (&d)[64], const u32* a, u32 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %69, 0;\nmov.b64 b, {%68, %70};\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32." TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, b, add, 1, 1;\n}"
        : ROW8(0), ROW8(8), ROW8(16), ROW8(24), ROW8(32), ROW8(40), ROW8(48), ROW8(56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "r"(DESCRIPTOR_HIGH));
}

// Start the product of a page (64 keys x 128, in registers) and one or two query rows (heads x 128, in shared memory).
template <int N>
__device__ __forceinline__ void multiply(float (&d)[N], const u32 (&a)[16], u32 query) {
    const u32 b = query >> 4 | 1u << 16;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply_step(d, a + 4 * step, b + 2 * step, step);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until then the tensor cores read ``a``: the compiler must not put anything else into its registers.
template <int N>
__device__ __forceinline__ void wait_for_product(float (&d)[N], const u32 (&a)[16]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" ::"r"(a[i]));
}
