// What Python calls, and the CUDA runtime's functions as the compiled host code calls them.
#include "machine.h"

int emulated_sms = 4;
struct Module {                              // kernels of different modules may share their names
    std::map<std::string, std::unique_ptr<Program>> programs;
    std::vector<std::vector<u8>> globals;
};
static std::vector<Module> modules;
static size_t current_module = 0;
static std::vector<Range> allocations;
static std::string message;
static u64 seed = 1, total_steps = 0, total_mmas = 0;
static bool check_proxies = true;

static const Table& table() {
    static Table t;
    if (t.empty()) {
        add_arithmetic(t); add_conversions(t); add_memory(t);
        add_synchronisation(t); add_tensor_cores(t); add_bulk_copies(t);
    }
    return t;
}

void Program::set_constant(int index, u64 value) {
    u8* at = constants.data() + index * 512;
    for (int l = 0; l < LANES; l++) {
        memcpy(at + 8 * l, &value, 8);
        memcpy(at + 256 + 4 * l, &value, 4);
        memcpy(at + 384 + 2 * l, &value, 2);
    }
    u32 bits = value ? ~0u : 0;
    memcpy(at + 448, &bits, 4);
}

static void read_instruction(std::istringstream& in, Program& p) {
    Ins i;
    int n;
    in >> i.name >> i.line >> i.guard >> i.negated >> i.dests >> i.target >> i.moves;
    auto found = table().find(i.name);
    if (found == table().end()) fail("not emulated: ", i.name, " (PTX line ", i.line, ": ", p.lines[i.line - 1], ")");
    i.run = found->second.run;
    i.together = found->second.together;
    i.is_wgmma = i.name.rfind("wgmma", 0) == 0;
    p.has_wgmma = p.has_wgmma || i.is_wgmma;
    for (in >> n; n > 0; n--) {
        Operand o;
        int constant, bytes;
        in >> o.offset >> constant >> bytes;
        o.constant = constant;
        o.bytes = u8(bytes);
        i.op.push_back(o);
    }
    for (in >> n; n > 0; n--) { int g; in >> g; i.group.push_back(g); }
    for (in >> n; n > 0; n--) { i64 o; in >> o; i.offset.push_back(o); }
    for (const char* kind : {"shfl", "vote", "elect", "redux", "match", "bar.warp"})
        i.masked = i.masked || i.name.rfind(kind, 0) == 0;
    i.offset.resize(4);
    p.code.push_back(i);
}

