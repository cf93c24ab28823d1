"""Several continuations of a prompt, log-probabilities, and a seed."""

import argparse

from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    args = parser.parse_args()

    llm = LLM(args.model, dtype="float32", max_model_len=256, max_num_seqs=8, enable_prefix_caching=True)
    params = SamplingParams(
        n=3,
        temperature=0.8,
        top_p=0.95,
        top_k=50,
        seed=1234,
        max_tokens=8,
        logprobs=2,
        stop=["\n\n"],
        presence_penalty=0.2,
    )
    [output] = llm.generate("The capital of the country", params, use_tqdm=False)
    for completion in output.outputs:
        print(f"{completion.index}: {completion.text!r} ({completion.finish_reason})")
        for token, candidates in zip(completion.token_ids, completion.logprobs):
            assert candidates[token].logprob <= 0.0
            assert candidates[token].decoded_token is not None
        print("cumulative:", round(completion.cumulative_logprob, 3))

    again = llm.generate("The capital of the country", params, use_tqdm=False)[0]
    print("reproducible:", [one.text for one in again.outputs] == [one.text for one in output.outputs])


if __name__ == "__main__":
    main()
