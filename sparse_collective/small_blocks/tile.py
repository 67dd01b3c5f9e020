"""The tile of the kernel for small blocks, and how blocks of one shape lie in it."""

from dataclasses import dataclass

from cute_kernels.tile.barriers import Arrivals

CHUNK = 64  # K elements the kernel works on at a time
ROWS = 64  # rows of W that a consumer owns
CONSUMERS = 3
MOST_TABLE_BYTES = 256 << 20  # of a plan's table: groups x chunks


def chunk_arrivals(cluster: int) -> Arrivals:
    """Arrivals at a chunk's mbarriers: the producers of B and A, and the consumers of all CTAs of the cluster."""
    return Arrivals(1 + CONSUMERS, 4 * CONSUMERS, sharers=cluster)


def table_bytes(M: int, K: int, cluster: int) -> int:
    """Size of the words of a pattern's tables for W (M, K), for clusters of so many CTAs."""
    groups, chunks = -(-M // (ROWS * CONSUMERS * cluster)), -(-K // CHUNK)
    return groups * chunks * (4 if cluster == 1 else 8) * 4


@dataclass(frozen=True)
class Geometry:
    """Layout of blocks of one shape in segments (the rows of one consumer) and chunks.

    `rows` block rows a segment; `steps` blocks of one row a chunk, each `width` wide; or, where blocks are wider than a
    chunk, `parts` chunks a block. B comes in slices of `gather` blocks' width.
    """

    rows: int
    steps: int
    width: int
    parts: int
    gather: int

    @property
    def fold(self) -> int:
        """Rows of a block that TMA copies as one, since its time goes by rows and not by bytes where those are short.

        Swizzled as twice as wide, what was copied is a tile with its own swizzle in which odd groups of 8 rows have
        neighbors swapped: the wider swizzle flips one more bit of the address, the lowest of the row's number, by
        the bit that tells such groups. Blocks of a transposed view are not folded: their rows are along K, whose
        order must be that of B.
        """
        return 2 if self.width < CHUNK else 1

    @property
    def slices(self) -> int:
        """Slices a chunk."""
        return self.steps // self.gather

    @staticmethod
    def refuse(bm: int, bk: int) -> str:
        """The reason why blocks of this shape are not supported, or ""."""
        if bm not in (16, 32, 64):
            return f"blocks {bm} high: the kernel for small blocks takes heights of 16, 32 and 64"
        if bk not in (16, 32) and bk % CHUNK:
            return f"blocks {bk} wide: the kernel for small blocks takes widths of 16, 32 and multiples of {CHUNK}"
        return ""

    @staticmethod
    def of_block(bm: int, bk: int, b_k_major: bool = False) -> "Geometry":
        """Raises ValueError with the reason of `refuse`.

        A K-major B has one row of a TMA box for each of D's columns: 32 bytes of blocks 16 wide, which took twice as
        long as the 64 of two of them.
        """
        if reason := Geometry.refuse(bm, bk):
            raise ValueError(reason)
        width = min(bk, CHUNK)
        return Geometry(ROWS // bm, CHUNK // width, width, bk // width, 2 if b_k_major and bk == 16 else 1)
