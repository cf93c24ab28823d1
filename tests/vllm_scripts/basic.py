"""Prompts in, texts out."""

import argparse

from vllm import LLM, SamplingParams

PROMPTS = ["The history of the city", "def main():\n    ", "Once upon a time there was a"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    args = parser.parse_args()

    llm = LLM(
        model=args.model,
        dtype="float",
        max_model_len=256,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        tensor_parallel_size=1,
        seed=0,
        trust_remote_code=False,
    )
    sampling_params = SamplingParams(temperature=0.0, top_p=0.95, max_tokens=16)
    outputs = llm.generate(PROMPTS, sampling_params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, Output: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
