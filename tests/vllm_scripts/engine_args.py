"""Options collected from a command line, and an engine made of them."""

from argparse import ArgumentParser

from vllm import LLM, EngineArgs, SamplingParams


def main() -> None:
    parser = EngineArgs.add_cli_args(ArgumentParser())
    parser.add_argument("--max-tokens", type=int, default=8)
    args = parser.parse_args()
    engine_args = EngineArgs.from_cli_args(args)
    llm = LLM(**vars(engine_args))
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    for output in llm.generate(["Hello, my name is", "The capital of France is"], params):
        print(len(output.outputs[0].token_ids), output.prompt)


if __name__ == "__main__":
    main()
