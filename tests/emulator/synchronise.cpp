// Barriers, mbarriers, shuffles and votes, branches, and what is only about order.
#include "machine.h"

static Cta& cta_at(Warp& w, u64 address, u32& offset) {
    Cta* cta;
    shared_at(w, u32(address), 8, 8, &cta);
    offset = u32(address) & 0xffffff;
    return *cta;
}

static Mbarrier& mbarrier_at(Cta& cta, u32 offset) {
    auto it = cta.mbarriers.find(offset);
    if (it == cta.mbarriers.end()) fail("no mbarrier was initialised at shared address 0x", std::hex, offset);
    return it->second;
}

static void complete_if_due(Cta& cta, Mbarrier& b) {
    if (b.pending == 0 && b.tx == 0) {
        b.phase++;
        b.pending = b.count;
    }
    cta.machine->event();
}

void arrive(Warp&, Cta& cta, u32 offset, i32 count, i64 expect_tx) {
    Mbarrier& b = mbarrier_at(cta, offset);
    b.tx += expect_tx;
    if (count > b.pending)
        fail("more arrivals than the mbarrier at 0x", std::hex, offset, std::dec, " was initialised for, ", b.count);
    b.pending -= count;
    complete_if_due(cta, b);
}

void complete_tx(Cta& cta, u32 offset, i64 bytes) {
    Mbarrier& b = mbarrier_at(cta, offset);
    b.tx -= bytes;
    complete_if_due(cta, b);
}

Step mbarrier_init(Warp& w, const Ins& i, u32 m) {
    EACH_LANE(l, m) {
        u32 at;
        Cta& cta = cta_at(w, get_int(w, i, 0, l) + i.offset[0], at);
        Mbarrier b;
        b.count = b.pending = src<i32>(w, i, 1)[l];
        if (b.count < 1) fail("mbarrier.init with a count of ", b.count);
        cta.mbarriers[at] = b;
        w.cta->machine->event();
    }
    return DONE;
}

Step mbarrier_inval(Warp& w, const Ins& i, u32 m) {
    EACH_LANE(l, m) {
        u32 at;
        Cta& cta = cta_at(w, get_int(w, i, 0, l) + i.offset[0], at);
        cta.mbarriers.erase(at);
    }
    return DONE;
}

// arrive, arrive.expect_tx (a count of 1), expect_tx (no arrival). The state that an arrival returns is not given.
template <bool ARRIVES, bool EXPECTS> Step mbarrier_arrive(Warp& w, const Ins& i, u32 m) {
    int address = ARRIVES ? i.group[0] : 0, last = address + 1;
    bool given = int(i.op.size()) > last;
    EACH_LANE(l, m) {
        u32 at;
        Cta& cta = cta_at(w, get_int(w, i, address, l) + i.offset[0], at);
        i32 value = given ? src<i32>(w, i, last)[l] : 1;
        if (EXPECTS && !ARRIVES) mbarrier_at(cta, at).tx += value;
        else arrive(w, cta, at, EXPECTS ? 1 : value, EXPECTS ? value : 0);
    }
    return DONE;
}

// Waits, or now and then comes back with "not yet", which a time limit of the hardware may do as well.
template <bool WAITS> Step mbarrier_try(Warp& w, const Ins& i, u32 m) {
    u32 done = 0;
    EACH_LANE(l, m) {
        u32 at;
        Cta& cta = cta_at(w, get_int(w, i, 1, l) + i.offset[0], at);
        if (&cta != w.cta) fail("a wait for an mbarrier of another CTA");
        u32 parity = src<u32>(w, i, 2)[l];
        if (parity > 1) fail("mbarrier parity ", parity);
        if ((mbarrier_at(cta, at).phase & 1) != parity) done |= 1u << l;
    }
    if (WAITS && done != m && !w.cta->machine->chance(3)) return RETRY;
    set_pred(w, i, 0, m, done);
    return DONE;
}

// -- named barriers --------------------------------------------------------------------------------------------

static void complete_barrier(NamedBarrier& b) {
    b.generation++;
    b.arrived = b.expected = 0;
}

template <bool SYNCS> Step bar(Warp& w, const Ins& i, u32) {
    u32 id = src<u32>(w, i, 0)[0];
    if (id > 15) fail("named barrier ", id);
    NamedBarrier& b = w.cta->named[id];
    if (SYNCS && w.at_barrier) {
        if (b.generation == w.barrier_generation) return RETRY;
        w.at_barrier = false;
        return DONE;
    }
    bool given = i.op.size() > 1;
    u32 threads = given ? src<u32>(w, i, 1)[0] : 0;
    if (given && (threads == 0 || threads % LANES)) fail("a barrier of ", threads, " threads");
    if (b.arrived && b.expected != threads)
        fail("barrier ", id, " has ", b.arrived, " threads of ", b.expected, " (0: all), and one comes for ", threads);
    b.expected = threads;
    b.arrived += LANES;
    if (threads && b.arrived > threads) fail("barrier ", id, " has more than its ", threads, " threads");
    w.cta->machine->event();
    w.barrier_generation = b.generation;
    if (b.arrived >= (threads ? threads : w.cta->live_threads)) complete_barrier(b);
    if (!SYNCS) return DONE;
    w.at_barrier = true;
    if (b.generation == w.barrier_generation) return RETRY;
    w.at_barrier = false;
    return DONE;
}

