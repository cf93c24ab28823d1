"""Prompts as token ids, each with parameters of its own."""

import argparse

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    args = parser.parse_args()

    llm = LLM(args.model, dtype=torch.float32, max_model_len=256, max_num_batched_tokens=256, disable_log_stats=True)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Once upon a time", add_special_tokens=False)
    prompts = [TokensPrompt(prompt_token_ids=ids), TextPrompt(prompt="Once upon a time"), "Once upon a time"]
    params = [SamplingParams(temperature=0, max_tokens=length) for length in (4, 8, 12)]
    outputs = llm.generate(prompts, sampling_params=params, lora_request=None)
    for output in outputs:
        whole = output.prompt_token_ids + output.outputs[0].token_ids + [tokenizer.eos_token_id]
        print(len(output.outputs[0].token_ids), repr(tokenizer.decode(whole, skip_special_tokens=True)))


if __name__ == "__main__":
    main()
