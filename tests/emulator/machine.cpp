// The scheduler: which warp goes on, which copy lands, and when nothing can any more.
#include "machine.h"

#include <algorithm>

u64 Machine::random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545F4914F6CDD1Dull >> 16;
}

std::string where(const Warp& w) {
    const Program& p = *w.cta->machine->program;
    const Ins& i = p.code[w.current];
    std::ostringstream out;
    out << "CTA (" << w.cta->index[0] << ", " << w.cta->index[1] << ", " << w.cta->index[2] << "), warp " << w.number
        << ", PTX line " << i.line << ": " << p.lines[i.line - 1];
    return out.str();
}

void async_reads(Warp& w, Cta& cta, u32 address, u32 bytes) {
    if (!w.cta->machine->check_proxies) return;
    for (u32 g = address / GRANULE; g <= (address + bytes - 1) / GRANULE; g++)
        if (cta.writer[g])
            fail("the asynchronous proxy reads shared memory at 0x", std::hex, g * GRANULE, std::dec, ", which warp ",
                 cta.writer[g] - 1, " wrote without a fence.proxy.async after it");
        else if (cta.copied[g] > w.fenced)
            fail("the asynchronous proxy reads shared memory at 0x", std::hex, g * GRANULE, std::dec, ", which a "
                 "cp.async wrote, without a fence.proxy.async of the warp that reads it or that copied it");
}

// -- copies that a thread waits for ------------------------------------------------------------------------------

static void finish(Copy& c) {
    if (!c.read_done && c.read) c.read();
    c.read_done = true;
    if (c.write) c.write();
    c.write = nullptr;
}

void wait_copies(Warp& w, std::deque<Copy>& copies, const u64* group, u32 mask, u64 left, bool only_reads) {
    for (Copy& c : copies) {
        if (!(mask >> c.lane & 1) || c.group + left >= group[c.lane]) continue;
        if (only_reads && !c.read_done) {
            c.read();
            c.read_done = true;
        } else if (!only_reads) finish(c);
    }
    auto done = [](const Copy& c) { return !c.write; };
    copies.erase(std::remove_if(copies.begin(), copies.end(), done), copies.end());
    w.cta->machine->event();
}

void finish_copies_before(Warp& w, int lane, u64 number) {
    for (Copy& c : w.async_copies) if (c.lane == lane && c.number < number) finish(c);
    auto done = [](const Copy& c) { return !c.write; };
    w.async_copies.erase(std::remove_if(w.async_copies.begin(), w.async_copies.end(), done), w.async_copies.end());
}

// One of what may happen at any time: of all copies into shared memory, or of what the warp has started.
void Machine::land_something(Warp& w) {
    for (size_t n = later.empty() || chance(50) ? 0 : 1 + random() % (1 + later.size() / 16); n > 0; n--) {
        std::swap(later[random() % later.size()], later.back());
        auto act = std::move(later.back());
        later.pop_back();
        act();
    }
    if (!w.wgmmas.empty() && chance(50)) land_one_wgmma(w);
    for (auto* copies : {&w.async_copies, &w.bulk_copies}) {
        if (copies->empty() || chance(50)) continue;
        size_t k = random() % copies->size();
        finish((*copies)[k]);
        copies->erase(copies->begin() + k);
    }
}

// -- a warp ------------------------------------------------------------------------------------------------------

// Registers of a WGMMA before the wgmma.wait_group for it: an accumulator may not be used at all, a register of A not be
// written. A plain copy of an accumulator is what the compiler's allocation of registers takes away; the copy is then
// as good as the accumulator.
static void check_wgmma_registers(Warp& w, const Ins& i) {
    if (i.moves && !i.op[1].constant && w.accumulates[i.op[1].offset / ROW]) {
        while (!w.wgmmas.empty()) land_one_wgmma(w);
        w.accumulates[i.op[0].offset / ROW] = w.accumulates[i.op[1].offset / ROW];
        return;
    }
    if (i.moves && !i.op[0].constant && w.accumulates[i.op[0].offset / ROW]) {
        while (!w.wgmmas.empty()) land_one_wgmma(w);
        w.accumulates[i.op[0].offset / ROW] = 0;
    }
    for (size_t k = 0; k < i.op.size(); k++) {
        if (i.op[k].constant) continue;
        if (w.accumulates[i.op[k].offset / ROW])
            fail("operand ", k, " is an accumulator of a WGMMA that no wgmma.wait_group has waited for");
        if (int(k) < i.dests && w.feeds[i.op[k].offset / ROW])
            fail("operand ", k, " is written, and a WGMMA that no wgmma.wait_group has waited for may read it");
    }
}

