"""In which order a quantising kernel measures and writes the parts of all heads: plain arithmetic, traced and tested alike."""

from typing import Any, Callable, NamedTuple

LAG = 2  # chunks that are measured before the first one is written: what settling a head takes is hidden behind them


class Order(NamedTuple):
    """Tickets 0 … 2 total - 1: each part is measured once and written once, in the order of the parts."""

    total: Any  # parts of all heads
    chunk: Any  # parts of the heads that are measured together
    lead: Any  # parts that are measured before anything is written: LAG chunks, or all there are


def place(t: Any, order: Order, select: Callable[[Any, Any, Any], Any]) -> tuple[Any, Any]:
    """(1 to write, 0 to measure; which part) of ticket t.

    After the lead, a chunk to measure and the oldest chunk to write take turns; what is left to measure may be less than a chunk;
    the rest is to write. Every part's ticket to measure comes before any ticket to write its head: heads are whole chunks, and a
    chunk is written ``LAG`` chunks late.
    """
    r = t - order.lead
    turns = (order.total - order.lead) // order.chunk
    left = order.total - order.lead - turns * order.chunk
    turn, x = r // (2 * order.chunk), r % (2 * order.chunk)
    behind = r - turns * 2 * order.chunk  # of the turns
    in_turn_write = x >= order.chunk
    turn_index = select(in_turn_write, (turn - 1) * order.chunk + x, order.lead + turn * order.chunk + x)
    rest_write = behind >= left
    rest_index = select(rest_write, turns * order.chunk + behind - left, order.lead + turns * order.chunk + behind)
    write = select(behind >= 0, select(rest_write, 1, 0), select(in_turn_write, 1, 0))
    index = select(behind >= 0, rest_index, turn_index)
    return select(r < 0, 0, write), select(r < 0, t, index)
