"""Where a role is in a ring of slots, when the CTA's slots are divided between streams of tiles."""

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr


class Slots(pipeline.PipelineState):
    """Goes round the ``stages`` slots of one stream. Indices are those of all slots, so that using one costs nothing more, and
    ``stages`` is a power of 2, so that the index alone says when a round is over.
    """

    @cute.jit
    def advance(self):
        within = (self._index + 1) & (self._stages - 1)
        self._index = (self._index & -self._stages) | within
        self._phase = self._phase ^ (Int32(1) if within == 0 else Int32(0))

    def __new_from_mlir_values__(self, values):
        return Slots(self._stages, *(Int32(v) for v in values))


def slots(kind, stages: int, stream):
    """A role's place in the slots of a stream; the number 0 stands for the only stream."""
    state = pipeline.make_pipeline_state(kind, stages)
    if const_expr(isinstance(stream, int)):
        return state
    return Slots(stages, Int32(0), stream * stages, state.phase)