void Machine::run_warp(Warp& w, int budget) {
    w.blocked = 0;
    while (budget-- > 0 && w.live) {
        u32 ready = w.live & ~w.blocked, first = ~0u, group = 0;
        if (!ready) break;
        EACH_LANE(l, ready) first = std::min(first, w.pc[l]);
        if (chance(3)) EACH_LANE(l, ready & u32(random() >> 8)) first = w.pc[l];  // lanes that parted may go on in any order
        EACH_LANE(l, w.live) if (w.pc[l] == first) group |= 1u << l;
        if (first >= program->code.size()) fail("the program ends without a ret");
        // All lanes together run on without another look, until they branch apart.
        for (bool alone = group == w.live;; budget--) {
            const Ins& i = program->code[first];
            w.current = first;
            u32 mask = group;
            if (i.guard >= 0) {
                u32 p = *(const u32*)(w.registers.data() + i.guard);
                mask &= i.negated ? ~p : p;
            }
            if (i.target >= 0) {
                EACH_LANE(l, mask) w.pc[l] = i.target;
                EACH_LANE(l, group & ~mask) w.pc[l] = first + 1;
                steps++;
                if (!alone || (mask && mask != group) || budget <= 0) break;
                first = mask ? i.target : first + 1;
                continue;
            }
            if (mask) {
                u32 all = i.masked ? w.live & src<u32>(w, i, int(i.op.size()) - 1)[__builtin_ctz(mask)] : w.live;
                if (i.together && (mask & all) != all) {  // others of the warp are still to come
                    w.blocked |= group;
                    EACH_LANE(l, group) w.pc[l] = first;
                    break;
                }
                if (program->has_wgmma && !i.is_wgmma) {
                    if (w.unwaited) check_wgmma_registers(w, i);
                    for (int k = 0; k < i.dests; k++)
                        if (!i.op[k].constant) w.written[i.op[k].offset / ROW] = w.fences;
                }
                if (i.run(w, i, mask) == RETRY) {
                    w.blocked |= group;
                    EACH_LANE(l, group) w.pc[l] = first;
                    break;
                }
            }
            steps++;
            first++;
            if (!alone || budget <= 0 || !w.live) {
                EACH_LANE(l, group) w.pc[l] = first;
                break;
            }
        }
    }
}

// -- a launch ----------------------------------------------------------------------------------------------------

static void set_special(Warp& w, const std::string& name, u32 offset) {
    Machine& m = *w.cta->machine;
    u32* row = (u32*)(w.registers.data() + offset);
    size_t dot = name.find('.');
    std::string kind = name.substr(0, dot);
    int axis = dot == std::string::npos ? -1 : name[dot + 1] - 'x';
    u32 cluster_index[3], clusters[3];
    for (int k = 0; k < 3; k++) {
        cluster_index[k] = w.cta->index[k] / m.cluster_shape[k];
        clusters[k] = m.grid[k] / m.cluster_shape[k];
    }
    for (u32 l = 0; l < LANES; l++) {
        u32 t = w.number * LANES + l, tid[3] = {t % m.block[0], t / m.block[0] % m.block[1], t / m.block[0] / m.block[1]};
        if (kind == "tid") row[l] = tid[axis];
        else if (kind == "ntid") row[l] = m.block[axis];
        else if (kind == "ctaid") row[l] = w.cta->index[axis];
        else if (kind == "nctaid") row[l] = m.grid[axis];
        else if (kind == "laneid") row[l] = l;
        else if (kind == "warpid") row[l] = w.number;
        else if (kind == "cluster_ctarank") row[l] = w.cta->rank;
        else if (kind == "cluster_nctarank") row[l] = u32(w.cta->cluster->ctas.size());
        else if (kind == "cluster_ctaid") row[l] = w.cta->index[axis] % m.cluster_shape[axis];
        else if (kind == "cluster_nctaid") row[l] = m.cluster_shape[axis];
        else if (kind == "clusterid") row[l] = cluster_index[axis];
        else if (kind == "nclusterid") row[l] = clusters[axis];
        else if (kind == "smid") row[l] = w.cta->index[0];
        else if (kind == "dynamic_smem_size") row[l] = m.dynamic_shared;
        else if (kind == "lanemask_lt") row[l] = (1u << l) - 1;
        else if (kind == "lanemask_le") row[l] = (2u << l) - 1;
        else if (kind == "lanemask_eq") row[l] = 1u << l;
        else if (kind == "clock" || kind == "globaltimer" || kind == "clock64" || kind == "globaltimer_lo") row[l] = u32(m.steps);
        else fail("special register %", name, " is not emulated");
    }
}