extern "C" {

// Registers the programs of a module, written by ptx.py; its number, or -1 with a message.
int emu_load(const char* text, const char* source) try {
    std::istringstream in(text);
    std::string word;
    Module module;
    std::unique_ptr<Program> p;
    std::vector<std::string> lines;
    std::istringstream from(source);
    for (std::string line; std::getline(from, line);) lines.push_back(line);
    for (std::string line; std::getline(in, line);) {
        std::istringstream at(line);
        at >> word;
        if (word == "global") {
            module.globals.emplace_back();
            for (int byte; at >> byte;) module.globals.back().push_back(u8(byte));
            module.globals.back().push_back(0);
        } else if (word == "kernel") {
            p = std::make_unique<Program>();
            at >> p->name >> p->register_bytes >> p->static_shared >> p->local_bytes;
            p->lines = lines;
        } else if (word == "param") { u32 n; at >> n; p->param_sizes.push_back(n); }
        else if (word == "special") { std::string name; u32 offset; at >> name >> offset; p->special.push_back({name, offset}); }
        else if (word == "constant") {
            u64 value; int param;
            at >> value >> param;
            int index = int(p->constants.size() / 512);
            p->constants.resize(p->constants.size() + 512);
            if (param >= GLOBALS) value = u64(module.globals.at(param - GLOBALS).data());
            else if (param >= 0) p->param_constants.push_back({index, param});
            p->set_constant(index, value);
        } else if (word == "ins") read_instruction(at, *p);
        else if (word == "end") { std::string name = p->name; module.programs[name] = std::move(p); }
    }
    modules.push_back(std::move(module));
    return int(modules.size()) - 1;
} catch (std::exception& error) {
    message = error.what();
    return -1;
}

void emu_forget(int module) { modules.at(size_t(module)) = Module(); }
const char* emu_message() { return message.c_str(); }
u64 emu_steps() { return total_steps; }
u64 emu_mmas() { return total_mmas; }

// What the next calls of host code find: kernels of this module, so many SMs, this seed.
void emu_configure(int module, int sms, u64 new_seed, int proxies) {
    current_module = size_t(module);
    emulated_sms = sms;
    seed = new_seed;
    check_proxies = proxies;
}

void emu_allocations(int n, const u64* bounds) {
    allocations.clear();
    for (int k = 0; k < n; k++) allocations.push_back({bounds[2 * k], bounds[2 * k + 1]});
    message.clear();
}

// -- the CUDA runtime ------------------------------------------------------------------------------------------

struct LaunchAttribute {
    int id, pad;
    u32 value[16];
};

struct LaunchConfig {
    u32 grid[3], block[3];
    size_t dynamic_shared;
    void* stream;
    LaunchAttribute* attributes;
    u32 count;
};

int _cudaLaunchKernelEx(const LaunchConfig* config, const void* function, void** arguments) try {
    auto& programs = modules.at(current_module).programs;
    auto found = programs.find((const char*)function);
    if (found == programs.end()) fail("no PTX was given for kernel ", (const char*)function);
    Program& p = *found->second;
    Machine m;
    m.program = &p;
    m.allocations = allocations;
    m.check_proxies = check_proxies;
    m.random_state = seed * 0x9E3779B97F4A7C15ull + 12345;
    seed++;
    m.dynamic_shared = u32(config->dynamic_shared);
    for (int k = 0; k < 3; k++) m.grid[k] = config->grid[k], m.block[k] = config->block[k], m.cluster_shape[k] = 1;
    for (u32 a = 0; a < config->count; a++)
        if (config->attributes[a].id == 4)
            for (int k = 0; k < 3; k++) m.cluster_shape[k] = config->attributes[a].value[k];
    static std::vector<u8> memory;  // of the parameters: descriptors in it want multiples of 64
    size_t total = 128;
    for (u32 size : p.param_sizes) total += (size + 127) / 128 * 128;
    memory.assign(total, 0);
    u8* at = memory.data() + (128 - (u64)memory.data() % 128) % 128;
    std::vector<u64> places;
    for (size_t k = 0; k < p.param_sizes.size(); k++) {
        places.push_back(u64(at));
        memcpy(at, arguments[k], p.param_sizes[k]);
        at += (p.param_sizes[k] + 127) / 128 * 128;
    }
    for (auto& [index, param] : p.param_constants) p.set_constant(index, places[param]);
    m.launch();
    total_steps += m.steps;
    total_mmas += m.mmas;
    return 0;
} catch (std::exception& error) {
    message = error.what();
    return 719;  // cudaErrorLaunchFailure
}

int _cudaLibraryLoadData(void** library, const void*, void*, void*, u32, void*, void*, u32) {
    *library = (void*)1;
    return 0;
}

int _cudaLibraryGetKernel(const void** kernel, void*, const char* name) {
    static std::set<std::string> names;
    *kernel = names.insert(name).first->c_str();
    return 0;
}

int _cudaFuncSetAttribute(const void*, int, int) { return 0; }
int _cudaKernelSetAttributeForDevice(const void*, int, int, int) { return 0; }
int _cuKernelGetAttribute(int* value, int, const void*, int) { *value = 0; return 0; }
int _cudaGetDevice(int* device) { *device = 0; return 0; }
int _cudaSetDevice(int) { return 0; }

int _cudaDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 97 ? 232448 : attribute == 16 ? emulated_sms : 0;
    return 0;
}

typedef int (*Init)(void**);
typedef int (*LoadToDevice)(void**, int);
int cuda_dialect_init_library_once(void** library, Init init, LoadToDevice load, void*) {
    if (*library) return 0;
    int code = init(library);
    return code ? code : load(library, 0);
}
void cuda_dialect_unload_library_once(void**) {}
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char*, const char**, int), int code) {
    std::string text = "emulated launch failed: " + message;
    const char* parts[] = {text.c_str()};
    (void)code;
    raise("RuntimeError", parts, 1);
}
}
