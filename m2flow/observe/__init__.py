"""What a run leaves to be looked at: spans, metrics, traces and the curve.

Recorder (worker) --SpanBlock--> TraceStore (controller) --> trace/spans.msgpack --> otel.jsonl, Perfetto
MetricsWriter (controller)                               --> metrics.jsonl, tensorboard/ --> the learning curve
"""
