"""Metrics in Prometheus' text format, with the names that vLLM and inference gateways use.

poss:num_requests_waiting            gauges: requests in the queue, decoded, share of slots in use
poss:num_requests_running
poss:kv_cache_usage_perc
poss:time_to_first_token_seconds     histograms, from the arrival of a request
poss:time_per_output_token_seconds
poss:e2e_request_latency_seconds
poss:prefix_cache_queries_total      counters: tokens of prompts; those that were not read, since
poss:prefix_cache_hits_total         earlier prompts began with them
poss:spec_decode_num_accepted_tokens_per_pos_total     counter by position, the first is 0
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from poss_jax.engine.scheduler import Scheduler

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Metrics of one server.

    Attributes:
      registry: what /metrics shows.
      first_token: seconds from the arrival of a request to its first token.
      per_token: seconds per token after the first.
      whole: seconds from arrival to the end.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.registry = CollectorRegistry()
        self.registry.register(self)  # type: ignore[arg-type]

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(f"poss:{name}", about, buckets=_BUCKETS, registry=self.registry)

        self.first_token = histogram("time_to_first_token_seconds", "From arrival to first token")
        self.per_token = histogram("time_per_output_token_seconds", "Per token after the first")
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end")

    def collect(self) -> Iterator[Metric]:
        """Reads the scheduler's counts."""
        scheduler, stats = self._scheduler, self._scheduler.stats
        running, slots = scheduler.num_running, scheduler.num_slots
        gauges = [
            ("num_requests_waiting", "Requests in the queue", scheduler.num_waiting),
            ("num_requests_running", "Requests that are read or decoded", running),
            ("kv_cache_usage_perc", "Share of slots in use, 0 to 1", min(running / slots, 1.0)),
        ]
        for name, about, value in gauges:
            yield GaugeMetricFamily(f"poss:{name}", about, value)
        accepted = dict(stats.accepted)
        counters = [
            ("prompt_tokens", "Tokens of prompts", stats.prompt_tokens),
            ("prefix_cache_queries", "Tokens of prompts, cached or not", stats.prompt_tokens),
            ("prefix_cache_hits", "Tokens of prompts that were cached", stats.cached_tokens),
            ("generation_tokens", "Tokens of answers", stats.tokens),
            ("decoding_rounds", "Rounds of the whole batch", stats.rounds),
            ("compilations", "Programs compiled after the warm-up", stats.compilations),
            ("spec_decode_num_drafts", "Trees drafted", stats.drafts),
            ("spec_decode_num_draft_tokens", "Positions drafted", stats.drafted),
            ("spec_decode_num_accepted_tokens", "Drafts accepted", sum(accepted.values())),
        ]
        for name, about, value in counters:
            yield CounterMetricFamily(f"poss:{name}", about, value)
        name, about = "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position"
        by_position = CounterMetricFamily(f"poss:{name}", about, labels=["position"])
        for position, count in sorted(accepted.items()):
            by_position.add_metric([str(position - 1)], count)
        yield by_position
        ended = CounterMetricFamily("poss:request_success", "Answers", labels=["finished_reason"])
        for reason, count in dict(stats.finished).items():
            ended.add_metric([reason], count)
        yield ended
