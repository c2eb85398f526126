"""What a daemon's metrics say of its security."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstrata.transfer.security.admission import REFUSALS
from kvstrata.transfer.security.opened import Security


def channel_metrics(prefix: str, counts: Mapping[str, int]) -> Iterable[Metric]:
    """Of an :class:`Admission`."""
    refused = CounterMetricFamily(f"{prefix}_channel_refused", "Frames and peers refused, by reason", labels=["reason"])
    for reason in REFUSALS:
        refused.add_metric([reason], counts.get(reason, 0))
    yield refused


def security_metrics(prefix: str, security: Security) -> Iterable[Metric]:
    """``prefix``: ``kvstrata_master`` or ``kvstrata_node``. Nothing of what is off."""
    if security.tls is not None:
        text = "When the certificate ends, in Unix seconds"
        ends = security.tls.expires()
        yield GaugeMetricFamily(f"{prefix}_certificate_expires_seconds", text, value=ends)
    if security.gate is not None:
        text = "Calls of gRPC and HTTP refused, by reason"
        refused = CounterMetricFamily(f"{prefix}_auth_refused", text, labels=["reason"])
        for reason, count in security.gate.refused().items():
            refused.add_metric([reason], count)
        yield refused
    yield GaugeMetricFamily(f"{prefix}_security_warnings", "What health warns of", value=len(security.warnings()))
