// What CUDA C++ has no words for: the instructions of Hopper that sm90_topk.cu is made of.
// Macro: CLUSTER, thread blocks of a row.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// The same pointer, which the compiler cannot follow: it may move a load of what never changes, as these are, over any
// barrier, and so to where the kernel before still writes. Such loads may also find what another kernel's loads left in a
// multiprocessor's first-level cache: a kernel that writes scores and starts early has to fill multiprocessors, as the
// scorer does, so that nothing of the next one is there before it ends.
template <class T>
__device__ __forceinline__ T* known_from_here(T* pointer) {
    u64 address = (u64)pointer;
    asm volatile("mov.b64 %0, %0;" : "+l"(address) :: "memory");
    return reinterpret_cast<T*>(address);
}

__device__ __forceinline__ void barrier_init(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra through;\nbra again;\nthrough:\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// The barrier's phase is over when this many bytes have come.
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_to_shared(float* to, const float* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// Four adjacent scores, NaN where they are not wanted. Volatile: all loads of a row are to be under way before the first
// is waited for.
__device__ __forceinline__ float4 load_four(const float* from, bool wanted) {
    float4 four;
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n"
        "mov.f32 %0, 0f7FFFFFFF;\nmov.f32 %1, 0f7FFFFFFF;\nmov.f32 %2, 0f7FFFFFFF;\nmov.f32 %3, 0f7FFFFFFF;\n"
        "@wanted ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&f"(four.x), "=&f"(four.y), "=&f"(four.z), "=&f"(four.w) : "l"(from), "r"((u32)wanted));
    return four;
}

__device__ __forceinline__ float load_one(const float* from, bool wanted) {
    float one;
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %2, 0;\nmov.f32 %0, 0f7FFFFFFF;\n"
        "@wanted ld.global.nc.f32 %0, [%1];\n}" : "=&f"(one) : "l"(from), "r"((u32)wanted));
    return one;
}

// Adds in shared memory. The compiler's own atomicAdd would branch, or first add up what it thinks are many lanes.
__device__ __forceinline__ void count_if(u32* counter, bool wanted) {
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %1, 0;\n@wanted red.shared::cta.add.u32 [%0], 1;\n}" ::"r"(
                     shared_address(counter)), "r"((u32)wanted) : "memory");
}
__device__ __forceinline__ u32 add_by_one_lane(u32* counter, u32 by) {
    u32 before;
    asm volatile("atom.shared::cta.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(shared_address(counter)), "r"(by)
                 : "memory");
    return before;
}

// The thread blocks of a row: a team.
#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
__device__ __forceinline__ u32 team_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void team_barrier() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in the shared memory of a thread block of the team.
template <class T>
__device__ __forceinline__ T* peer(T* pointer, u32 rank) {
    u64 address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"((u64)pointer), "r"(rank));
    return reinterpret_cast<T*>(address);
}
#else
#define CLUSTER_DIMS
__device__ __forceinline__ u32 team_rank() { return 0; }
__device__ __forceinline__ void team_barrier() { __syncthreads(); }
template <class T>
__device__ __forceinline__ T* peer(T* pointer, u32) { return pointer; }
#endif
