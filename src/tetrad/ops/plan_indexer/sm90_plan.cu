// The indexer's schedules in one launch: block 0 cuts rows into work items (the plan's buffer, as the reference makes
// it), block 1 cuts groups of rows into equal shares for a persistent grid (the plan's schedule). sm90.py says what they
// hold. Any number of rows: thread t has the rows t * per_thread and up. Macros: THREADS (a power of two from 64 to
// 1024), BLOCK, PAGE, GROUP_ROWS, TILE_COST, ROW_COST.

typedef unsigned int u32;
typedef long long i64;

constexpr int WARPS = THREADS / 32;
constexpr int KEPT = 4;

struct Larger {
    template <class T> __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};
struct Sum {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};

// The combination of what all threads before this one brought (``none`` for the first), and of all of them.
template <class T, class Combine>
__device__ __forceinline__ T scan(T value, T none, Combine combine, T* scratch, T& all) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    T inclusive = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance <<= 1) {
        T other = __shfl_up_sync(0xFFFFFFFFu, inclusive, distance);
        if (lane >= distance) inclusive = combine(other, inclusive);
    }
    if (lane == 31) scratch[warp] = inclusive;
    __syncthreads();
    T warps = lane < WARPS ? scratch[lane] : none;
#pragma unroll
    for (int distance = 1; distance < WARPS; distance <<= 1) {
        T other = __shfl_up_sync(0xFFFFFFFFu, warps, distance);
        if (lane >= distance) warps = combine(other, warps);
    }
    all = __shfl_sync(0xFFFFFFFFu, warps, WARPS - 1);
    T before_warp = __shfl_sync(0xFFFFFFFFu, warps, (warp + 31) & 31);
    T before = __shfl_up_sync(0xFFFFFFFFu, inclusive, 1);
    if (lane == 0) before = none;
    __syncthreads();
    return warp == 0 ? before : lane == 0 ? before_warp : combine(before_warp, before);
}

// The last of THREADS ascending numbers that is at most ``limit``; the first is.
template <class T>
__device__ __forceinline__ int last_at_most(const T* ascending, T limit) {
    int low = 0;
#pragma unroll
    for (int step = THREADS / 2; step; step >>= 1)
        if (ascending[low + step] <= limit) low += step;
    return low;
}

__device__ __forceinline__ int blocks_of(const int* request, const int* end, int row) {
    return request[row] < 0 ? 0 : (end[row] + BLOCK - 1) / BLOCK;
}

// ceil(blocks / unit) by a multiplication: off by less than half a step while blocks < 2^21
__device__ __forceinline__ int units_of(int blocks, int unit, float inverse) {
    return (int)(((float)(blocks + unit - 1) + 0.5f) * inverse);
}

__device__ void cut_rows(const int* request, const int* end, int rows, int per_thread, int slots, int most_blocks,
                         int4* buffer) {
    __shared__ i64 scratch[WARPS];
    __shared__ int starts[THREADS];
    const int first = min(rows, (int)threadIdx.x * per_thread), stop = min(rows, first + per_thread);
    // a few rows' blocks are kept, the others read again
    int kept[KEPT];
    i64 blocks = 0, filled = 0, all;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        kept[i] = first + i < stop ? blocks_of(request, end, first + i) : 0;
        blocks += kept[i], filled += kept[i] > 0;
    }
    for (int row = first + KEPT; row < stop; ++row) {
        int count = blocks_of(request, end, row);
        blocks += count, filled += count > 0;
    }
    auto units = [&](int unit, float inverse) {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) sum += units_of(kept[i], unit, inverse);
        for (int row = first + KEPT; row < stop; ++row) sum += units_of(blocks_of(request, end, row), unit, inverse);
        return sum;
    };
    scan<i64>(blocks << 24 | filled, 0, Sum(), scratch, all);
    blocks = all >> 24, filled = all & 0xFFFFFF;
    // blocks / s <= SUM ceil(blocks_r / s) < blocks / s + filled bounds the unit from both sides
    int low = slots ? max(1, (int)((blocks + slots - 1) / slots)) : 1, high = most_blocks;
    if (slots > filled) high = min(high, max(1, (int)((blocks + slots - filled - 1) / (slots - filled))));
    low = min(low, high);
    while (low < high) {
        int middle = (low + high) >> 1;
        scan<i64>(units(middle, 1.0f / middle), 0, Sum(), scratch, all);
        if (all <= slots) high = middle;
        else low = middle + 1;
    }
    const int unit = high;
    const float inverse = 1.0f / unit;
    starts[threadIdx.x] = (int)scan<i64>(units(unit, inverse), 0, Sum(), scratch, all);
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += THREADS) {
        int4 work = make_int4(-1, 0, 0, 0);
        if (slot < all) {
            int thread = last_at_most(starts, slot), split = slot - starts[thread];
            for (int row = thread * per_thread; row < rows; ++row) {
                int count = blocks_of(request, end, row), own = units_of(count, unit, inverse);
                if (split < own) {
                    work = make_int4(row, split * unit, min(unit, count - split * unit), end[row]);
                    break;
                }
                split -= own;
            }
        }
        buffer[slot] = work;
    }
}

