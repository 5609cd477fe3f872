// cuda/include/barrier.cuh, hopper.cuh and the bulk copies of async_copy.cuh on the CPU. Included by
// cuda_on_cpu.h.
//
// What goes on by itself there happens here as late as it may: a copy when a thread waits for its
// phase, products when a thread waits for their group. From when a copy is asked for until then, the
// place it goes to holds NaN: what is read too early, or is overwritten too early, spoils the result.
// What there is undefined or never ends stops the process with a message.
#pragma once

struct TensorMap;

namespace on_cpu {

constexpr int MAP_COLUMNS = 64, ROW_BYTES = 2 * MAP_COLUMNS, CHUNK = 16;
constexpr int SWIZZLED = 1024;             // bytes after which the places of chunks repeat
constexpr unsigned SHARED_START = 1040;    // address of dynamic shared memory, no multiple of that
constexpr int GROUP_THREADS = 4 * WARP_SIZE;

// A TensorMap, as cuda_on_cpu.py writes it.
struct Map {
    const unsigned char* array;
    unsigned long long rows, columns, block_rows;
};

struct BlockCopy {
    int rank;          // of the block that gets it
    unsigned address;  // in shared memory
    Map map;
    int row, column;
};

struct PhaseBarrier {
    int arrivals;     // that a phase takes
    int missing;      // of the phase under way
    long long bytes;  // announced, less those asked for
    unsigned parity;
    bool published;
    std::vector<std::function<void()>> copies;
};

struct Product {
    float* sums;
    int count;
    unsigned long long a, b;
};

struct Products {
    bool open;
    std::vector<std::vector<Product>> groups;  // the last one open
};

static std::map<const void*, PhaseBarrier> barriers;
static std::vector<Products> products;   // of each thread
static std::vector<Barrier> warpgroups;  // of a block, one after the other

inline void require(bool right, const char* wrong) {
    if (right) return;
    std::fprintf(stderr, "block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, wrong);
    std::abort();
}

inline int thread() { return current % block_threads; }
inline int groups_a_block() { return (block_threads + GROUP_THREADS - 1) / GROUP_THREADS; }
inline Barrier& warpgroup() {
    return warpgroups[rank() * groups_a_block() + thread() / GROUP_THREADS];
}

inline void begin_cluster() {
    barriers.clear();
    products.assign(cluster.members, {false, {{}}});
    warpgroups.assign(MAX_CLUSTER * groups_a_block(), Barrier());
    for (Barrier& group : warpgroups) group.members = GROUP_THREADS;
}

inline void end_cluster() {
    for (const auto& [at, barrier] : barriers) {
        require(barrier.copies.empty(), "a copy that nobody has waited for");
    }
    for (const Products& own : products) {
        require(own.groups.size() == 1 && own.groups[0].empty(), "products left under way");
    }
}

inline unsigned char* at_address(unsigned address, int rank) {
    require(address >= SHARED_START && address - SHARED_START < SHARED, "no shared memory there");
    return dynamic_shared[rank] + (address - SHARED_START);
}

// As the copy engine and the tensor cores see it, of 128-byte rows.
inline unsigned swizzled(unsigned address) {
    return address ^ address / ROW_BYTES % (SWIZZLED / ROW_BYTES) * CHUNK;
}

inline unsigned address_of(const void* at) {
    const auto offset = static_cast<const unsigned char*>(at) - dynamic_shared[rank()];
    require(offset >= 0 && offset < SHARED, "not in dynamic shared memory");
    return SHARED_START + offset;
}

inline bool is_dynamic(const void* at) {
    const unsigned char* own = dynamic_shared[rank()];
    return at >= own && at < own + SHARED;
}

// What lies at the same place in a block of the cluster.
inline const void* in_block(const void* own, int rank) {
    if (is_dynamic(own)) return at_address(address_of(own), rank);
    require(rank == on_cpu::rank(), "not in dynamic shared memory");
    return own;
}

inline PhaseBarrier& barrier_of(const void* own, int rank) {
    require(blocks[rank].ended < block_threads, "the block of a barrier has ended");
    const auto found = barriers.find(in_block(own, rank));
    require(found != barriers.end() && found->second.published, "no barrier there, or not yet");
    return found->second;
}

inline void begin_phase(PhaseBarrier& barrier) {
    barrier.parity ^= 1;
    barrier.missing = barrier.arrivals;
    barrier.copies.clear();
    progress = true;
}

inline void arrive(PhaseBarrier& barrier, int bytes) {
    require(barrier.missing > 0, "one arrival too many at a barrier");
    --barrier.missing;
    barrier.bytes += bytes;
    require(barrier.missing > 0 || barrier.bytes >= 0, "more bytes than announced");
    progress = true;
    if (barrier.missing == 0 && barrier.bytes == 0 && barrier.copies.empty()) begin_phase(barrier);
}

// A copy that is made later by `make`.
inline void ask_for(void* to, unsigned bytes, PhaseBarrier& barrier, std::function<void()> make) {
    std::memset(to, 0xff, bytes);
    barrier.bytes -= bytes;
    require(barrier.missing > 0 || barrier.bytes >= 0, "more bytes than announced");
    barrier.copies.push_back(make);
    progress = true;
}

inline void make(const BlockCopy& copy) {
    const Map& map = copy.map;
    for (int r = 0; r < static_cast<int>(map.block_rows); ++r) {
        for (int c = 0; c < MAP_COLUMNS; ++c) {
            const long long row = copy.row + r, column = copy.column + c;
            const bool within = row >= 0 && row < static_cast<long long>(map.rows) && column >= 0 &&
                                column < static_cast<long long>(map.columns);
            unsigned char* to =
                at_address(swizzled(copy.address + r * ROW_BYTES + 2 * c), copy.rank);
            if (within) {
                std::memcpy(to, map.array + 2 * (row * map.columns + column), 2);
            } else {
                std::memset(to, 0, 2);
            }
        }
    }
}

// 16 of k of a row of an operand.
inline void read_operand(unsigned long long operand, int row, float (&to)[16]) {
    const unsigned start = (operand & 0x3fff) * 16, eight_rows = (operand >> 32 & 0x3fff) * 16;
    require(operand >> 62 == 1 && (operand >> 49 & 7) == 0, "an operand of another layout");
    for (int half = 0; half < 2; ++half) {
        unsigned short bits[8];
        const unsigned address = start + row / 8 * eight_rows + row % 8 * ROW_BYTES + half * CHUNK;
        std::memcpy(bits, at_address(swizzled(address), rank()), CHUNK);
        for (int k = 0; k < 8; ++k) to[8 * half + k] = __bfloat162float({bits[k]});
    }
}

// In ascending order of k, as mma_bf16.
inline void make(const Product& product) {
    const int first = thread() / WARP_SIZE % 4 * 16 + lane() / 4;
    float a[2][16], b[16];
    for (int half = 0; half < 2; ++half) read_operand(product.a, first + 8 * half, a[half]);
    for (int i = 0; i < product.count; i += i % 2 ? 3 : 1) {
        read_operand(product.b, i / 4 * 8 + lane() % 4 * 2 + i % 2, b);
        for (int half = 0; half < 2; ++half) {
            float sum = product.sums[i + 2 * half];
            for (int k = 0; k < 16; ++k) sum += a[half][k] * b[k];
            product.sums[i + 2 * half] = sum;
        }
    }
}

}  // namespace on_cpu

inline unsigned shared_address(const void* at) { return on_cpu::address_of(at); }
inline int cluster_rank() { return on_cpu::rank(); }
inline void sync_cluster() { on_cpu::wait(on_cpu::cluster); }
inline void prefetch_map(const TensorMap&) {}

// Nothing but that a whole warpgroup comes.
template <int REGISTERS>
void give_registers() {
    on_cpu::wait(on_cpu::warpgroup());
}
template <int REGISTERS>
void take_registers() {
    give_registers<REGISTERS>();
}

inline void init_barrier(unsigned long long* barrier, int arrivals) {
    on_cpu::require(on_cpu::barriers.count(barrier) == 0, "a barrier is there");
    on_cpu::barriers[barrier] = {arrivals, arrivals, 0, 0, false, {}};
}

inline void publish_barriers() {
    for (auto& [at, barrier] : on_cpu::barriers) {
        barrier.published |= on_cpu::is_dynamic(at) || on_cpu::cluster.members == on_cpu::block_threads;
    }
}

inline void arrive_and_expect(unsigned long long* barrier, int bytes) {
    on_cpu::arrive(on_cpu::barrier_of(barrier, on_cpu::rank()), bytes);
}

inline void arrive_at(unsigned long long* barrier, int rank) {
    on_cpu::arrive(on_cpu::barrier_of(barrier, rank), 0);
}

inline void wait_for(unsigned long long* barrier, unsigned parity) {
    on_cpu::PhaseBarrier& own = on_cpu::barrier_of(barrier, on_cpu::rank());
    while (own.parity == parity) {
        if (own.missing == 0 && own.bytes == 0) {
            for (const auto& make : own.copies) make();
            on_cpu::begin_phase(own);
        } else {
            on_cpu::yield();
        }
    }
    on_cpu::progress = true;
}

namespace on_cpu {
inline void copy_to(int rank, void* to, const TensorMap& map, int row, int column,
                    const void* barrier) {
    const Map& read = reinterpret_cast<const Map&>(map);
    const BlockCopy copy = {rank, address_of(to), read, row, column};
    const unsigned bytes = read.block_rows * ROW_BYTES;
    unsigned char* at = at_address(copy.address, rank);
    require(copy.address % SWIZZLED == 0, "a block of a map is not aligned");
    require(at + bytes <= dynamic_shared[rank] + SHARED, "no shared memory there");
    ask_for(at, bytes, barrier_of(barrier, rank), [copy] { make(copy); });
}
}  // namespace on_cpu

inline void copy_bulk(void* to, const void* from, int bytes, unsigned long long* barrier) {
    const bool aligned = reinterpret_cast<size_t>(to) % 16 == 0 &&
                         reinterpret_cast<size_t>(from) % 16 == 0 && bytes % 16 == 0;
    on_cpu::require(aligned, "a bulk copy is not aligned");
    on_cpu::ask_for(to, bytes, on_cpu::barrier_of(barrier, on_cpu::rank()),
                    [=] { std::memcpy(to, from, bytes); });
}
inline void order_before_bulk_copies() {}

inline void copy_block(void* to, const TensorMap& map, int row, int column,
                       unsigned long long* barrier) {
    on_cpu::copy_to(on_cpu::rank(), to, map, row, column, barrier);
}

inline void copy_block_to_all(void* to, const TensorMap& map, int row, int column,
                              unsigned long long* barrier, int blocks) {
    for (int rank = 0; rank < blocks; ++rank) {
        on_cpu::copy_to(rank, to, map, row, column, barrier);
    }
}

template <int COUNT>
void hold(float (&)[COUNT]) {}

inline void begin_products() { on_cpu::products[on_cpu::current].open = true; }

inline void end_products() {
    on_cpu::products[on_cpu::current].open = false;
    on_cpu::products[on_cpu::current].groups.emplace_back();
}

template <int COUNT>
void multiply(float (&c)[COUNT], unsigned long long a, unsigned long long b) {
    static_assert(COUNT % 4 == 0 && COUNT <= 128);
    on_cpu::Products& own = on_cpu::products[on_cpu::current];
    on_cpu::require(own.open, "a product before begin_products");
    own.groups.back().push_back({c, COUNT, a, b});
}

template <int PENDING>
void wait_products() {
    auto& groups = on_cpu::products[on_cpu::current].groups;
    while (groups.size() > PENDING + 1) {
        for (const on_cpu::Product& product : groups.front()) on_cpu::make(product);
        groups.erase(groups.begin());
    }
    __syncwarp();
}
