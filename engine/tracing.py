"""Named ranges around a step, its passes, layers and ops, for profilers.

Nothing here is in the way of an engine that does not ask for it: whoever builds one wraps the
device, the model and the ops, and the wrapped ones call a tracer. Within a CUDA graph the ranges
show while it is captured; a replay is one range of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from .device import Device, Graph
from .models.qwen3_5 import Qwen35Model
from .models.weights_layout import ModelWeights
from .ops.base import Ops


class Tracer(Protocol):
    """Ranges nest: `end` closes the one that began last."""

    def begin(self, name: str, args: tuple[Any, ...]) -> None:
        """`args` of the op; () for other ranges."""

    def end(self) -> None: ...


class Tracing:
    """Wraps the parts of one engine."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._in_layer = False

    def device(self, device: Device) -> Device:
        """Submitted work is a "step", the launch of a graph a "graph"."""

        def submit(work: Callable[[], Any]) -> Any:
            return device.submit(self._ranged("step", work))

        graphs = device.graphs
        if graphs is None:
            return cast(Device, _Replaced(device, submit=submit))

        def capture(work: Callable[[], None]) -> Graph:
            graph = graphs.capture(work)
            return cast(Graph, _Replaced(graph, launch=self._ranged("graph", graph.launch)))

        traced = _Replaced(graphs, capture=capture)
        return cast(Device, _Replaced(device, submit=submit, graphs=traced))

    def model(self, model: Qwen35Model) -> Qwen35Model:
        """Its two passes, "decode" and "prefill"."""
        passes = {name: self._ranged(name, getattr(model, name)) for name in ("decode", "prefill")}
        return cast(Qwen35Model, _Replaced(model, **passes))

    def ops(self, ops: Ops, weights: ModelWeights) -> Ops:
        """Each op by its name, in "layer N" where it belongs to one: a layer begins with the op
        that is given its first norm, and ends with the next, the model's norm or the pass."""
        starts: dict[int, str | None] = {id(weights.norm): None}
        starts |= {id(layer.input_norm): f"layer {i}" for i, layer in enumerate(weights.layers)}
        names = [name for name, value in vars(Ops).items() if callable(value) and name[0] != "_"]
        names.remove("num_segments")  # a question, not an op
        traced = {name: self._op(name, getattr(ops, name), starts) for name in names}
        return cast(Ops, _Replaced(ops, **traced))

    def _op(
        self, name: str, op: Callable[..., None], starts: dict[int, str | None]
    ) -> Callable[..., None]:
        tracer = self._tracer

        def call(*args: Any) -> None:
            for argument in args:
                if id(argument) in starts:
                    self._end_layer()
                    layer = starts[id(argument)]
                    if layer is not None:
                        tracer.begin(layer, ())
                        self._in_layer = True
            tracer.begin(name, args)
            try:
                op(*args)
            finally:
                tracer.end()

        return call

    def _end_layer(self) -> None:
        if self._in_layer:
            self._in_layer = False
            self._tracer.end()

    def _ranged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._tracer.begin(name, ())
            try:
                return function(*args)
            finally:
                self._end_layer()
                self._tracer.end()

        return call


class _Replaced:
    """`target` with some of its members replaced."""

    def __init__(self, target: Any, **members: Any) -> None:
        self._target = target
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)
