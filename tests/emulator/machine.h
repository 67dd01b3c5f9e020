// The emulated GPU: programs, warps, CTAs, and what happens later. Instructions see the machine through this header.
#pragma once
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <class... A> [[noreturn]] void fail(const A&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(text.str());
}

constexpr int LANES = 32, ROW = 128;         // bytes of a register's row: 32 lanes of 32 bits; a 64-bit one has two
constexpr u32 SHARED_BASE = 1024;            // address of the first byte of dynamic shared memory in a CTA's window
constexpr u64 GENERIC_SHARED = 0x5Full << 56;  // a generic address of shared memory: this and the 32-bit address
constexpr u64 LOCAL = 0x4Cull << 56;         // an address in a thread's own memory: this and the byte
constexpr int GLOBALS = 1000;                // "parameters" from here on are the module's arrays
constexpr int GRANULE = 16;                  // bytes of shared memory whose last writer is known together

struct Warp;
struct Ins;
enum Step { DONE, RETRY };                   // RETRY: the lanes wait, and execute the instruction again later
typedef Step (*Handler)(Warp&, const Ins&, u32 mask);

struct Operand {
    u32 offset;                              // bytes, in the warp's registers or among the program's constants
    bool constant;
    u8 bytes;                                // width of the register; of a predicate 0, of a constant 8
};

// One instruction. Operands are flat, one after another; group[k] says how many the k-th written operand became:
// "{a, b}" two, "[base+8, {x, y}]" three. `offset[k]` is what the k-th address adds to its base.
struct Ins {
    Handler run;
    std::string name;
    int guard = -1;                          // offset of the predicate's row
    bool negated = false, together = false;  // together: only all lanes of a warp (or of the mask) execute it
    bool moves = false;                      // a plain copy: may touch an accumulator in flight, which then lands
    bool is_wgmma = false, masked = false;   // masked: the last operand says which lanes take part
    int dests = 0, line = 0, target = -1;
    std::vector<Operand> op;
    std::vector<int> group;
    std::vector<i64> offset;
};

struct Program {
    std::string name;
    std::vector<u32> param_sizes;
    std::vector<Ins> code;
    std::vector<std::string> lines;          // of the PTX text, for messages
    std::vector<u8> constants;               // of each: 32 lanes of 64 bits, of 32, of 16, then as a predicate
    std::vector<std::pair<int, int>> param_constants;                  // (constant, parameter whose address it is)
    std::vector<std::pair<std::string, u32>> special;
    u32 register_bytes = 0, static_shared = 0, local_bytes = 0;
    bool has_wgmma = false;
    void set_constant(int index, u64 value);
};

struct Mbarrier {
    i32 count = 0, pending = 0;
    i64 tx = 0;
    u64 phase = 0;
};

struct NamedBarrier {
    u32 expected = 0, arrived = 0;
    u64 generation = 0;
};

struct Cluster;
struct Machine;

struct Cta {
    Machine* machine;
    Cluster* cluster;
    u32 rank, index[3];
    std::vector<u8> shared;                  // addresses from 0; the first SHARED_BASE bytes are nobody's
    // By granule: 1 + the warp whose write no proxy fence of its own has followed; and 1 + one that has written the
    // same once more, whose fence does as well.
    std::vector<u8> writer, witness;
    // By granule: the number of the cp.async that wrote it last, 0 if a proxy fence of its warp has followed; and that
    // warp, plus 1.
    std::vector<u64> copied;
    std::vector<u8> copier;
    u64 copies = 0;                          // cp.async that have landed
    std::map<u32, Mbarrier> mbarriers;
    NamedBarrier named[16];
    std::vector<std::unique_ptr<Warp>> warps;
    u32 live_threads = 0;
};

struct Cluster {
    std::vector<std::unique_ptr<Cta>> ctas;
    u32 live_threads = 0, arrived = 0;
    u64 generation = 0;
};

// What a thread has started and a wait_group of its own waits for: a cp.async, or a bulk copy out of shared memory.
struct Copy {
    int lane;
    u64 group;                               // the lane's group that it belongs to
    bool read_done = false;
    std::function<void()> read, write;
    u64 number = 0;                          // of a cp.async: Warp::async_count before it
};

struct WgmmaCall {
    const Ins* ins;
    u64 a, b, group;
    bool accumulate;
    std::vector<u32> metadata;               // of the lanes, where A is sparse
};

