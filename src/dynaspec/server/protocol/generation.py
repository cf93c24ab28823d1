"""What completions and chats have in common: fields of requests, the form of the output among them, and what answers
say of tokens, drafts and times.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from dynaspec.contract.sampling_params import SpeculationMetrics

from .base import (
    LIST,
    OBJECT,
    TEXT,
    AddressedRequest,
    Integers,
    Natural,
    Positive,
    ReplyModel,
    RequestModel,
    Unsupported,
    Whole,
    extra,
    json_kind,
)


class PromptTokensDetails(ReplyModel):
    """Where a prompt's tokens came from."""

    cached_tokens: int = Field(description="Prompt tokens found in the prefix cache.")


class Usage(ReplyModel):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


TokenSource = Literal["draft", "target"]
"""Where a token comes from: a draft that the target accepted, or the target itself."""

DraftLength = Annotated[int, Field(ge=0, le=1024), Whole]


class SpeculationOptions(RequestModel):
    """What a request asks for about its drafts. None of it changes what is generated, only how fast."""

    max_draft_tokens: DraftLength | None = Field(None, description="Most tokens drafted at once; 0 = no speculation.")
    expected_acceptance: float | None = Field(
        None, ge=0, le=1, description="Share of drafted tokens expected to be accepted: where a learning policy starts."
    )
    metrics: SpeculationMetrics | None = Field(
        None,
        description="What the answer says of the drafts: nothing, totals, or also counts by position and by step and, "
        "in streams, the source of each token.",
    )


class SpeculationReport(ReplyModel):
    """What became of one choice's drafts."""

    steps: int = Field(description="Target passes that gave tokens, but for the one that completed the prompt.")
    drafts: int = Field(description="Steps with at least one drafted token.")
    drafted: int = Field(description="Tokens drafted.")
    verified: int = Field(description="Drafted tokens that the target tested.")
    accepted: int = Field(description="Drafted tokens that became output.")
    mean_acceptance_length: float | None = Field(
        description="Tokens that a draft led to, the target's own included; null without drafts."
    )
    draft_acceptance_rate: float | None = Field(description="Accepted / drafted; null without drafts.")
    drafted_per_pos: tuple[int, ...] | None = extra("Drafts that have a token at each position, from 0.")
    accepted_per_pos: tuple[int, ...] | None = extra("Drafts whose token at each position was accepted.")
    per_step: tuple[tuple[int, int], ...] | None = extra(
        "(drafted, accepted) of every step in order; (0, 0) for plain ones."
    )


class WrittenToken(ReplyModel):
    """A token of a delta."""

    text: str = Field(description="The text that it added; empty for special tokens and parts of a character.")
    source: TokenSource = Field(description="Where it comes from.")


class SpeculativeDecodingMetrics(ReplyModel):
    """What became of the drafts of the one continuation. Names and meaning are vLLM's."""

    mean_acceptance_length: float = Field(description="1 + num_accepted_draft_tokens / num_spec_steps.")
    draft_acceptance_rate: float = Field(description="num_accepted_draft_tokens / num_draft_tokens.")
    acceptance_histogram: list[int] = Field(description="Steps that accepted 0, 1, 2, … draft tokens.")
    num_spec_steps: int = Field(description="Steps with at least one drafted token.")
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int = Field(description="The longest draft that is configured.")
    per_step_accepted: list[int] | None = extra("Detailed: accepted tokens of each of these steps.")
    per_step_drafted: list[int] | None = extra("Detailed: drafted tokens of each of these steps.")


class PerRequestMetrics(ReplyModel):
    """Of a request with one continuation. Names and meaning are vLLM's."""

    time_to_first_token_ms: float | None = extra("From being scheduled to the first token.")
    generation_time_ms: float | None = extra("From the first token to the last.")
    queue_time_ms: float | None = extra("From arrival to being scheduled.")
    mean_itl_ms: float | None = extra("Mean time between two tokens; not for a single one.")
    tokens_per_second: float | None = extra("Output tokens by the time from being scheduled to the end.")
    speculative_decoding: SpeculativeDecodingMetrics | None = extra("If the engine speculates.")


