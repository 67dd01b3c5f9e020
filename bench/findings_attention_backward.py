"""What the suite of attention's backward is asked of several rows together, and of one row over two peers."""

import statistics
from collections.abc import Sequence

from .cases_attention_backward import BACKWARD, OUR_DENSE, OVER_DENSE, sparse_name
from .checks import Check, show
from .rows import Row
from .table import make_console

MEAN, LOWEST = 1.03, 0.95  # asked of the rows of whole backwards, over the fastest peer
OF_DENSE = {sparse_name(side): asked for side, asked in OVER_DENSE.items()}


def checks(rows: Sequence[Row]) -> list[Check]:
    """What is asked of those that were measured."""
    found = []
    if ratios := [row.ratio for row in rows if row.name.startswith(f"{BACKWARD} ")]:
        mean, worst = (None, None) if None in ratios else (statistics.geometric_mean(ratios), min(ratios))
        found.append(Check(f"backward, geometric mean of {len(ratios)}", mean, MEAN))
        found.append(Check("backward, lowest", worst, LOWEST))
    for row in rows:
        if row.name in OF_DENSE:
            dense = row.peer(OUR_DENSE)
            share = None if dense is None or row.ours.error else row.ours.tflops / dense.tflops
            found.append(Check(f"{row.name}: useful rate over our own dense one", share, OF_DENSE[row.name]))
    return found


def measure(rows: Sequence[Row], host: dict[str, float], only: str = "") -> dict:
    """The checks of what was measured, printed; as the result file has them."""
    found = checks(rows)
    show(found, make_console())
    return {"checks": [check.as_dict() for check in found]}
