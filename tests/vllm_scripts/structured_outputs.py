"""Outputs of a given form: a choice, a regular expression, JSON, a grammar."""

import argparse
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

GRAMMAR = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " column " = " number
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
number ::= "1" | "2"
"""


class CarType(str, Enum):
    sedan = "sedan"
    suv = "SUV"


class CarDescription(BaseModel):
    model_config = ConfigDict(extra="forbid")

    brand: str = Field(max_length=10)
    car_type: CarType


FORMS = {
    "choice": ("Is this good or bad? It is wonderful. ", StructuredOutputsParams(choice=["Positive", "Negative"])),
    "regex": ("The address is ", StructuredOutputsParams(regex=r"[a-z]{1,8}@[a-z]{1,8}\.com")),
    "json": (
        "The car is ",
        StructuredOutputsParams(json=CarDescription.model_json_schema(), disable_any_whitespace=True),
    ),
    "grammar": ("The query is ", StructuredOutputsParams(grammar=GRAMMAR)),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    args = parser.parse_args()

    llm = LLM(model=args.model, dtype="float32", max_model_len=256)
    for name, (prompt, form) in FORMS.items():
        sampling_params = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=form)
        outputs = llm.generate(prompts=prompt, sampling_params=sampling_params)
        print(f"{name}: {outputs[0].outputs[0].text}")


if __name__ == "__main__":
    main()
