"""Parallel compilation with a progress bar."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from .runtime.parallel import Outcome, in_parallel

LINE_SECONDS = 5  # between two lines of progress


def with_progress(
    what: str, function: Callable, items: list, jobs: int, *, shown: bool = True, own_process: bool = True
) -> Iterator[Outcome]:
    """Yield outcomes as they finish, with a progress bar on stderr, or a line every few seconds without a terminal or
    without rich.

    shown: False prints nothing. own_process: as in in_parallel.
    """
    outcomes = in_parallel(function, items, jobs, own_process=own_process)
    with contextlib.closing(outcomes), _bar(what, len(items), shown) as advance:
        start = printed = time.monotonic()
        for done, outcome in enumerate(outcomes, start=1):
            now = time.monotonic()
            if advance is not None:
                advance()
            elif shown and now - printed >= LINE_SECONDS:
                printed = now
                left = (now - start) / done * (len(items) - done) / 60
                text = f"{what}: {done} of {len(items)} kernels, {now - start:.0f} s, about {left:.1f} minutes left"
                print(text, file=sys.stderr, flush=True)
            yield outcome


@contextlib.contextmanager
def _bar(what: str, total: int, shown: bool) -> Iterator[Callable[[], None] | None]:
    """A function that advances a progress bar; None where there is no bar."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining
    except ModuleNotFoundError:
        yield None
        return
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Remaining()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
