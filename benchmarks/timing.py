"""Timing several ways to compute the same thing against each other, in one process, in turns.

On a GPU each call is captured into a CUDA graph and replayed, so that the host's path to the kernel does not count; the L2
cache is overwritten before every replay, outside the timed events. The calls take turns: every round times all of them, in an
order that is rotated and reversed from round to round, so that temperature and clock drift meet all of them alike. Only
numbers of one process compare. On a machine without a GPU the same code times plain calls with the host's clock.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

FLUSH_BYTES = 256 << 20  # several times the 50 to 60 MB of L2
SETTLE_S = 0.015  # untimed replays at the start of each turn: the power of the call before fades
MIN_REPLAYS, MAX_REPLAYS = 3, 400


class HostStopwatch:
    """Plain calls, timed with the host's clock."""

    def prepare(self, call: Callable[[], Any]) -> Callable[[], Any]:
        call()
        return call

    def measure(self, replay: Callable[[], Any], repeats: int) -> list[float]:
        """Microseconds of each of ``repeats`` runs."""
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            replay()
            times.append((time.perf_counter() - start) * 1e6)
        return times

    def synchronize(self) -> None:
        pass


class Replay:
    """A call captured into a CUDA graph; ``out`` is what the call returned while it was captured, rewritten by each replay."""

    def __init__(self, call: Callable[[], Any]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, allocates and picks algorithms outside the capture
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.call = call  # the graph holds addresses only; the call keeps its inputs alive
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = call()
        self.graph.replay()
        torch.cuda.synchronize()

    def __call__(self) -> Any:
        self.graph.replay()
        return self.out


class CudaStopwatch:
    """CUDA-graph replays, timed with events around each, L2 overwritten in between.

    What was overwritten still has to be written to memory, which the timed call pays for as it takes its place; ``clean`` reads
    other memory in between instead, so that the call finds nothing of its own and nothing to write.
    """

    def __init__(self, clean: bool = False) -> None:
        self.flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self.flushed_by = "reading" if clean else "overwriting"
        self.empty_l2 = self.flush.max if clean else self.flush.zero_

    def prepare(self, call: Callable[[], Any]) -> Callable[[], Any]:
        return Replay(call)

    def measure(self, replay: Callable[[], Any], repeats: int) -> list[float]:
        """Microseconds of each of ``repeats`` runs."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, end in events:
            self.empty_l2()
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def stopwatch(device: str) -> HostStopwatch | CudaStopwatch:
    return CudaStopwatch() if torch.device(device).type == "cuda" else HostStopwatch()


@dataclass
class Timing:
    """All samples of one call, and what the card did meanwhile (None where it cannot be read)."""

    samples_us: list[float] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    rounds: int = 0

    def percentile(self, share: float) -> float:
        ordered = sorted(self.samples_us)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def time_us(self) -> dict[str, float]:
        return {name: round(self.percentile(share), 2) for name, share in (("p20", 0.2), ("p50", 0.5), ("p80", 0.8))}

    @property
    def sm_clock_mhz(self) -> float | None:
        return round(statistics.median(self.clocks_mhz)) if self.clocks_mhz else None

    @property
    def power_w(self) -> float | None:
        return round(statistics.median(self.powers_w)) if self.powers_w else None


def order(names: list[str], round_: int) -> list[str]:
    """The turn order of a round: rotated by the round's number, every other round reversed."""
    shift = (round_ // 2) % max(len(names), 1)
    turned = names[shift:] + names[:shift]
    return turned[::-1] if round_ % 2 else turned


def interleave(
    watch: HostStopwatch | CudaStopwatch,
    replays: dict[str, Callable[[], Any]],
    *,
    rounds: int = 4,
    seconds: float = 0.4,
    sampler: Sampler | None = None,
) -> dict[str, Timing | Exception]:
    """Times every prepared call for about ``seconds`` in all, spread over ``rounds`` turns. A call that fails gives its error."""
    timings: dict[str, Timing | Exception] = {name: Timing() for name in replays}
    for round_ in range(rounds):
        for name in order(list(replays), round_):
            timing = timings[name]
            if isinstance(timing, Exception):
                continue
            try:
                estimate = _settle(watch, replays[name])
                repeats = max(MIN_REPLAYS, min(MAX_REPLAYS, round(seconds / rounds * 1e6 / max(estimate, 1.0))))
                begin = time.monotonic()
                timing.samples_us += watch.measure(replays[name], repeats)
                end = time.monotonic()
            except Exception as error:
                timings[name] = error
                continue
            timing.rounds += 1
            if sampler is not None:
                clocks, powers = sampler.between(begin, end)
                timing.clocks_mhz += clocks
                timing.powers_w += powers
    return timings


def _settle(watch: HostStopwatch | CudaStopwatch, replay: Callable[[], Any]) -> float:
    """Runs the call untimed for a while; returns an estimate of its time in microseconds."""
    estimate = statistics.median(watch.measure(replay, 3))
    left = SETTLE_S * 1e6 - 3 * estimate
    if left > 0:
        watch.measure(replay, min(MAX_REPLAYS, int(left / max(estimate, 1.0)) + 1))
    return estimate


class Sampler:
    """A thread that reads the SM clock and the board's power every few milliseconds; as a context manager.

    Reads through NVML where its library loads, else from ``nvidia-smi``, else not at all.
    """

    def __init__(self, device: int = 0, every_s: float = 0.02) -> None:
        self.samples: list[tuple[float, float, float]] = []  # host time, MHz, W
        self._device, self._every, self._stop = device, every_s, threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Sampler:
        read = _nvml(self._device)
        target, args = (self._poll, (read,)) if read else (self._listen, ())
        self._thread = threading.Thread(target=target, args=args, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._process is not None:
            self._process.terminate()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def between(self, begin: float, end: float) -> tuple[list[float], list[float]]:
        """(MHz, W) read from ``begin`` to ``end`` (``time.monotonic``); the nearest reading for a shorter interval."""
        samples = list(self.samples)
        inside = [s for s in samples if begin <= s[0] <= end]
        if not inside and samples:
            nearest = min(samples, key=lambda s: abs(s[0] - (begin + end) / 2))
            inside = [nearest] if begin - 0.1 <= nearest[0] <= end + 0.1 else []
        return [s[1] for s in inside], [s[2] for s in inside]

    def _poll(self, read: Callable[[], tuple[float, float]]) -> None:
        while not self._stop.wait(self._every):
            try:
                self.samples.append((time.monotonic(), *read()))
            except OSError:
                return

    def _listen(self) -> None:
        query = [
            "nvidia-smi",
            f"--id={self._device}",
            "--query-gpu=clocks.sm,power.draw",
            "--format=csv,noheader,nounits",
            "-lms",
            "50",
        ]
        try:
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self._stop.is_set():
                return
            try:
                clock, power = (float(x) for x in line.split(","))
            except ValueError:
                continue
            self.samples.append((time.monotonic(), clock, power))


class _FieldValue(ctypes.Structure):
    _fields_ = [
        ("field", ctypes.c_uint), ("scope", ctypes.c_uint), ("timestamp", ctypes.c_longlong), ("latency", ctypes.c_longlong),
        ("type", ctypes.c_uint), ("status", ctypes.c_uint), ("value", ctypes.c_ulonglong),
    ]  # fmt: skip


_SM_CLOCK, _INSTANT_POWER = 1, 186  # nvml.h: NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT (the plain reading is a mean over a second)


def _nvml(device: int) -> Callable[[], tuple[float, float]] | None:
    """A reader of (MHz, W) for the CUDA device, or None where NVML is missing."""
    try:
        lib = ctypes.CDLL("libnvidia-ml.so.1")
        if lib.nvmlInit_v2() != 0:
            return None
        handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()  # NVML does not follow CUDA_VISIBLE_DEVICES
        if (
            lib.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) != 0
            and lib.nvmlDeviceGetHandleByIndex_v2(device, ctypes.byref(handle)) != 0
        ):
            return None
    except (OSError, AttributeError, AssertionError, RuntimeError):
        return None

    def read() -> tuple[float, float]:
        clock, power, instant = ctypes.c_uint(), ctypes.c_uint(), _FieldValue(field=_INSTANT_POWER)
        if lib.nvmlDeviceGetClockInfo(handle, _SM_CLOCK, ctypes.byref(clock)) != 0:
            raise OSError("NVML gives no SM clock")
        if lib.nvmlDeviceGetFieldValues(handle, 1, ctypes.byref(instant)) == 0 and instant.status == 0:
            return float(clock.value), (instant.value & 0xFFFFFFFF) / 1e3
        if lib.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power)) != 0:
            raise OSError("NVML gives no power")
        return float(clock.value), power.value / 1e3

    try:
        read()
    except OSError:
        return None
    return read


def host_cost_us(call: Callable[[], Any], synchronize: Callable[[], None], *, bursts: int = 15, calls: int = 200) -> list[float]:
    """Microseconds that the host spends in one eager call, one value per burst.

    A burst of ``calls`` calls is issued without waiting, few enough to fit the launch queue, then the device is drained
    outside the clock.
    """
    for _ in range(10):
        call()
    synchronize()
    times = []
    for _ in range(bursts):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        synchronize()
    return times