class Timings(ReplyModel):
    """Of a request with one continuation, up to now. Names and meaning are those of llama.cpp's server."""

    cache_n: int = Field(description="Prompt tokens found in the prefix cache.")
    prompt_n: int = Field(description="Prompt tokens computed.")
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int = Field(description="Output tokens.")
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | None = extra("Tokens drafted; only if there were drafts.")
    draft_n_accepted: int | None = extra("Of these, accepted.")


def _schema_kind(value: object) -> str | None:
    return json_kind(value) if isinstance(value, str | dict) else None


JsonSchema = Annotated[
    Annotated[str, Tag(TEXT), Field(min_length=1)] | Annotated[dict[str, Any], Tag(OBJECT)],
    Discriminator(
        _schema_kind,
        custom_error_type="json_schema",
        custom_error_message="Expected a JSON schema, as an object or as text",
    ),
]
"""A JSON schema, as an object or as text."""
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=2**16)]


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """A JSON object, whatever it holds."""

    type: Literal["json_object"]


class NamedJsonSchema(RequestModel):
    """A JSON schema with a name."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Of no effect.")
    description: str | None = Field(None, description="Of no effect; the model sees the prompt alone.")
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema that the output follows.")
    strict: bool | None = Field(None, description="Of no effect: the output always follows the schema.")


class JsonSchemaFormat(RequestModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedJsonSchema


def _format(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _format,
        custom_error_type="response_format",
        custom_error_message="Expected an object whose type is 'text', 'json_object' or 'json_schema'",
    ),
]


class StructuredOutputs(RequestModel):
    """vLLM's ``structured_outputs``: exactly one form."""

    json_: JsonSchema | None = Field(None, alias="json", description="JSON that follows this schema.")
    regex: str | None = Field(None, min_length=1, description="Text that matches this regular expression as a whole.")
    choice: Choices | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(None, min_length=1, description="Text of this grammar, in Lark's syntax or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    whitespace_pattern: str | None = Field(None, description="What may stand between the parts of JSON.")
    disable_any_whitespace: bool = Field(False, description="Nothing may stand between the parts of JSON.")
    disable_fallback: bool = Field(False, description="Of no effect: there is only one grammar engine.")
    disable_additional_properties: Annotated[
        Literal[False], Unsupported("schemas are taken at their word; expected additionalProperties in the schema")
    ] = False
    structural_tag: Annotated[None, Unsupported("structural tags are not offered; expected another form")] = None


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
MAX_SEED = 2**63 - 1
TopLogprobs = Annotated[int, Field(ge=0, le=20), Whole]
Copies = Annotated[int, Field(ge=1, le=128), Whole]

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
"""``abort``: the server ended it, such as to shut down."""
StopReason = int | str | None

Stop = Annotated[
    Annotated[str, Tag(TEXT), Field(min_length=1, max_length=1024)]
    | Annotated[list[StopString], Tag(LIST), Field(max_length=64)],
    Discriminator(json_kind),
]


class StreamOptions(RequestModel):
    """What a stream says besides the text."""

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Say the usage so far in every chunk.")
    include_obfuscation: bool | None = Field(None, description="Of no effect: chunks are not padded.")


class SamplingFields(RequestModel):
    """How tokens are chosen, and when to stop. Null stands for the default everywhere."""

    n: Copies | None = Field(None, description="Independent continuations of each prompt; default 1.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 = greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keep tokens while the mass before them is below this.")
    top_k: Annotated[int, Field(ge=-1, lt=2**31), Whole] | None = Field(
        None, description="Keep the k most probable tokens; 0 or -1 = all."
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="Keep tokens with at least this share of the largest probability."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Against tokens that the output contains.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="The same for each time they occur.")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="Against tokens of prompt and output; 1 = none."
    )
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = Field(None, max_length=1024, description="Added to logits, by token id.")
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED), Whole] | None = Field(
        None, description="Makes sampling a function of prompt, parameters and seed alone, with or without speculation."
    )
    stop: Stop | None = Field(None, description="The output ends before the first of these texts.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024), Integers] | None = Field(
        None, description="The output ends with any of them."
    )
    include_stop_str_in_output: bool = Field(False, description="The output ends behind the stop text instead.")
    ignore_eos: bool = Field(False, description="Go on after the model's end-of-sequence token.")
    min_tokens: Natural = Field(0, description="No end before this many tokens.")
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        None, max_length=256, description="Texts that may not be produced."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=2**18), Integers] | None = Field(
        None, description="Only these tokens may be produced."
    )
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")


