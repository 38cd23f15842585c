"""Record what a run does: spans and counters, metrics, and their export to trace viewers, collectors and trackers.

Recorder (worker) --SpanBlock--> TraceStore (controller) --> trace/spans.msgpack --> otel.jsonl, Perfetto, OTLP
MetricsWriter (controller)                               --> metrics.jsonl, tensorboard/ --> learning curve, trackers
"""