static void cluster_completes(Cluster& c) {
    if (c.arrived && c.arrived >= c.live_threads) {
        c.generation++;
        c.arrived = 0;
    }
}

static void leave(Warp& w, u32 m) {
    w.live &= ~m;
    u32 n = __builtin_popcount(m);
    w.cta->live_threads -= n;
    w.cta->cluster->live_threads -= n;
    for (NamedBarrier& b : w.cta->named)
        if (b.arrived && b.expected == 0 && b.arrived >= w.cta->live_threads) complete_barrier(b);
    cluster_completes(*w.cta->cluster);
    w.cta->machine->event();
}

Step ret(Warp& w, const Ins&, u32 m) {
    if (!w.wgmmas.empty()) fail("a thread ends while its WGMMAs are in flight");
    if (!w.async_copies.empty()) wait_copies(w, w.async_copies, w.async_group, m, 0, false);
    for (const Copy& c : w.bulk_copies)
        if ((m >> c.lane & 1) && !c.read_done)
            fail("a thread ends while its bulk copy may still read shared memory: cp.async.bulk.wait_group.read is missing");
    wait_copies(w, w.bulk_copies, w.bulk_group, m, 0, false);
    leave(w, m);
    return DONE;
}

Step cluster_arrive(Warp& w, const Ins&, u32 m) {
    Cluster& c = *w.cta->cluster;
    if (w.cluster_arrived & m) fail("barrier.cluster.arrive twice without a wait");
    EACH_LANE(l, m) w.cluster_generation[l] = c.generation;
    w.cluster_arrived |= m;
    c.arrived += __builtin_popcount(m);
    cluster_completes(c);
    w.cta->machine->event();
    return DONE;
}

Step cluster_wait(Warp& w, const Ins&, u32 m) {
    Cluster& c = *w.cta->cluster;
    EACH_LANE(l, m) {
        if (!(w.cluster_arrived >> l & 1)) fail("barrier.cluster.wait without an arrival");
        if (w.cluster_generation[l] == c.generation) return RETRY;
    }
    w.cluster_arrived &= ~m;
    return DONE;
}

// -- shuffles, votes -------------------------------------------------------------------------------------------

enum Shuffle { UP, DOWN, BFLY, IDX };
template <Shuffle HOW> Step shuffle(Warp& w, const Ins& i, u32 m) {
    int n = i.group[0];
    u32 a[LANES], valid = 0;
    memcpy(a, src<u32>(w, i, n), sizeof a);
    const u32 *b = src<u32>(w, i, n + 1), *c = src<u32>(w, i, n + 2);
    EACH_LANE(l, m) {
        u32 clamp = c[l] & 31, segment = c[l] >> 8 & 31, by = b[l] & 31;
        int most = (l & segment) | (clamp & ~segment), least = l & segment, j;
        bool ok;
        if (HOW == UP) j = l - int(by), ok = j >= most;
        else if (HOW == DOWN) j = l + int(by), ok = j <= most;
        else if (HOW == BFLY) j = l ^ int(by), ok = j <= most;
        else j = least | int(by & ~segment), ok = j <= most;
        if (!ok) j = l;
        if (!(m >> j & 1)) fail("shfl.sync from lane ", j, ", which does not take part");
        dst<u32>(w, i, 0)[l] = a[j];
        valid |= u32(ok) << l;
    }
    if (n == 2) set_pred(w, i, 1, m, valid);
    return DONE;
}

enum Vote { ALL, ANY, BALLOT, UNIFORM };
template <Vote HOW> Step vote(Warp& w, const Ins& i, u32 m) {
    u32 p = pred(w, i, 1) & m;
    if (HOW == BALLOT) EACH_LANE(l, m) dst<u32>(w, i, 0)[l] = p;
    else set_pred(w, i, 0, m, (HOW == ALL ? p == m : HOW == ANY ? p != 0 : p == m || p == 0) ? ~0u : 0);
    return DONE;
}

Step elect(Warp& w, const Ins& i, u32 m) {
    u32 leader = __builtin_ctz(m);
    if (!i.op[0].constant) EACH_LANE(l, m) dst<u32>(w, i, 0)[l] = leader;
    set_pred(w, i, 1, m, 1u << leader);
    return DONE;
}

template <class T, auto F> Step reduce(Warp& w, const Ins& i, u32 m) {
    const T* a = src<T>(w, i, 1);
    T value = a[__builtin_ctz(m)];
    EACH_LANE(l, m & (m - 1)) value = F(value, a[l]);
    EACH_LANE(l, m) dst<T>(w, i, 0)[l] = value;
    return DONE;
}

