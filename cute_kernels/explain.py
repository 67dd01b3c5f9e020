"""explain: which kernel, configuration and path a call takes, and why."""

from .matmul.plan import Plan

_PLANNERS = {}


def explains(op, planner) -> None:
    """Register the function that plans `op`'s calls: the one the op itself uses."""
    _PLANNERS[op] = planner


def explain(op, *args, **kwargs) -> Plan:
    """The plan of `op(*args, **kwargs)`, without running it; print it to read it.

    Its `facts` hold path, architecture and configuration, `notes` the reasons and every slower way taken. Planning
    compiles the kernel if no cache has it. Raises what the call would raise, but for gradients and an `out` that
    overlaps an operand, which are looked at in each call.
    """
    if op not in _PLANNERS:
        known = ", ".join(sorted(o.__name__ for o in _PLANNERS))
        raise ValueError(f"cannot explain {getattr(op, '__name__', op)!r}; known are {known}")
    return _PLANNERS[op](*args, **kwargs)
