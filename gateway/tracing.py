"""One sampled span per request, and the W3C trace context that goes to both legs so that their spans join.

A client's own sampling decision is followed; without one, one request in a hundred is sampled (a recorded span costs
32 µs). Spans go to whatever provider the operator has installed; without any they serve the context alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_SAMPLE_RATIO = 0.01
_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans of one gateway."""

    def __init__(self) -> None:
        installed = trace.get_tracer_provider()
        is_sdk = isinstance(installed, TracerProvider)
        provider = installed if is_sdk else TracerProvider(sampler=ParentBased(TraceIdRatioBased(_SAMPLE_RATIO)))
        self._tracer = provider.get_tracer("pdgate")

    def begin(self, api: str, headers: Mapping[str, str]) -> Span:
        """The span of a request; the caller ends it."""
        parent = _propagator.extract({name.lower(): value for name, value in headers.items()})
        return self._tracer.start_span(f"POST {api}", context=parent, kind=SpanKind.SERVER)


def leg_headers(span: Span) -> dict[str, str]:
    """The headers that make an engine's spans children of this one."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, context=trace.set_span_in_context(span))
    return headers