// A group is up to GROUP_ROWS adjacent rows of one request; one that sees nothing is left out.
struct Group {
    int first, rows, request, end;
    __device__ int tiles() const { return (end + PAGE - 1) / PAGE; }
    __device__ i64 tile_cost() const { return TILE_COST + ROW_COST * rows; }
    __device__ i64 cost() const { return tiles() * tile_cost(); }
};

// Walks the groups that begin in some rows; ``run`` is where the request of the row before them began.
struct Groups {
    const int* request;
    const int* end;
    int rows, row, stop, run;

    __device__ bool next(Group& group) {
        for (; row < stop; ++row) {
            int own = request[row];
            if (row == 0 || request[row - 1] != own) run = row;
            if (own < 0 || (row - run) % GROUP_ROWS) continue;
            group = Group{row, 0, own, 0};
            for (; group.rows < GROUP_ROWS && row + group.rows < rows && request[row + group.rows] == own; ++group.rows)
                group.end = max(group.end, end[row + group.rows]);
            if (group.end <= 0) continue;
            ++row;
            return true;
        }
        return false;
    }
};

__device__ void cut_groups(const int* request, const int* end, int rows, int per_thread, int shares, int4* schedule) {
    __shared__ int scratch_int[WARPS], runs[THREADS], groups_before[THREADS];
    __shared__ i64 scratch[WARPS], cost_before[THREADS];
    const int first = min(rows, (int)threadIdx.x * per_thread), stop = min(rows, first + per_thread);
    int last_run = -1, all_int;
    for (int row = first; row < stop; ++row)
        if (row == 0 || request[row - 1] != request[row]) last_run = row;
    const int run = scan(last_run, -1, Larger(), scratch_int, all_int);
    Group group;
    int count = 0;
    i64 cost = 0, total;
    for (Groups walk{request, end, rows, first, stop, run}; walk.next(group); ++count) cost += group.cost();
    const int number = scan(count, 0, Sum(), scratch_int, all_int), groups = all_int;
    const i64 before = scan<i64>(cost, 0, Sum(), scratch, total);
    runs[threadIdx.x] = run, groups_before[threadIdx.x] = number, cost_before[threadIdx.x] = before;
    int4* list = schedule + 2 * shares;
    int i = number;
    for (Groups walk{request, end, rows, first, stop, run}; walk.next(group); ++i)
        list[i] = make_int4(group.first, group.rows, group.request, group.end);
    __syncthreads();
    for (int share = threadIdx.x; share < shares; share += THREADS) {
        int4 begin = make_int4(0, 0, 0, 0);
        group = Group{0, 0, 0, 0};
        if (groups) {
            const i64 mark = total * share / shares;
            // of the threads that start at or before the mark the last one has the group that the mark lies in
            const int thread = last_at_most(cost_before, mark);
            i64 at = cost_before[thread];
            int index = groups_before[thread];
            const int from = min(rows, thread * per_thread), to = min(rows, from + per_thread);
            for (Groups walk{request, end, rows, from, to, runs[thread]}; walk.next(group); ++index) {
                if (mark < at + group.cost()) break;
                at += group.cost();
            }
            begin = make_int4(index, (int)((mark - at + group.tile_cost() - 1) / group.tile_cost()), 0, 0);
        }
        schedule[2 * share + 1] = make_int4(group.first, group.rows, group.request, group.end);
        int2* halves = (int2*)schedule;
        halves[4 * share] = make_int2(begin.x, begin.y);
        // a share ends where the next one begins
        if (share) halves[4 * (share - 1) + 1] = make_int2(begin.x, begin.y);
        if (share == shares - 1) halves[4 * share + 1] = make_int2(groups, 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
plan_indexer(const int* request, const int* end, int rows, int slots, int most_blocks, int4* buffer, int shares,
             int4* schedule) {
    const int per_thread = (rows + THREADS - 1) / THREADS;
    let_next_kernel_start();
    wait_for_kernels_before();
    if (blockIdx.x == 0)
        cut_rows(request, end, rows, per_thread, slots, most_blocks, buffer);
    else
        cut_groups(request, end, rows, per_thread, shares, schedule);
}
