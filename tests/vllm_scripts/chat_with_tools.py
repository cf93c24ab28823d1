"""A conversation with a function that the model may call."""

import argparse
import json

from vllm import LLM
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]


def get_current_weather(city: str, unit: str) -> str:
    return f"20 degrees {unit} in {city}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    args = parser.parse_args()

    llm = LLM(args.model, dtype="float32", max_model_len=1024, limit_mm_per_prompt={"image": 0})
    form = StructuredOutputsParams(regex=r'\{"city": "[A-Z][a-z]{2,9}", "unit": "[CF]"\}')
    params = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=form)
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    [output] = llm.chat(messages, params, tools=TOOLS, use_tqdm=False)
    arguments = json.loads(output.outputs[0].text)
    print("called with", sorted(arguments))

    result = get_current_weather(**arguments)
    messages += [
        {"role": "assistant", "content": output.outputs[0].text},
        {"role": "user", "content": f"The weather: {result}"},
    ]
    outputs = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=12), tools=TOOLS)
    print(repr(outputs[0].outputs[0].text))


if __name__ == "__main__":
    main()
