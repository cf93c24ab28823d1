"""Speculative decoding with prompt lookup or a draft model, and what it did."""

import argparse

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.metrics.reader import Counter, Vector

PROMPTS = ["one two three one two three one two", "The history of the city", "Once upon a time there was a"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--method", choices=["ngram", "draft_model"], required=True)
    parser.add_argument("--num-spec-tokens", type=int, default=3)
    args = parser.parse_args()

    speculative_config = {"method": args.method, "num_speculative_tokens": args.num_spec_tokens}
    if args.method == "ngram":
        speculative_config |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    else:
        speculative_config |= {"model": args.draft_model}

    llm = LLM(
        model=args.model,
        dtype="float32",
        enable_chunked_prefill=True,
        enforce_eager=False,
        gpu_memory_utilization=0.5,
        speculative_config=speculative_config,
        disable_log_stats=False,
        max_model_len=256,
        max_num_seqs=4,
    )
    tokenizer = llm.get_tokenizer()
    prompts = [TokensPrompt(prompt_token_ids=tokenizer.encode(text)) for text in PROMPTS]
    outputs = llm.generate(prompts, sampling_params=SamplingParams(temperature=0, max_tokens=32))
    for output in outputs:
        print(f"Output: {output.outputs[0].text!r}")

    num_drafts = num_draft_tokens = num_accepted_tokens = 0
    acceptance_counts = [0] * args.num_spec_tokens
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            assert isinstance(metric, Counter)
            num_drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_draft_tokens":
            assert isinstance(metric, Counter)
            num_draft_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            assert isinstance(metric, Counter)
            num_accepted_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            for position, value in enumerate(metric.values):
                acceptance_counts[position] += value
    print(f"num_drafts: {num_drafts}")
    print(f"num_draft_tokens: {num_draft_tokens}")
    print(f"num_accepted_tokens: {num_accepted_tokens}")
    print(f"mean acceptance length: {1 + num_accepted_tokens / num_drafts if num_drafts else 1:.2f}")
    for position, count in enumerate(acceptance_counts):
        print(f"acceptance at token {position}: {count / num_drafts if num_drafts else 0:.2f}")


if __name__ == "__main__":
    main()