void Machine::start_cluster(u64 number) {
    auto cluster = std::make_unique<Cluster>();
    u32 threads = block[0] * block[1] * block[2], size = cluster_shape[0] * cluster_shape[1] * cluster_shape[2];
    if (threads % LANES) fail("blocks of ", threads, " threads are not emulated: no multiple of 32");
    u64 across[2] = {grid[0] / cluster_shape[0], grid[1] / cluster_shape[1]};
    u64 at[3] = {number % across[0], number / across[0] % across[1], number / across[0] / across[1]};
    for (u32 r = 0; r < size; r++) {
        auto cta = std::make_unique<Cta>();
        cta->machine = this;
        cta->cluster = cluster.get();
        cta->rank = r;
        u32 in[3] = {r % cluster_shape[0], r / cluster_shape[0] % cluster_shape[1], r / cluster_shape[0] / cluster_shape[1]};
        for (int k = 0; k < 3; k++) cta->index[k] = u32(at[k]) * cluster_shape[k] + in[k];
        cta->shared.assign(SHARED_BASE + program->static_shared + dynamic_shared + 16, 0xff);
        cta->shared.resize(SHARED_BASE + program->static_shared + dynamic_shared);
        for (auto* each : {&cta->writer, &cta->witness, &cta->copier}) each->assign(cta->shared.size() / GRANULE + 2, 0);
        cta->copied.assign(cta->shared.size() / GRANULE + 2, 0);
        cta->live_threads = threads;
        cluster->live_threads += threads;
        for (u32 n = 0; n < threads / LANES; n++) {
            auto w = std::make_unique<Warp>();
            w->cta = cta.get();
            w->number = int(n);
            w->registers.resize(program->register_bytes + 2 * ROW);
            for (size_t k = 0; k < w->registers.size(); k += 4) {  // a NaN, and a large negative number
                u32 garbage = 0xffc00000u | u32(random() & 0xffff);
                memcpy(w->registers.data() + k, &garbage, 4);
            }
            for (auto* rows : {&w->accumulates, &w->feeds, &w->written}) rows->assign(w->registers.size() / ROW + 2, 0);
            w->local.assign(size_t(program->local_bytes) * LANES, 0xff);
            for (u32& pc : w->pc) pc = 0;
            for (auto& [name, offset] : program->special) set_special(*w, name, offset);
            cta->warps.push_back(std::move(w));
        }
        cluster->ctas.push_back(std::move(cta));
    }
    resident.push_back(std::move(cluster));
    event();
}

static std::string all_waiting(Machine& m) {
    std::ostringstream out;
    int lines = 0;
    for (auto& cluster : m.resident)
        for (auto& cta : cluster->ctas)
            for (auto& w : cta->warps) {
                std::set<u32> places;
                EACH_LANE(l, w->live) places.insert(w->pc[l]);
                for (u32 place : places) {
                    u32 lanes = 0;
                    EACH_LANE(l, w->live) lanes += w->pc[l] == place;
                    w->current = place;
                    if (lines++ < 60) out << "\n  " << where(*w) << "  (" << lanes << " lanes)";
                }
            }
    for (auto& cluster : m.resident)
        for (auto& cta : cluster->ctas)
            for (auto& [at, b] : cta->mbarriers)
                if ((b.pending != b.count || b.tx) && lines++ < 120)
                    out << "\n  CTA (" << cta->index[0] << ", " << cta->index[1] << ", " << cta->index[2]
                        << "), mbarrier at base + " << at - SHARED_BASE << ": phase " << b.phase << ", " << b.pending
                        << " of " << b.count << " arrivals to come, " << b.tx << " bytes to come";
    return out.str();
}

extern int emulated_sms;

void Machine::launch() {
    u64 size = u64(cluster_shape[0]) * cluster_shape[1] * cluster_shape[2], clusters = 1, next = 0;
    for (int k = 0; k < 3; k++) {
        if (cluster_shape[k] == 0 || grid[k] % cluster_shape[k]) fail("a grid of ", grid[k], " CTAs in clusters of ", cluster_shape[k]);
        clusters *= grid[k] / cluster_shape[k];
    }
    u64 slots = std::max<u64>(1, 2 * emulated_sms / size);
    Warp* running = nullptr;
    int idle = 0;
    try {
        while (next < clusters || !resident.empty()) {
            while (next < clusters && resident.size() < slots) start_cluster(next++);
            std::vector<Warp*> warps;
            for (auto& cluster : resident)
                for (auto& cta : cluster->ctas)
                    for (auto& w : cta->warps) if (w->live) warps.push_back(w.get());
            for (size_t k = warps.size(); k > 1; k--) std::swap(warps[k - 1], warps[random() % k]);
            u64 before = events, steps_before = steps;
            for (Warp* w : warps) {
                running = w;
                int budget = chance(20) ? 1 + random() % 8 : 1 + random() % 400;
                run_warp(*w, budget);
                while (chance(15)) land_something(*w);
            }
            running = nullptr;
            if (events == before && !later.empty()) land_something(*warps[0]);
            else if (steps == steps_before && events == before) idle++;
            if (events != before) idle = 0;
            // One round without a step shows nothing: of lanes that parted, those that wait may have been drawn.
            if (idle > 50) fail("no warp can go on:", all_waiting(*this));
            if (steps - last_event > 5'000'000) fail("the warps run in circles:", all_waiting(*this));
            for (auto it = resident.begin(); it != resident.end();)
                it = (*it)->live_threads ? it + 1 : resident.erase(it);
        }
        if (!later.empty()) fail("the kernel has ended, and ", later.size(), " copies into shared memory have not landed");
    } catch (Error& error) {
        if (!running) throw;
        fail(error.what(), "\n  at ", where(*running), "\n  kernel ", program->name);
    }
}