template <class T> Step match_any(Warp& w, const Ins& i, u32 m) {
    T a[LANES];
    memcpy(a, src<T>(w, i, 1), sizeof a);
    EACH_LANE(l, m) {
        u32 same = 0;
        EACH_LANE(k, m) same |= u32(a[k] == a[l]) << k;
        dst<u32>(w, i, 0)[l] = same;
    }
    return DONE;
}

Step active_mask(Warp& w, const Ins& i, u32 m) {
    EACH_LANE(l, m) dst<u32>(w, i, 0)[l] = m;
    return DONE;
}

Step trap(Warp&, const Ins& i, u32) { fail(i.name, " was executed"); }
Step nothing(Warp&, const Ins&, u32) { return DONE; }
Step branch(Warp&, const Ins&, u32) { return DONE; }  // run_warp does it

Step fence_proxy(Warp& w, const Ins&, u32) {
    Cta& c = *w.cta;
    u8 me = u8(w.number + 1);
    for (size_t g = 0; g < c.writer.size(); g++) {
        if (c.writer[g] == me || c.witness[g] == me) c.writer[g] = c.witness[g] = 0;
        if (c.copier[g] == me) c.copied[g] = 0;
    }
    w.fenced = c.copies;
    return DONE;
}

void add_synchronisation(Table& t) {
    t["bra"] = {branch};
    t["ret"] = t["exit"] = {ret};
    t["trap"] = {trap};
    for (const char* s : {".shared", ".shared::cta"}) {
        std::string space = s;
        t["mbarrier.init" + space + ".b64"] = {mbarrier_init};
        t["mbarrier.inval" + space + ".b64"] = {mbarrier_inval};
        t["mbarrier.try_wait.parity" + space + ".b64"] = {mbarrier_try<true>};
        t["mbarrier.test_wait.parity" + space + ".b64"] = {mbarrier_try<false>};
    }
    for (const char* s : {".shared", ".shared::cta", ".shared::cluster"}) {
        std::string space = s;
        t["mbarrier.arrive" + space + ".b64"] = {mbarrier_arrive<true, false>};
        t["mbarrier.arrive.expect_tx" + space + ".b64"] = {mbarrier_arrive<true, true>};
        t["mbarrier.expect_tx" + space + ".b64"] = {mbarrier_arrive<false, true>};
    }
    t["bar"] = t["barrier"] = {bar<true>, true};  // .sync is among the qualifiers that the parser leaves out
    t["bar.arrive"] = t["barrier.arrive"] = {bar<false>, true};
    t["bar.warp"] = {nothing, true};
    t["barrier.cluster.arrive"] = {cluster_arrive};
    t["barrier.cluster.wait"] = {cluster_wait};
    t["shfl.up.b32"] = {shuffle<UP>, true};
    t["shfl.down.b32"] = {shuffle<DOWN>, true};
    t["shfl.bfly.b32"] = {shuffle<BFLY>, true};
    t["shfl.idx.b32"] = {shuffle<IDX>, true};
    t["vote.all.pred"] = {vote<ALL>, true};
    t["vote.any.pred"] = {vote<ANY>, true};
    t["vote.uni.pred"] = {vote<UNIFORM>, true};
    t["vote.ballot.b32"] = {vote<BALLOT>, true};
    t["elect"] = {elect, true};
    t["activemask.b32"] = {active_mask};
    t["match.any.b32"] = {match_any<u32>, true};
    t["redux.add.s32"] = t["redux.add.u32"] = {reduce<u32, [](u32 a, u32 b) { return a + b; }>, true};
    t["redux.min.s32"] = {reduce<i32, [](i32 a, i32 b) { return a < b ? a : b; }>, true};
    t["redux.max.s32"] = {reduce<i32, [](i32 a, i32 b) { return b < a ? a : b; }>, true};
    t["redux.min.u32"] = {reduce<u32, [](u32 a, u32 b) { return a < b ? a : b; }>, true};
    t["redux.max.u32"] = {reduce<u32, [](u32 a, u32 b) { return b < a ? a : b; }>, true};
    t["redux.or.b32"] = {reduce<u32, [](u32 a, u32 b) { return a | b; }>, true};
    t["redux.and.b32"] = {reduce<u32, [](u32 a, u32 b) { return a & b; }>, true};
    for (const char* n : {"griddepcontrol.wait", "griddepcontrol.launch_dependents", "prefetch.tensormap", "membar",
                          "fence.mbarrier_init", "fence", "fence.proxy.tensormap::generic", "setmaxnreg.inc.u32",
                          "setmaxnreg.dec.u32", "nanosleep.u32", "prefetch.global.L2", "prefetch.L2"})
        t[n] = {nothing};
    for (const char* n : {"fence.proxy.async", "fence.proxy.async.shared::cta", "fence.proxy.async.shared",
                          "fence.proxy.async.global"})
        t[n] = {fence_proxy};
}
