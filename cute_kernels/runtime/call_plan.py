"""Plans kept by the metadata of calls: what an op decided once is a dictionary look-up from then on."""

MOST_PLANS = 8192  # a bound for programs whose shapes never repeat


class PlanCache(dict):
    """key -> plan. A key holds all that a plan depends on: shapes, strides, dtypes, devices, alignments, options."""

    def keep(self, key, plan) -> None:
        """Add a plan; before there are too many, forget all."""
        if len(self) >= MOST_PLANS:
            self.clear()
        self[key] = plan
