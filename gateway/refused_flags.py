"""The flags of sglang-router that pdgate does not have, each with what to do instead. Pure."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class Refuse(argparse.Action):
    """A flag that operators may bring along from sglang-router: ignoring it would change what they asked for."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string} is a flag of sglang-router that pdgate does not have (yet): {self.const}")


_REFUSED = {
    "remove it": """
        --max-idle-secs --assignment-mode --dp-aware --enable-igw --mini-lb --prometheus-duration-buckets
        --request-id-headers --mcp-config-path --enable-trace --otlp-traces-endpoint""",
    "the cost policy needs no thresholds; remove it": """
        --cache-threshold --balance-abs-threshold --balance-rel-threshold --bucket-adjust-interval-secs
        --eviction-interval-secs --max-tree-size""",
    "name servers with --prefill and --decode, and remove it": """
        --worker-urls --service-discovery --selector --service-discovery-port --service-discovery-namespace
        --prefill-selector --decode-selector""",
    "pdgate starts at once and takes servers as they come up; remove it": """
        --worker-startup-timeout-secs --worker-startup-check-interval""",
    "logs go to standard error; redirect them, and remove it": "--log-dir",
    "metrics are at /metrics of --port; remove it": "--prometheus-port --prometheus-host",
    "use --queue-max-requests": "--queue-size",
    "pdgate bounds what waits, not what runs: see --queue-max-requests; remove it": "--max-concurrent-requests",
    "use --max-attempts": "--retry-max-retries",
    "use --max-attempts 1": "--disable-retries",
    "see --max-attempts; remove it": """
        --retry-initial-backoff-ms --retry-max-backoff-ms --retry-backoff-multiplier --retry-jitter-factor""",
    "failures are judged leg by leg; remove it": """
        --cb-failure-threshold --cb-success-threshold --cb-timeout-duration-secs --cb-window-duration-secs
        --disable-circuit-breaker""",
    "use --probe-interval-secs": "--health-check-interval-secs",
    "see --probe-interval-secs; remove it": """
        --health-failure-threshold --health-success-threshold --health-check-timeout-secs --health-check-endpoint
        --disable-health-check""",
    "use --tokenizer-path": "--model-path",
    "remove it: prompts are hashed as they are tokenized, which is quick": """
        --tokenizer-cache-enable-l0 --tokenizer-cache-l0-max-entries --tokenizer-cache-enable-l1
        --tokenizer-cache-l1-max-memory""",
    "set it on the engines, and remove it": "--reasoning-parser --tool-call-parser",
    "all engines are SGLang; remove it": "--backend",
    "pdgate keeps no conversations; remove it": """
        --history-backend --oracle-wallet-path --oracle-tns-alias --oracle-connect-descriptor --oracle-username
        --oracle-password --oracle-pool-min --oracle-pool-max --oracle-pool-timeout-secs --postgres-db-url
        --postgres-pool-max --redis-pool-max --redis-retention-days""",
    "end TLS in front of pdgate, and remove it": """
        --client-cert-path --client-key-path --ca-cert-paths --tls-cert-path --tls-key-path""",
    "put access control in front of pdgate, and remove it": """
        --cors-allowed-origins --rate-limit-tokens-per-second --control-plane-api-keys --control-plane-audit-enabled
        --jwt-issuer --jwt-audience --jwt-jwks-uri --jwt-role-mapping""",
}
REFUSED_FLAGS = {flag: advice for advice, flags in _REFUSED.items() for flag in flags.split()}
"""Every flag of sglang-router 0.3.2 that is not ours, and what to do instead."""
