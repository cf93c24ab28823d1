"""Every metric of an engine."""

import argparse

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    args = parser.parse_args()

    llm = LLM(model=args.model, dtype="float32", max_model_len=256, disable_log_stats=False)
    llm.generate(
        ["Hello, my name is", "The future of AI is"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
    )
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Vector):
            print(f"{metric.name} (vector) = {metric.values}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name} (histogram): sum = {metric.sum}, count = {metric.count}")
            assert metric.buckets["+Inf"] == metric.count


if __name__ == "__main__":
    main()