class FormFields(RequestModel):
    """What form the output must have: at most one of these fields."""

    response_format: ResponseFormat | None = Field(None, description="OpenAI's way to ask for JSON.")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's way to ask for any form.")
    guided_json: JsonSchema | None = Field(None, description="vLLM's older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, min_length=1, description="Older name of structured_outputs.regex.")
    guided_choice: Choices | None = Field(None, description="Older name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, min_length=1, description="Older name of structured_outputs.grammar.")
    guided_whitespace_pattern: str | None = Field(
        None, description="Older name of structured_outputs.whitespace_pattern; with guided_json alone."
    )
    guided_decoding_backend: Annotated[
        Literal["auto"] | None, Unsupported("there is only one grammar engine; expected 'auto' or null")
    ] = None


class ExtraFields(RequestModel):
    """vLLM's and dynaspec's additions to OpenAI's fields."""

    prompt_logprobs: TopLogprobs | None = Field(
        None, description="Report this many most probable tokens at the prompt's positions."
    )
    truncate_prompt_tokens: Positive | None = Field(
        None, description="Keep only the last this many tokens of the prompt."
    )
    return_token_ids: bool | None = Field(None, description="Answers carry the ids of prompt and output tokens.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="Requests with different ones share neither prefix cache nor texts to draft from.",
    )
    request_id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="What the answer's id ends with; one of its own at a time.",
    )
    speculation: SpeculationOptions | None = Field(None, description="Options of this request's drafts.")
    max_draft_tokens: DraftLength | None = Field(None, description="Most tokens drafted at once; 0 = no speculation.")
    timings_per_token: bool | None = Field(
        None, description="As llama.cpp's server has it: answers, and every chunk of a stream, carry timings."
    )


class WithoutMeaning(RequestModel):
    """Accepted, so that clients need not be changed: nothing here depends on them, or they only allow the default."""

    user: str | None = Field(None, description="Of no effect.")
    metadata: dict[str, str] | None = Field(None, description="Of no effect.")
    store: bool | None = Field(None, description="Of no effect: nothing is stored.")
    service_tier: str | None = Field(None, description="Of no effect.")
    safety_identifier: str | None = Field(None, description="Of no effect.")
    prompt_cache_key: str | None = Field(None, description="Of no effect: prompts that begin alike share their cache.")
    prompt_cache_retention: str | None = Field(None, description="Of no effect.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Of no effect.")

    spaces_between_special_tokens: Annotated[
        Literal[True] | None, Unsupported("text is what the tokenizer decodes; expected true or null")
    ] = None
    use_beam_search: Annotated[
        Literal[False] | None, Unsupported("there is no beam search here; expected false or null")
    ] = None
    length_penalty: Annotated[
        Annotated[float, Field(ge=1, le=1)] | None,
        Unsupported("it belongs to beam search, which is not offered; expected 1 or null"),
    ] = None
    priority: Annotated[Literal[0] | None, Unsupported("requests are served as they come; expected 0 or null")] = None
    return_tokens_as_token_ids: Annotated[
        Literal[False] | None, Unsupported("ids come with return_token_ids; expected false or null")
    ] = None
    lora_request: Annotated[None, Unsupported("adapters are not available in this version; expected null")] = None
    lora_path: Annotated[None, Unsupported("adapters are not available in this version; expected null")] = None
    logits_processors: Annotated[None, Unsupported("requests cannot bring code; expected null")] = None
    kv_transfer_params: Annotated[None, Unsupported("KV is not moved between servers; expected null")] = None
    mm_processor_kwargs: Annotated[None, Unsupported("the model reads text alone; expected null")] = None
    vllm_xargs: Annotated[None, Unsupported("there is nothing that they could set; expected null")] = None


class GenerationRequest(SamplingFields, FormFields, ExtraFields, WithoutMeaning, AddressedRequest):
    """All fields that both kinds of request have."""

    stream: bool | None = Field(False, description="Answer in chunks, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")


class PromptLogprob(ReplyModel):
    """One candidate at a position of the prompt."""

    logprob: float
    rank: int = Field(description="1 = the most probable token.")
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Token id → candidate, for each position; null for the first."""
