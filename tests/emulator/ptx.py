"""From PTX text to the numbered program that the machine reads.

A register becomes an offset into the registers of a warp, an immediate a constant, a label the number of an
instruction; scopes in braces, which inline PTX opens, are resolved. An instruction keeps its name less the qualifiers
that change nothing here (caches, orders and scopes of memory, `.sync`, `.aligned`); the machine looks it up.

ptxas may fuse a product and a sum that have no `.rn` into one FFMA, which rounds once. So here all are fused that can
be: `x * y - z` is not 0 where z is the rounded product.
"""

import re
from collections import Counter

ROW = 128  # bytes of a register's row: 32 lanes of 32 bits
WIDTH = {"pred": 0} | {f"{kind}{bits}": max(bits // 8, 2) for kind in "busf" for bits in (8, 16, 64)}  # else 4 bytes
LEFT_OUT = {
    "sync", "aligned", "uni", "weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "sc", "gpu", "sys", "cta",
    "cluster", "nc", "L1::no_allocate", "L1::evict_last", "L1::evict_first", "L1::evict_normal", "L2::cache_hint",
    "L2::64B", "L2::128B", "L2::256B", "lu", "rn",
}  # fmt: skip
STORES = ("st", "red", "bra", "bar", "barrier", "ret", "exit", "fence", "membar", "prefetch", "setmaxnreg", "cp",
          "griddepcontrol", "stmatrix", "nanosleep", "trap", "wgmma")  # fmt: skip
FUSIBLE = ("mul.f32", "add.f32", "sub.f32", "mul.ftz.f32", "add.ftz.f32", "sub.ftz.f32")
SHARED_BASE, LOCAL, GLOBALS = 1024, 0x4C << 56, 1000  # as in machine.h


def name_of(text: str) -> str:
    """The name by which the machine knows an instruction."""
    base, *rest = text.split(".")
    keep_rn = base == "cvt"
    # `.sync`, `.cta` and the like leave no trace, but shared::cta, a space, is a part of its own.
    rest = [q for q in rest if q not in LEFT_OUT or (q == "rn" and keep_rn) or (base == "barrier" and q == "cluster")]
    if base in ("atom", "red"):  # the vector's length just before the type, which comes last
        rest.sort(key=lambda q: 2 if re.fullmatch(r"[busf]+\d+(x2)?", q) else 1 if re.fullmatch(r"v\d", q) else 0)
    return ".".join([base, *rest])


class Kernel:
    """One .entry while it is read."""

    def __init__(self, name: str):
        self.name = name
        self.params: list[tuple[str, int]] = []
        self.registers = 0  # rows
        self.local = 0  # bytes of a thread's own memory
        self.special: dict[str, int] = {}
        self.constants: dict[tuple[int, int], int] = {}  # (value, parameter or -1) -> index
        self.sink = self.row(8)
        self.scopes: list[dict] = [{}]
        self.code: list[dict] = []
        self.labels: list[tuple[dict, str]] = []

    def row(self, width: int) -> tuple[int, int]:
        at = self.registers * ROW
        self.registers += 2 if width == 8 else 1
        return at, width

    def constant(self, value: int, param: int = -1) -> tuple[int, int, int]:
        index = self.constants.setdefault((value % (1 << 64), param), len(self.constants))
        return index * 512, 1, 8

    def find(self, name: str):
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None


def statements(text: str):
    """(line, text) of each statement, brace, label and directive of a kernel's body."""
    current, start, vector = "", 0, 0
    for number, line in enumerate(text.split("\n"), 1):
        line = line.split("//")[0].strip()
        at = 0
        while at < len(line):
            char = line[at]
            at += 1
            if not current.strip() and char in "{}":
                current = ""
                yield number, char
                continue
            if not current.strip():
                start = number
            vector += (char == "{") - (char == "}")
            if char == ";":
                yield start, current.strip()
                current = ""
            elif char == ":" and re.fullmatch(r"\s*[\w$]+", current) and line[at : at + 1] != ":":
                yield start, current.strip() + ":"
                current = ""
            else:
                current += char
        current += " "


def immediate(text: str) -> int:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)


def split_commas(text: str) -> list[str]:
    """The operands of an instruction: commas inside of {} and [] do not part them."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    return [*parts, current.strip()] if current.strip() else parts


class Reader:
    def __init__(self, text: str):
        self.lines = text.split("\n")
        self.shared: dict[str, int] = {}
        self.globals: dict[str, list[str]] = {}  # initialised arrays of bytes, such as the formats of printf
        self.static_shared = 0
        self.kernels: list[Kernel] = []
        self.read(text)

    def read(self, text: str) -> None:
        self.read_shared(text)
        for name, values in re.findall(r"\.global[^;]*?\.b8\s+([\w$]+)\[\d+\]\s*=\s*\{([^}]*)\}", text):
            self.globals[name] = values.split(",")
        for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(", text):
            end = text.index(")", match.end())
            kernel = Kernel(match.group(1))
            for param in re.findall(
                r"\.param([^,]*?)\s([\w$]+(?:\[\d+\])?)\s*(?:,|$)", text[match.end() : end].replace("\n", " ")
            ):
                kernel.params.append(self.param(*param))
            body = text.index("{", end)
            stop = text.find(".entry", body)
            lines_before = text.count("\n", 0, body)
            self.read_body(kernel, "\n" * lines_before + text[body : stop if stop >= 0 else len(text)])
            self.kernels.append(kernel)

    def read_shared(self, text: str) -> None:
        """Module-level arrays in shared memory: static ones lie before the dynamic one."""
        dynamic = []
        for extern, align, name, size in re.findall(
            r"(\.extern\s+)?\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]", text
        ):
            if extern or not size:
                dynamic.append((name, int(align)))
            else:
                self.static_shared = -(-self.static_shared // int(align)) * int(align)
                self.shared[name] = SHARED_BASE + self.static_shared
                self.static_shared += int(size)
        for name, align in dynamic:
            self.static_shared = -(-self.static_shared // align) * align if self.static_shared else 0
            self.shared[name] = SHARED_BASE + self.static_shared

    @staticmethod
    def param(kind: str, name: str) -> tuple[str, int]:
        size = re.fullmatch(r"([\w$]+)\[(\d+)\]", name)
        if size:
            return size.group(1), int(size.group(2))
        bits = re.search(r"\.[a-z](\d+)", kind)
        return name, int(bits.group(1)) // 8

    def read_body(self, kernel: Kernel, text: str) -> None:
        depth = 0
        for number, statement in statements(text):
            if statement == "{":
                depth += 1
                kernel.scopes.append({})
            elif statement == "}":
                depth -= 1
                kernel.scopes.pop()
                if depth == 0:
                    break
            elif statement.startswith((".reg", ".param")):  # of a call: its parameters are as good as registers
                self.registers(kernel, statement)
            elif statement.startswith(".local"):
                name, size = re.search(r"([\w$]+)\[(\d+)\]", statement).groups()
                kernel.scopes[-1][name] = ("local", kernel.local)
                kernel.local += -(-int(size) // 16) * 16
            elif statement.startswith("."):
                if not statement.startswith((".pragma", ".loc", ".file", ".shared")):  # read_shared has seen the last
                    raise NotImplementedError(f"PTX line {number}: {statement}")
            elif statement.endswith(":"):
                kernel.scopes[-1][statement[:-1]] = ("label", len(kernel.code))
            else:
                self.instruction(kernel, number, statement)
        for ins in kernel.code:  # labels stand in the scope of their use or around it, maybe after it
            if ins["label"]:
                scope, name = ins["label"]
                found = next((s[name] for s in reversed(scope) if name in s), None)
                if found is None:
                    raise ValueError(f"PTX line {ins['line']}: no label {name}")
                ins["target"] = found[1]

    @staticmethod
    def registers(kernel: Kernel, statement: str) -> None:
        kind, names = re.fullmatch(r"\.(?:reg|param)\s+\.(\w+)\s+(.*)", statement, re.S).groups()
        width = WIDTH.get(kind, 4)
        for name in names.split(","):
            name = name.strip()
            many = re.fullmatch(r"(.*)<(\d+)>", name)
            for each in [f"{many.group(1)}{i}" for i in range(int(many.group(2)))] if many else [name]:
                kernel.scopes[-1][each] = ("register", *kernel.row(width))

    def value(self, kernel: Kernel, text: str, number: int) -> tuple[int, int, int]:
        """One operand: (offset, whether a constant, bytes)."""
        found = kernel.find(text)
        if found and found[0] == "register":
            return found[1], 0, found[2]
        if found and found[0] == "local":
            return kernel.constant(LOCAL | found[1])
        if text == "_":  # a destination that is not read
            return kernel.sink[0], 0, kernel.sink[1]
        if text in self.globals:
            return kernel.constant(0, GLOBALS + list(self.globals).index(text))
        if text.startswith("%"):
            name = text[1:]
            if name not in kernel.special:
                kernel.special[name] = kernel.row(4)[0]
            return kernel.special[name], 0, 4
        if text in self.shared:
            return kernel.constant(self.shared[text])
        for index, (name, _) in enumerate(kernel.params):
            if text == name:
                return kernel.constant(0, index)
        try:
            return kernel.constant(immediate(text))
        except ValueError:
            raise NotImplementedError(f"PTX line {number}: operand {text!r}") from None

    def operand(self, kernel: Kernel, text: str, number: int) -> tuple[list, int | None]:
        """(its values, what it adds to an address) of one written operand."""
        if text.startswith("{"):
            return [self.value(kernel, t, number) for t in split_commas(text[1:-1])], None
        if text.startswith("["):
            base, *rest = split_commas(text[1:-1])
            name, _, offset = base.partition("+")
            values = [self.value(kernel, name.strip(), number)]
            for part in rest:
                values += self.operand(kernel, part, number)[0]
            return values, int(offset or "0", 0)
        if "|" in text:
            return [self.value(kernel, t, number) for t in text.split("|")], None
        return [self.value(kernel, text, number)], None

    def instruction(self, kernel: Kernel, number: int, statement: str) -> None:
        guard, negated = -1, 0
        if statement.startswith("@"):
            condition, statement = statement.split(None, 1)
            negated = int(condition[1] == "!")
            guard = self.value(kernel, condition[1 + negated :], number)[0]
        call = re.fullmatch(r"call\S*\s+\((\w+)\),\s*(\w+),\s*\((.*)\)", statement)
        if call:
            statement = f"{call.group(2)} {call.group(1)}, {call.group(3)}"
        to_param = re.fullmatch(r"(?:st|ld)\.param\.(\w+)\s+\[?(\w+|%\w+)\]?,\s*\[?(\w+|%\w+)\]?", statement)
        if "[%" in statement:  # in a register: the address of a parameter of the kernel, one of several
            to_param = None
        if to_param and all((kernel.find(name) or [""])[0] == "register" for name in to_param.groups()[1:]):
            statement = "mov.{} {}, {}".format(*to_param.groups())
        word, *rest = statement.split(None, 1)
        name, rest = name_of(word), rest[0] if rest else ""
        ins = {
            "name": name,
            "line": number,
            "guard": guard,
            "negated": negated,
            "dests": 0,
            "target": -1,
            "label": None,
            "fusible": word in FUSIBLE,
        }
        ops, groups, offsets = [], [], []
        if name == "bra":
            ins["label"] = (list(kernel.scopes), rest.strip())
        else:
            for text in split_commas(rest):
                values, offset = self.operand(kernel, text, number)
                ops += values
                groups.append(len(values))
                if offset is not None:
                    offsets.append(offset)
            if groups and name.partition(".")[0] not in STORES:
                ins["dests"] = groups[0]
        ins.update(ops=ops, groups=groups, offsets=offsets, moves=int(name in ("mov.b32", "mov.u32", "mov.f32")))
        kernel.code.append(ins)


def fuse(kernel: Kernel) -> None:
    """Turn sums of a product into one FFMA, where the product's operands have not changed since."""
    written = [_written(ins) for ins in kernel.code]
    times = Counter(register for registers in written for register in registers)
    leaders = {ins["target"] for ins in kernel.code}
    products: dict[int, dict] = {}  # by register, those that are the only value of theirs and can be fused here
    for at, (ins, registers) in enumerate(zip(kernel.code, written, strict=True)):
        changed = {r for r in registers if times[r] > 1}
        if at in leaders:
            changed |= {r for r in times if times[r] > 1}
        if changed:
            products = {to: made for to, made in products.items() if changed.isdisjoint(made["reads"])}
        if not ins["fusible"]:
            continue
        (operation, kind), (to, *operands) = ins["name"].split(".", 1), ins["ops"]
        if operation == "mul":
            if ins["guard"] < 0 and times[to[0]] == 1:
                reads = {register for register, constant, _ in operands if not constant}
                products[to[0]] = {"kind": kind, "operands": operands, "reads": reads}
            continue
        for place in (0, 1):  # of two products the first, as ptxas did where it was seen
            made = None if operands[place][1] else products.get(operands[place][0])
            if made and made["kind"] == kind:
                name = "fma" if operation == "add" else ("fms", "fnma")[place]
                other = operands[1 - place]
                ins.update(name=f"{name}.{kind}", ops=[to, *made["operands"], other], groups=[1] * 4)
                break


def _written(ins: dict) -> list[int]:
    """Registers that an instruction writes; accumulators of WGMMAs twice, as they are written later on."""
    count = 2 * ins["groups"][:1] if ins["name"].startswith("wgmma.mma_async") else [ins["dests"]]
    return [op[0] for n in count for op in ins["ops"][:n] if not op[1]]


def program(text: str) -> str:
    """The text of interface.cpp's emu_load for all kernels of a PTX module."""
    reader = Reader(text)
    out = ["global " + " ".join(values) for values in reader.globals.values()]
    for kernel in reader.kernels:
        fuse(kernel)
        out.append(f"kernel {kernel.name} {kernel.registers * ROW} {reader.static_shared} {kernel.local}")
        out += [f"param {size}" for _, size in kernel.params]
        out += [f"special {name} {offset}" for name, offset in kernel.special.items()]
        out += [f"constant {value} {param}" for value, param in kernel.constants]
        for i in kernel.code:
            parts = [i["name"], i["line"], i["guard"], i["negated"], i["dests"], i["target"], i["moves"]]
            parts += [len(i["ops"])] + [x for op in i["ops"] for x in op]
            parts += [len(i["groups"]), *i["groups"], len(i["offsets"]), *i["offsets"]]
            out.append("ins " + " ".join(map(str, parts)))
        out.append("end")
    return "\n".join(out) + "\n"
