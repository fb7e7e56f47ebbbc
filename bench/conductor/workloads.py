"""The standard workloads; every side gets these sizes as arguments."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int  # rows per rank
    tokens: int  # of a row

    @property
    def units(self):
        """One per block, and the root."""
        return self.layers + 1

    def arguments(self):
        return [
            f"--{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name != "name"
        ]


COMM_BOUND = Workload("comm_bound", 4, 512, 8, 2048, 1, 32)
COMPUTE_BOUND = Workload("compute_bound", 8, 256, 4, 2048, 4, 128)
TINY_UNITS = Workload("tiny_units", 48, 32, 2, 256, 1, 16)