struct Warp {
    Cta* cta;
    int number;
    std::vector<u8> registers, local;        // local: each lane's, one after the other
    u32 pc[LANES], live = ~0u, blocked = 0;
    bool at_barrier = false;                 // has arrived at the named barrier that it executes
    u64 barrier_generation = 0;
    u64 cluster_generation[LANES] = {};      // of the cluster barrier, when the lane arrived
    u32 cluster_arrived = 0;
    u64 async_group[LANES] = {}, bulk_group[LANES] = {};
    std::deque<Copy> async_copies, bulk_copies;
    u64 async_count = 0, fenced = 0;         // cp.async begun; Cta::copies at the last proxy fence
    std::deque<WgmmaCall> wgmmas;
    u64 wgmma_group = 0;
    // By register row: 1 + the group of a WGMMA not yet waited for, of which it is an accumulator, or part of A; and
    // how many wgmma.fence there were when another instruction last wrote it.
    std::vector<u64> accumulates, feeds, written;
    bool unwaited = false;                   // whether there is any such WGMMA
    u64 fences = 1;
    u32 current = 0;                         // the instruction executed, for messages
};

struct Range {
    u64 low, high;
};

struct Machine {
    const Program* program = nullptr;
    std::vector<Range> allocations;
    std::vector<std::function<void()>> later;  // TMA loads and the like: done at any time, signalled by an mbarrier
    std::deque<std::unique_ptr<Cluster>> resident;
    u64 random_state = 1, steps = 0, last_event = 0, events = 0, mmas = 0;  // mmas: mma.sync, once a warp
    u32 grid[3], block[3], cluster_shape[3], dynamic_shared = 0;
    std::vector<std::vector<u8>> params;
    bool check_proxies = true;
    u64 random();
    bool chance(int percent) { return random() % 100 < u64(percent); }
    void event() { last_event = steps, events++; }  // something that others may wait for
    void launch();
    void start_cluster(u64 number);
    void run_warp(Warp& w, int budget);
    void land_something(Warp& w);
    void check_global(u64 address, u64 bytes, const char* what) const;
};

// -- what instructions use -----------------------------------------------------------------------------------

std::string where(const Warp& w);
u8* shared_at(Warp& w, u64 address, u32 bytes, u32 align, Cta** owner = nullptr);
u8* memory_at(Warp& w, char space, int lane, u64 address, u32 bytes, bool writes);
void async_reads(Warp& w, Cta& cta, u32 address, u32 bytes);          // checks that a proxy fence followed the stores
void arrive(Warp& w, Cta& cta, u32 address, i32 count, i64 expect_tx);
void complete_tx(Cta& cta, u32 address, i64 bytes);
void land_one_wgmma(Warp& w);                                         // computes the oldest one in flight
void wait_copies(Warp& w, std::deque<Copy>& copies, const u64* group, u32 mask, u64 left, bool only_reads);
void finish_copy(std::deque<Copy>& copies, size_t index);
void finish_copies_before(Warp& w, int lane, u64 number);             // a lane's cp.async
inline u64 shared_address(const Cta& cta, u32 offset) { return (u64(cta.rank + 1) << 24) | offset; }

template <class T> constexpr u32 constant_part() { return sizeof(T) == 8 ? 0 : sizeof(T) == 4 ? 256 : 384; }

template <class T> inline const T* src(const Warp& w, const Ins& i, int k) {
    const Operand& o = i.op[k];
    if (o.constant) return (const T*)(w.cta->machine->program->constants.data() + o.offset + constant_part<T>());
    return (const T*)(w.registers.data() + o.offset);
}

template <class T> inline T* dst(Warp& w, const Ins& i, int k) { return (T*)(w.registers.data() + i.op[k].offset); }

inline u32 pred(const Warp& w, const Ins& i, int k) {
    const Operand& o = i.op[k];
    if (o.constant) return *(const u32*)(w.cta->machine->program->constants.data() + o.offset + 448);
    return *(const u32*)(w.registers.data() + o.offset);
}

inline void set_pred(Warp& w, const Ins& i, int k, u32 mask, u32 bits) {
    u32* at = dst<u32>(w, i, k);
    *at = (*at & ~mask) | (bits & mask);
}

inline u64 get_int(const Warp& w, const Ins& i, int k, int lane) {  // of a register of any width
    switch (i.op[k].bytes) {
        case 2: return src<u16>(w, i, k)[lane];
        case 4: return src<u32>(w, i, k)[lane];
        default: return src<u64>(w, i, k)[lane];
    }
}

inline void set_int(Warp& w, const Ins& i, int k, int lane, u64 value) {
    switch (i.op[k].bytes) {
        case 2: dst<u16>(w, i, k)[lane] = u16(value); break;
        case 4: dst<u32>(w, i, k)[lane] = u32(value); break;
        default: dst<u64>(w, i, k)[lane] = value;
    }
}

// The statement after it is done for each lane of the mask; an `else` after that belongs to whatever came before.
#define EACH_LANE(l, mask) for (int l = 0; l < LANES; l++) if (!((mask) >> l & 1)) {} else

struct Entry {
    Handler run;
    bool together;
};
typedef std::unordered_map<std::string, Entry> Table;
void add_arithmetic(Table&);
void add_conversions(Table&);
void add_memory(Table&);
void add_synchronisation(Table&);
void add_tensor_cores(Table&);
void add_bulk_copies(Table&);
